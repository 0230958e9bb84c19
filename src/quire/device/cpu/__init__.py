"""Kernels for CPUs: a row's bits do not depend on its batch. Optional; see `build`."""
