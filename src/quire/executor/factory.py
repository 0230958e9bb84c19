"""Creates the executor for a model on the present device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.cache.disk_transfer import SpillTo
from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.core.config import EngineConfig
from quire.device.dtypes import DTYPES
from quire.executor.eager import Observe
from quire.executor.executor import Executor
from quire.executor.graphs.compiling import Compiling
from quire.executor.graphs.executor import GraphExecutor
from quire.executor.graphs.opening import open_cuda_graphs, open_encoder_graphs
from quire.executor.graphs.runner import CUDAGraphs
from quire.executor.guessing import Guesser
from quire.executor.segments.executor import SegmentExecutor
from quire.executor.segments.runner import StepSegments
from quire.models.weights.loader import LoadedModel
from quire.program.trace import BehindStep


def open_pools(loaded: LoadedModel, config: EngineConfig, layers: range | None = None) -> Pools:
    """Return the empty pools of a model, or of some of its layers."""
    groups = KVLayout.of(loaded.model.layout).groups
    if layers is not None:
        groups = tuple(
            replace(group, layers=tuple(each for each in group.layers if each in layers))
            for group in groups
        )
    return Pools(groups, config.block_size, DTYPES[loaded.dtype])


class SharedGraphs:
    """The CUDA graphs of one model, for engines of one configuration that run one after the other.

    A step is traced and recorded once, and bound to the memory of the engine opened last.
    """

    def __init__(self) -> None:
        self._opened: list[CUDAGraphs | None] = []
        self._pools: Pools | None = None

    def open(
        self,
        loaded: LoadedModel,
        pools: Pools,
        *,
        batch_invariant: bool,
        behind: Sequence[BehindStep] = (),
        compiling: Compiling = Compiling.AT_USE,
    ) -> CUDAGraphs | None:
        """Return the graphs over the given pools; see `open_cuda_graphs`.

        Raises:
            ModelError: the device cannot run batch-invariant steps.
        """
        self._pools = pools
        if not self._opened:
            layout = KVLayout.of(loaded.model.layout)
            graphs = open_cuda_graphs(
                loaded.model,
                layout,
                pools,
                identity=loaded.fingerprint,
                behind=behind,
                batch_invariant=batch_invariant,
                compiling=compiling,
            )
            self._opened.append(graphs)
        elif self._opened[0] is not None:
            self._opened[0].use(pools, compiling)
        return self._opened[0]

    def release(self) -> None:
        """Let go of the pools of the engine opened last, which was discarded."""
        pools = self._pools
        if pools is not None and self._opened[0] is not None:
            self._pools = Pools(pools.groups, pools.block_size, pools.dtype)
            self._opened[0].use(self._pools, Compiling.AT_USE)


def open_executor(
    loaded: LoadedModel,
    config: EngineConfig,
    *,
    guesser: Guesser | None = None,
    spill: SpillTo | None = None,
    observe: Observe | None = None,
    segments: StepSegments | None = None,
    graphs: SharedGraphs | None = None,
    compiling: Compiling = Compiling.AT_USE,
) -> Executor:
    """Return an executor that runs CUDA graphs if it can, and the model's own code otherwise.

    Args:
        guesser: see `EagerExecutor`, and so for the others.
        segments: the model's segments, on a CPU; None runs its own code there.
        graphs: the model's CUDA graphs, if other engines use them, too.
        compiling: when their kernels are compiled.

    Raises:
        ModelError: the device cannot run batch-invariant steps.
    """
    model, pools = loaded.model, open_pools(loaded, config)
    found = (graphs or SharedGraphs()).open(
        loaded,
        pools,
        batch_invariant=config.batch_invariant,
        behind=() if guesser is None else guesser.behind,
        compiling=compiling,
    )
    others: dict[str, Any] = {"guesser": guesser, "spill": spill, "observe": observe}
    if segments is not None:
        return SegmentExecutor(model, pools, segments, **others)
    encoders = None if config.batch_invariant else open_encoder_graphs(model)
    return GraphExecutor(
        model, pools, found, encoders=encoders, identity=loaded.fingerprint, **others
    )
