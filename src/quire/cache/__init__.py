"""What is kept between steps: specs, block manager and prefix index (pure Python), pools (MLX)."""
