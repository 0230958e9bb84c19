"""Opens the CUDA graphs of a model: traces it, and finds whether its steps have kernels."""

from __future__ import annotations

import logging
from typing import Any

from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.core.errors import ModelError
from quire.device.cuda.driver import DriverError
from quire.device.cuda.extension import NoExtension, load_extension
from quire.device.device import current_device
from quire.device.ranks import WHOLE, Part, agreed
from quire.executor.graphs.compiling import Compiling
from quire.executor.graphs.encoders import EncoderGraphs
from quire.executor.graphs.exchange_check import verified_inboxes
from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.runner import CUDAGraphs
from quire.models.base import LanguageModel
from quire.models.layers.linear import joined_matrices
from quire.program.trace import NotLinear, StepPrograms, steps_of, trace, trace_ahead
from quire.program.values import Program

log = logging.getLogger("quire.engine")

_MOST_ENCODER_BYTES, _ENCODER_SHARE = 512 << 20, 1 / 32
"""Limits of the memory of encoders' graphs: bytes, and a share of what the weights leave free."""


def open_encoder_graphs(model: LanguageModel) -> EncoderGraphs | None:
    """Return the CUDA graphs of a model's encoders; None on other devices and without encoders."""
    if current_device().kernel_language != "cuda" or not model.encoders:
        return None
    try:
        most = min(_MOST_ENCODER_BYTES, int(current_device().free_memory() * _ENCODER_SHARE))
        return EncoderGraphs(model, load_extension(), most)
    except NoExtension:  # `open_cuda_graphs` says why
        return None


def open_cuda_graphs(
    model: LanguageModel,
    layout: KVLayout,
    pools: Pools,
    identity: str,
    *,
    batch_invariant: bool = False,
    part: Part = WHOLE,
    compiling: Compiling = Compiling.AT_USE,
) -> CUDAGraphs | None:
    """Trace a model and check that CUDA graphs can compute its steps. All ranks of a split model
    call it at the same point, and get the same answer.

    Args:
        identity: identity of the weights, under which verification results are kept.
        batch_invariant, compiling: see `CUDAGraphs`.
        part: the rank that the model is the share of.

    Returns:
        None on other devices, and where a part of the program has no kernel: a log line says which.

    Raises:
        ModelError: `batch_invariant` is asked for, and graphs cannot compute the steps.
    """
    if current_device().kernel_language != "cuda":
        return None
    graphs, problem = None, "another rank has none"
    try:
        if layout.uncached:
            raise UnsupportedNode("no kernel for attention in both directions")
        inboxes = None if part.size == 1 else verified_inboxes(part)
        traced = trace(model, steps_of(model))
        given: dict[str, Any] = {
            "logits": model.logits,
            "layout": layout,
            "pools": pools,
            "extension": load_extension(),
            "joined": joined_matrices(model),
            "compiling": compiling,
        }
        graphs = CUDAGraphs(
            traced,
            identity=identity,
            batch_invariant=batch_invariant,
            inboxes=inboxes,
            heads=() if batch_invariant else _open_heads(model, traced.head, identity, **given),
            **given,
        )
        graphs.check()
    except (UnsupportedNode, NotLinear, NoExtension, DriverError, OSError) as error:
        if batch_invariant:
            raise ModelError(f"batch-invariant: {error}") from error
        graphs, problem = None, str(error)
    if agreed(int(graphs is not None), part):
        return graphs
    log.info("CUDA graphs disabled for this model: %s. Decoding runs eagerly.", problem)
    return None


def _open_heads(
    model: LanguageModel, last: Program, identity: str, **given: Any
) -> list[CUDAGraphs]:
    """Return the graphs of the model's own heads; none where one of them has no kernels.

    Args:
        last: the program from hidden states to logits.
        given: further arguments of `CUDAGraphs`.
    """
    found: list[CUDAGraphs] = []
    try:
        for number in range(len(model.layout) - len(model.own_layout)):
            programs = StepPrograms(trace_ahead(model, number), last)
            found.append(CUDAGraphs(programs, identity=f"{identity}, head {number}", **given))
            found[-1].check()
    except (UnsupportedNode, NotLinear) as error:
        log.info("CUDA graphs: %s. The model's heads run eagerly.", error)
        return []
    return found
