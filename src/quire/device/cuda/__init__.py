"""CUDA kernels: products of packed weights for few rows, and by experts."""
