"""How much memory weights and KV cache may have, and how long a context that allows."""

from __future__ import annotations

from quire.core.config import EngineConfig
from quire.core.errors import ModelError, NoRoom
from quire.core.figures import size
from quire.device.device import current_device

_SHORTEST_CONTEXT = 256


def weight_limit(config: EngineConfig) -> int:
    """Bytes that the weights may take: what the device has, less what other engines will take."""
    limit = current_device().weight_memory() - config.reserved
    return limit if config.memory is None else min(limit, config.memory)


def kv_budget(config: EngineConfig, weights: int) -> int:
    """Bytes for KV blocks: as asked, or a share of what is free now that the weights are loaded.

    Args:
        weights: bytes that they hold.

    Raises:
        NoRoom: more was asked for than there is; names both numbers.
    """
    free = current_device().free_memory() - config.reserved
    share = free * current_device().kv_share
    if config.memory is not None:
        free = min(free, config.memory - weights)
        share = min(share, free)
    if config.kv_memory is None:
        return max(0, int(share / config.sharers))
    if config.kv_memory > free:
        raise NoRoom(f"kv-memory: {size(config.kv_memory)} were asked for, {size(free)} are free")
    return config.kv_memory


def wanted_context(config: EngineConfig, longest: int) -> int:
    """The context in tokens that was asked for, or the longest of the model.

    Raises:
        ModelError: more was asked for; names both numbers.
    """
    context = config.max_context or longest
    if context > longest:
        raise ModelError(
            f"max-context: {context:,} tokens were asked for, the model is made for {longest:,}"
        )
    return context


def check_context(tokens: int, wanted: int) -> int:
    """The context that the KV budget holds, if it is worth serving.

    Args:
        wanted: what was asked for, or the model allows.

    Raises:
        NoRoom: the budget holds fewer tokens than any conversation needs.
    """
    least = min(_SHORTEST_CONTEXT, wanted)
    if tokens < least:
        raise NoRoom(
            f"kv-memory: the budget holds a context of {tokens} tokens; at least {least} are needed"
        )
    return tokens
