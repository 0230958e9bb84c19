"""Device memory for the decoded blocks that a step's prompts read."""

from __future__ import annotations

import mlx.core as mx

from quire.cache.specs import KVLayout, KVSpec
from quire.executor.graphs import device_memory

COMMON = 0
"""Number of the workspace of all layers whose keys no other layer reads."""
STREAMS = 512
"""Most rows that read codes one by one in a step whose other rows read decoded blocks."""
WORKSPACE_TOKENS = 1 << 16
"""Tokens that a workspace holds of layers that see all keys; a quarter of layers with windows."""
_MOST_BYTES = 1 << 30


class Workspaces:
    """Memory that prompts' attention reads in place of coded blocks, one layer after the other.

    All graphs share it, because steps run one after the other. It is allocated when the first graph
    that needs it is recorded.

    Args:
        tokens: tokens of layers that see all keys.

    Attributes:
        blocks: for each KV group, how many blocks of decoded keys and values fit.
    """

    def __init__(self, layout: KVLayout, block_size: int, tokens: int = WORKSPACE_TOKENS) -> None:
        specs = [group.spec.attention for group in layout.groups]
        sizes = [0 if each is None else block_bytes(each, block_size) for each in specs]
        wanted = [
            size * ((tokens if each.sees_all else tokens // 4) // block_size)
            for each, size in zip(specs, sizes, strict=True)
            if each is not None
        ]
        self._bytes = min(max(wanted, default=0), _MOST_BYTES)
        self.blocks = [self._bytes // size if size else 0 for size in sizes]
        self._memory: dict[int, mx.array] = {}

    def memory(self, number: int) -> mx.array:
        """Return a workspace, flat: the common one, or one for a layer whose keys others read."""
        if number not in self._memory:
            self._memory[number] = device_memory.unwritten((self._bytes,), mx.uint8)
        return self._memory[number]


def block_bytes(spec: KVSpec, block_size: int) -> int:
    """Return the bytes of one layer's decoded block, all heads together."""
    elements = spec.head_dim + (0 if spec.value_in_key else spec.value_dim)
    return 2 * spec.kv_heads * block_size * elements
