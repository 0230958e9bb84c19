"""Weight files: formats, tensor names, packing, adapters and loading."""
