"""Opens the CUDA graphs of a model: traces it, and finds whether its steps have kernels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.ranks.exchange_check import verified_inboxes
from quire.executor.graphs.runner import CUDAGraphs
from quire.models.base import LanguageModel
from quire.models.layers.linear import joined_matrices
from quire.program.trace import BehindStep, NotLinear, steps_of, trace, trace_behind
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
    behind: Sequence[BehindStep] = (),
    batch_invariant: bool = False,
    part: Part = WHOLE,
    compiling: Compiling = Compiling.AT_USE,
) -> CUDAGraphs | None:
    """Trace a model and check that CUDA graphs can compute its steps. All ranks of a split model
    call it at the same point, and get the same answer.

    Args:
        identity: identity of the weights, under which verification results are kept.
        behind: what drafters run behind steps.
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
        traced, own = trace(model, steps_of(model)), () if batch_invariant else behind
        given: dict[str, Any] = {
            "layout": layout,
            "pools": pools,
            "extension": load_extension(),
            "compiling": compiling,
        }
        graphs = CUDAGraphs(
            traced,
            logits=model.logits,
            joined=joined_matrices(model),
            identity=identity,
            batch_invariant=batch_invariant,
            inboxes=inboxes,
            behind=_open_behind(model, own, traced.body, identity=identity, **given),
            **given,
        )
        graphs.check()
    except (UnsupportedNode, NotLinear, NoExtension, DriverError, OSError) as error:
        if batch_invariant:
            raise ModelError(str(error), setting="batch_invariant") from error
        graphs, problem = None, str(error)
    if agreed(int(graphs is not None), part):
        return graphs
    log.info("CUDA graphs disabled for this model: %s. Decoding runs eagerly.", problem)
    return None


def _open_behind(
    model: LanguageModel, behind: Sequence[BehindStep], body: Program, identity: str, **given: Any
) -> list[CUDAGraphs]:
    """Return the graphs of what drafters run behind steps; none where a part has no kernels.

    Args:
        body: the program of the steps.
        given: further arguments of `CUDAGraphs`.
    """
    found: list[CUDAGraphs] = []
    states = body.values[body.outputs[0]]
    try:
        for number, each in enumerate(behind):
            graphs = CUDAGraphs(
                trace_behind(model, each, states),
                logits=each.logits,
                joined=joined_matrices(each.module),
                identity=f"{identity}, drafter {number}",
                **given,
            )
            graphs.check()
            found.append(graphs)
    except Exception as error:  # whatever a drafter's code does while it is traced, it can be run
        known = isinstance(error, UnsupportedNode | NotLinear)
        log.info("CUDA graphs: %s. Guesses run eagerly.", error, exc_info=not known)
        return []
    return found
