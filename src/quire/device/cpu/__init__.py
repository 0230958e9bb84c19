"""Kernels for CPUs: exact in any company, at the speed of memory. Optional; see `build`."""
