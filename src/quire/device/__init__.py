"""What MLX runs on, and what Quire adds to it: `device` is the one seam to it."""
