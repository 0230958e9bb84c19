"""Runs a step on a CPU as a few segments of its program, each one call of the compiled kernels."""
