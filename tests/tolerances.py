"""How far a kernel's result may be from its reference, which is given the same inputs in float32.

As a share of the largest value that is averaged or summed.
"""

TOLERANCE = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}
