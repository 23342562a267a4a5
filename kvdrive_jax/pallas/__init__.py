"""Kernels: one folder each, with the XLA specification in ``reference`` and the choice in ``api``."""
