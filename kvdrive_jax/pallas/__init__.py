"""Kernels: one folder each, the XLA specification in ``reference``, the choice in ``api``."""
