"""CUDA kernels: products of packed weights, experts, codes of KV blocks, and graph launches."""
