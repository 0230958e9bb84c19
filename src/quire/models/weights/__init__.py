"""Weight files: formats, tensor names, quantisation, adapters and loading."""
