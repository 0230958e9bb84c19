"""Memory for weights and KV cache, and the context length that it allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import PoolKey
from quire.cache.disk_prefetch import DiskPrefetch
from quire.cache.disk_tier import DiskTier
from quire.cache.formats.skips import skipped_layers
from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.core.config import EngineConfig
from quire.core.errors import ModelError, NoRoom
from quire.core.figures import size
from quire.core.kv_format import KVFormat
from quire.device.device import current_device
from quire.executor.executor import Executor
from quire.models.base import LanguageModel
from quire.scheduler.limits import Limits
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.prefix_sharing import ReadAhead

_SHORTEST_CONTEXT = 256
"""Fewest tokens of context that the KV budget must hold, unless a shorter one is asked for."""
_PARTS = 32
"""A pool that grows in place takes at least this fraction of the budget, 1 / 32. Of 30 GB in 64
arrays that takes 3 ms (H200), beside a running step.
"""
_LEAST_ASKED = 64
"""Fewest tokens of context that may be asked for."""

MakeRoom = Callable[[NoRoom], EngineConfig]
"""A function that unloads other models, and returns the settings afterwards. It raises `NoRoom` if
none can be unloaded.
"""


def refuse(lacking: NoRoom) -> EngineConfig:
    """Return the `MakeRoom` of an engine that runs alone."""
    raise lacking


class RoomCheck:
    """Checks that a model fits before its weights are read, and asks for room until it does.

    Attributes:
        config: the settings, with the memory that the engine may use now.
    """

    def __init__(self, config: EngineConfig, make_room: MakeRoom) -> None:
        self.config = config
        self._make_room = make_room

    def check(self, model: LanguageModel, dtype: mx.Dtype, weight_bytes: int) -> None:
        """Return once the weights and the smallest useful KV cache fit.

        Args:
            dtype: type of the model's activations.

        Raises:
            NoRoom: they do not fit, and no other model can be unloaded.
        """
        while True:
            try:
                _check_weights(self.config, weight_bytes)
                budget = kv_budget(self.config, 0, planned=weight_bytes)
                _check_smallest(model, dtype, self.config, budget=budget)
                return
            except NoRoom as lacking:
                self.config = self._make_room(lacking)


def _check_weights(config: EngineConfig, needed: int) -> None:
    available = current_device().weight_memory() - config.reserved
    if config.memory is not None:
        available = min(available, config.memory)
    if needed > available:
        raise NoRoom(
            f"{config.model}: the weights need {size(needed)} of memory, but only "
            f"{size(available)} are available"
        )


def kv_budget(config: EngineConfig, held: int, *, planned: int = 0) -> int:
    """Return the bytes for KV blocks: as configured, or a share of the memory free beside the
    weights.

    Args:
        held: bytes that weights and adapters take.
        planned: bytes that weights or graphs of encoders will take, which count as free now.

    Raises:
        NoRoom: more is configured than there is; the message names both numbers.
    """
    free = current_device().free_memory() - planned - config.reserved
    share = free * current_device().kv_share
    if config.memory is not None:
        free = min(free, config.memory - held - planned)
        share = min(share, free)
    if config.kv_memory is None:
        return max(0, int(share / config.sharers))
    if config.kv_memory > free:
        raise NoRoom(
            f"{size(config.kv_memory)} were requested, but only {size(free)} are free; "
            "set it lower",
            setting="kv_memory",
        )
    return config.kv_memory


def open_blocks(
    config: EngineConfig, budget: int, executor: Executor, disk: DiskTier | None
) -> BlockManager:
    """Return the manager of an engine's blocks.

    Without a prefix cache pools take what runs. The engines of warm-up have none: while one lives,
    the memory that the next one asks for must be free.

    Args:
        budget: bytes that all pools together may claim.
    """

    def growth_bytes(key: PoolKey) -> int:
        return budget // _PARTS if executor.grows_in_place(key, budget) else 0

    accepts, block_bytes = disk.accepts if disk else None, executor.block_bytes
    if not config.prefix_cache:
        return BlockManager(budget, block_bytes, accepts)
    first = int(current_device().kv_first * budget)
    return BlockManager(budget, block_bytes, accepts, first_bytes=first, growth_bytes=growth_bytes)


def _check_smallest(
    model: LanguageModel, dtype: mx.Dtype, config: EngineConfig, budget: int
) -> None:
    """Raise `NoRoom` unless `budget` bytes of KV hold the shortest useful context."""
    groups = KVLayout.of(model.layout).groups
    manager = BlockManager(budget, Pools(groups, config.block_size, dtype).claimed_bytes)
    format = config.kv_format.skipping(skipped_layers(model.own_layout, config.kv_skip_layers))
    least = min(_SHORTEST_CONTEXT, config.max_context or _SHORTEST_CONTEXT)
    check_context(
        Limits(groups, manager, config.block_size, max_context=least).context(format), least
    )


def sequence_bytes(
    model: LanguageModel, dtype: mx.Dtype, block_size: int, format: KVFormat, tokens: int
) -> int:
    """Return the most bytes of KV that a lone sequence of `tokens` tokens takes."""
    groups = KVLayout.of(model.layout).groups
    manager = BlockManager(0, Pools(groups, block_size, dtype).claimed_bytes)
    return Limits(groups, manager, block_size, max_context=tokens).worst_case_bytes(format, tokens)


def wanted_context(config: EngineConfig, longest: int) -> int:
    """Return the configured context in tokens, or the model's longest.

    Raises:
        ModelError: the configured context exceeds the model's, or is too short for a conversation;
            the message names both numbers.
    """
    context = config.max_context or longest
    least = min(_LEAST_ASKED, longest)
    if context < least:
        raise ModelError(
            f"{context:,} tokens were requested, but a conversation needs at least {least:,}; "
            "set it higher",
            setting="max_context",
        )
    if context > longest:
        raise ModelError(
            f"{context:,} tokens were requested, but the model supports {longest:,}; set it lower",
            setting="max_context",
        )
    return context


def check_context(tokens: int, wanted: int) -> int:
    """Return the context that the KV budget holds, if it is long enough to be useful.

    Args:
        wanted: the context that was configured, or that the model allows.

    Raises:
        NoRoom: the budget holds fewer tokens than any conversation needs.
    """
    least = min(_SHORTEST_CONTEXT, wanted)
    if tokens < least:
        raise NoRoom(
            f"the budget holds a context of {tokens} tokens; at least {least} are needed; "
            "set it higher, or choose a KV format of fewer bits",
            setting="kv_memory",
        )
    return tokens


def reading_ahead(
    disk: DiskTier | None, manager: BlockManager, executor: Executor, budget: PrefillBudget
) -> ReadAhead | None:
    """Return the maker of the disk tier's reader; None without a disk tier."""
    if disk is None:
        return None
    return partial(
        DiskPrefetch,
        manager=manager,
        tier=disk,
        matches_pool=executor.fits,
        hold_block=executor.contents.hold_block,
        compute_seconds=budget.prompt_seconds,
    )
