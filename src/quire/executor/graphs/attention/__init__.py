"""Records attention: KV pools, the kernels over them, and the keys that rows choose."""
