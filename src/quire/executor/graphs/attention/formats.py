"""Decides which KV formats recorded steps serve on this machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import mlx.core as mx

from quire.attention.backend import AttentionCase
from quire.cache.specs import KVLayout
from quire.core.kv_format import KVFormat
from quire.device.cuda.compiled import compiler
from quire.device.cuda.extension import Extension
from quire.device.verified import Check, Verification, verified_kernels
from quire.executor.graphs.attention.coding_check import DeviceRunner
from quire.executor.graphs.attention.pool_kinds import kind_of

log = logging.getLogger("quire.engine")


def all_served(cases: Sequence[AttentionCase], extension: Extension) -> bool:
    """Return whether the kernels serve all layers. Codes are held against the format's own encoder,
    once on a machine.
    """
    if not all(kind_of(each.format).serves(each) for each in cases):
        return False
    runner = DeviceRunner(compiler(), extension)
    for case in dict.fromkeys(cases):
        verification = Verification(Check.CODING_AGREES, case)
        if verified_kernels().holds(verification):
            continue
        if (difference := kind_of(case.format).differs(case, runner)) is not None:
            log.warning("CUDA graphs disabled for %s: %s", case.format.name, difference)
            return False
        verified_kernels().add(verification)
    return True


def reads_prompts(case: AttentionCase) -> bool:
    """Return whether the kernels read many rows of a sequence, of a layer that they serve."""
    return kind_of(case.format).reads_prompts(case)


def attention_cases(
    format: KVFormat, heads: Mapping[int, int], layout: KVLayout, *, block_size: int
) -> list[AttentionCase]:
    """Return what kernels must serve of a step over a format.

    Args:
        heads: query heads by layer.
    """
    cases = list[AttentionCase]()
    for layer, count in heads.items():
        spec, own = layout.groups[layout.group[layer]].spec.attention, format.of_layer(layer)
        assert spec is not None, "layers that attend keep keys"
        one_row = own, spec, block_size, count, 1
        cases.append(AttentionCase(*one_row, mx.bfloat16, softcap=False, sinks=False))
    return cases
