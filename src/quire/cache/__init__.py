"""The KV cache: specs, block manager and prefix index in pure Python; pools of MLX arrays."""
