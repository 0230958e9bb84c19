"""Where paged attention kernels go: one source for Metal and CUDA, held against the reference."""
