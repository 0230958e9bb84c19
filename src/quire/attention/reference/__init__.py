"""The reference: blocks are gathered, then multiplied by MLX. Supports everything, on any
device.
"""

from quire.attention.reference.backend import ReferenceBackend as ReferenceBackend
