"""Creates an engine, ready to serve, from its settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from quire.core.config import EngineConfig
from quire.core.figures import context, size
from quire.core.messages import Progress
from quire.core.speculation import HEAD
from quire.device.cuda.modules import ModuleProcesses
from quire.device.device import current_device, open_device
from quire.device.ranks import WHOLE
from quire.engine import ranks
from quire.engine.assembly import OpenDisk, OpenExecutor, assemble, open_disk
from quire.engine.draft_opening import open_drafters
from quire.engine.engine import Engine
from quire.engine.memory import MakeRoom, RoomCheck, refuse
from quire.engine.warm_up import measure_steps, warm_up
from quire.executor.factory import SharedGraphs, open_executor
from quire.executor.graphs.compiling import Compiling
from quire.executor.segments.runner import open_segments
from quire.models.base import LanguageModel
from quire.models.weights.loader import LoadedModel, open_model

log = logging.getLogger("quire.engine")


def open_engine(
    config: EngineConfig,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    make_room: MakeRoom = refuse,
) -> Engine:
    """Open the model, size the KV budget by the remaining memory, and create the engine.

    Args:
        on_progress: called repeatedly with the progress of loading.
        make_room: called before weights are read if the model does not fit.

    Raises:
        ModelError: the model cannot be opened, or memory does not suffice.
    """
    config = config if config.ranks == 1 else ranks.shared(config)
    open_device(config.blas, config.kernels, config.threads, activation_bits=config.activation_bits)
    followers = None if config.ranks == 1 else ranks.Followers(config)
    room = RoomCheck(config, make_room)
    loaded = _opened(config, room, followers, on_progress=on_progress)
    config = room.config
    engine = _measured(
        loaded,
        config,
        open_executor=open_executor if followers is None else followers.open_executor,
        open_disk=open_disk if followers is None else followers.open_disk,
        on_progress=on_progress,
    )
    engine.constraints.open()
    info = engine.info
    log.info(
        "%s: %s in %s on %s, %s of weights, context %s, KV budget %s",
        config.model,
        info.model_type,
        info.dtype,
        info.device,
        size(loaded.parameter_bytes),
        context(info.context_length, info.trained_length),
        size(info.kv_memory),
    )
    for line in info.kv_table:
        log.info("%s", line)
    return engine


def _opened(
    config: EngineConfig,
    room: RoomCheck,
    followers: ranks.Followers | None,
    on_progress: Callable[[Progress], None],
) -> LoadedModel:
    """Open the model. On a GPU, kernels of MLX are compiled meanwhile."""
    with ModuleProcesses() as modules:

        def check_room(model: LanguageModel, dtype: mx.Dtype, weight_bytes: int) -> None:
            room.check(model, dtype, weight_bytes)
            # Ranks compile the same kernels at the same time: one might read what is half written.
            if followers is None and current_device().kernel_language == "cuda":
                modules.start(dtype, current_device().free_memory() - weight_bytes)

        return open_model(
            config.model,
            dtype=config.dtype,
            adapter=config.adapter,
            max_context=config.max_context,
            part=WHOLE if followers is None else followers.part,
            pipeline=() if followers is None else ranks.pipeline_of(config, followers.part),
            with_head=config.speculate == HEAD,
            check_room=check_room,
            on_progress=lambda done, total: on_progress(Progress("weights", done, total)),
        )


def _measured(
    loaded: LoadedModel,
    config: EngineConfig,
    *,
    open_executor: OpenExecutor,
    open_disk: OpenDisk,
    on_progress: Callable[[Progress], None],
) -> Engine:
    """Return an engine with compiled kernels and measured step times."""

    def warmed(done: int, total: int) -> None:
        on_progress(Progress("warm-up", done, total))

    graphs = SharedGraphs()
    if config.ranks == 1:  # a split model's ranks open graphs together
        open_executor = partial(open_executor, graphs=graphs)
    if current_device().compiles:
        ahead = open_executor
        if config.ranks == 1:
            ahead = partial(open_executor, compiling=Compiling.AHEAD)
        warm_up(loaded, config, warmed, open_executor=ahead)
        graphs.release()
    opened = open_drafters(loaded, config)
    config = opened.config
    if config.ranks == 1:  # the ranks of a split model have no segments
        open_executor = partial(open_executor, segments=open_segments(loaded.model))
    step_times = measure_steps(loaded, config, open_executor)
    graphs.release()
    if config.ranks == 1:
        open_executor = partial(open_executor, compiling=Compiling.BEHIND)
    return assemble(
        loaded,
        config,
        drafters=opened.drafters,
        step_times=step_times,
        guesser=opened.guesser,
        open_executor=open_executor,
        open_disk=open_disk,
    )
