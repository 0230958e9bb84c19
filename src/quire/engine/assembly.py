"""Assembles an engine from its parts: the disk tier, an executor, the scheduler's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.cache.disk_store import MIN_BYTES
from quire.cache.disk_tier import DiskTier
from quire.core.config import DiskConfig, EngineConfig
from quire.core.errors import ModelError
from quire.engine.engine import Engine
from quire.engine.invariance import limited
from quire.executor.eager import Observe
from quire.executor.executor import Executor
from quire.executor.factory import open_executor
from quire.executor.guessing import Guesser
from quire.models.weights.loader import LoadedModel
from quire.scheduler.draft_lengths import DraftLengths
from quire.scheduler.drafts import Drafter
from quire.scheduler.measured_steps import MeasuredSteps

_DISK_OPEN_S = 1.0
"""Most seconds that start-up waits for the disk tier's folder, which usually takes milliseconds."""


OpenExecutor = Callable[..., Executor]
"""Creates an executor, with the arguments of `executor.factory.open_executor`."""
OpenDisk = Callable[[DiskConfig, LoadedModel], DiskTier]
"""Opens a model's disk tier."""


def open_disk(config: DiskConfig, loaded: LoadedModel) -> DiskTier:
    """Open the disk tier of a model that one process has."""
    return DiskTier(config, loaded.fingerprint, str(loaded.path))


def assemble(
    loaded: LoadedModel,
    config: EngineConfig,
    observe: Observe | None = None,
    drafters: Sequence[Drafter] = (),
    draft_lengths: DraftLengths | None = None,
    step_times: MeasuredSteps | None = None,
    guesser: Guesser | None = None,
    open_executor: OpenExecutor = open_executor,
    open_disk: OpenDisk = open_disk,
) -> Engine:
    """Return an engine that serves a model.

    Args:
        observe: takes each step's logits; for tests.
        drafters, draft_lengths, step_times: see `Engine`.
        guesser: the model's draft head, whose tokens a `HeadDrafter` proposes.
        open_executor: creates the executor.
        open_disk: opens the disk tier.

    Raises:
        ModelError: a setting is impossible here, or memory does not suffice.
    """
    config = limited(config)
    keeps = config.prefix_cache and not loaded.model.bidirectional
    disk = _ready_disk(config.disk, loaded, open_disk) if config.disk and keeps else None
    spill = None if disk is None else disk.spill
    try:
        executor = open_executor(loaded, config, guesser=guesser, spill=spill, observe=observe)
        return Engine(
            loaded,
            config,
            executor=executor,
            disk=disk,
            drafters=drafters,
            draft_lengths=draft_lengths,
            step_times=step_times,
        )
    except BaseException:
        if disk is not None:
            disk.close()
        raise


def _ready_disk(config: DiskConfig, loaded: LoadedModel, open_disk: OpenDisk) -> DiskTier:
    if config.max_bytes < MIN_BYTES:
        raise ModelError(f"at least {MIN_BYTES:,} bytes are needed", setting="kv_disk_size")
    disk = open_disk(config, loaded)
    disk.wait_open(_DISK_OPEN_S)
    if disk.failure is not None:
        disk.close()
        raise ModelError(disk.failure, setting="kv_disk")
    return disk
