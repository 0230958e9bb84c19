"""Decides which KV formats recorded steps serve on this machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping

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


def serves_format(
    format: KVFormat,
    heads: Mapping[int, int],
    layout: KVLayout,
    *,
    block_size: int,
    extension: Extension,
) -> bool:
    """Return whether the kernels support a format. Codes are held against the format's own encoder,
    once on a machine.

    Args:
        heads: query heads by layer.
    """
    cases = _attention_cases(heads, layout, block_size, format=format)
    if not all(kind_of(each.format).serves(each) for each in cases):
        return False
    runner = DeviceRunner(compiler(), extension)
    for case in dict.fromkeys(cases):
        verification = Verification(Check.CODING_AGREES, case)
        if verified_kernels().holds(verification):
            continue
        if (difference := kind_of(case.format).differs(case, runner)) is not None:
            log.warning("CUDA graphs disabled for %s: %s", format.name, difference)
            return False
        verified_kernels().add(verification)
    return True


def reads_prompts(
    format: KVFormat, heads: Mapping[int, int], layout: KVLayout, *, block_size: int
) -> bool:
    """Return whether the kernels read many rows of a sequence, over a format that they support.

    Args:
        heads: query heads by layer.
    """
    cases = _attention_cases(heads, layout, block_size, format=format)
    return all(kind_of(each.format).reads_prompts(each) for each in cases)


def _attention_cases(
    heads: Mapping[int, int], layout: KVLayout, block_size: int, format: KVFormat
) -> list[AttentionCase]:
    """Return what kernels must serve; `heads` are query heads by layer."""
    cases = list[AttentionCase]()
    for layer, count in heads.items():
        spec, own = layout.groups[layout.group[layer]].spec.attention, format.of_layer(layer)
        assert spec is not None, "layers that attend keep keys"
        one_row = own, spec, block_size, count, 1
        cases.append(AttentionCase(*one_row, mx.bfloat16, softcap=False, sinks=False))
    return cases
