"""Operations and kernels of the devices that MLX runs on. `device.py` is the only entry point."""
