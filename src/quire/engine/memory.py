"""How much memory the KV cache may have, and how long a context that allows."""

from __future__ import annotations

from quire.core.errors import ModelError
from quire.device.device import current_device

_SHORTEST_CONTEXT = 256


def kv_budget(wanted: int | None) -> int:
    """Bytes for KV pages: as asked, or a share of what is free now that the weights are loaded.

    Raises:
        ModelError: more was asked for than the machine has; names both numbers.
    """
    free = current_device().free_memory()
    if wanted is None:
        return int(free * current_device().kv_share)
    if wanted > free:
        raise ModelError(f"kv-memory: {wanted:,} bytes were asked for, {free:,} are free")
    return wanted


def check_context(tokens: int, wanted: int) -> int:
    """The context that the KV budget holds, if it is worth serving.

    Args:
        wanted: what was asked for, or the model allows.

    Raises:
        ModelError: the budget holds fewer tokens than any conversation needs.
    """
    least = min(_SHORTEST_CONTEXT, wanted)
    if tokens < least:
        raise ModelError(
            f"kv-memory: the budget holds a context of {tokens} tokens; at least {least} are needed"
        )
    return tokens
