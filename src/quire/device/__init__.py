"""What MLX runs on, and what Quire adds to it."""
