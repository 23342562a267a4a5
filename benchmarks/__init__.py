"""Measurements, each run as `python -m benchmarks.NAME`; results go to benchmarks/results/."""
