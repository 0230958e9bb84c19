"""Computes programs as CUDA graphs of kernels."""
