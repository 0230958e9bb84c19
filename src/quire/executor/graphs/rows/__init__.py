"""Generates the kernels of regions of rows: elements, gates, norms, sums and look-ups."""
