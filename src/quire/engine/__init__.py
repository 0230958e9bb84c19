"""The loop that serves: engine and runner in the process that owns MLX, client and service out."""
