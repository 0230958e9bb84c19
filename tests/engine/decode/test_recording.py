"""A decode step as recorded kernels, as far as that can be seen without a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from quire.attention.metadata import build_metadata
from quire.attention.paged import packed
from quire.cache.specs import KVLayout, WindowKV
from quire.core.kv_format import KVFormat
from quire.engine.decode.recording import Kernel, LayerPool, Recording
from quire.engine.decode.served import Unfit, check_stack
from quire.engine.decode.whole import MOST_ROWS, write_group, write_positions
from quire.engine.decode.workspace import Buffer, GroupInputs, Workspace, group_start, table_start
from quire.models.base import LanguageModel, named_parameters
from quire.models.quantization import pack_like
from quire.models.registry import build
from quire.models.stack import UnsupportedModel
from tests.attention.rows import HandRows
from tests.engine.rows import scheduled
from tests.support.nvcc import assert_compiles
from tests.support.tiny_models import (
    gemma4_config,
    gemma4_moe_config,
    llama_config,
    qwen3_moe_config,
)

SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 64}
EXPERTS = {"num_experts": 32, "moe_intermediate_size": 64}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": llama_config(**SIZES),
    "qwen3_moe": qwen3_moe_config(**SIZES, **EXPERTS, mlp_only_layers=[]),
    "gemma4_moe": gemma4_moe_config(**SIZES, **EXPERTS, **TYPES),
}


def packed_model(config: dict[str, Any]) -> LanguageModel:
    twin, model = build(config), build(config)
    nn.quantize(twin, 64, 4)
    weights = {name: _narrow(each) for name, each in named_parameters(twin).items()}
    pack_like(model, weights)
    model.load_weights(list(weights.items()))
    mx.eval(list(weights.values()))
    return model


def _narrow(each: mx.array) -> mx.array:
    return each.astype(mx.bfloat16) if each.dtype == mx.float32 else each


CODES = packed.Codes(4, 8, 64)


def recorded(
    config: dict[str, Any], max_rows: int, *, coded: bool = False, batch_invariant: bool = False
) -> tuple[list[Kernel], Workspace]:
    model = packed_model(config)
    layout, stack = KVLayout.of(model.layout), model.stack()
    check_stack(stack, layout)
    groups = len(layout.groups)
    workspace = Workspace(stack, groups, MOST_ROWS, 100, id)
    arrays, codes = (tuple(range(8)), CODES) if coded else ((1, 2), None)
    pools = {n: LayerPool(layout.group[n], 64, arrays, codes) for n in range(len(stack.layers))}
    return Recording(
        stack, pools, max_rows, id, workspace, 3, 4, batch_invariant
    ).record(), workspace


@pytest.mark.parametrize("coded", [False, True], ids=["plain", "coded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_kernel_gets_what_it_names_after_what_it_reads(family: str, coded: bool) -> None:
    kernels, workspace = recorded(FAMILIES[family], 8, coded=coded)
    parameters = [_parameters(each) for each in kernels]
    assert [len(each) for each in parameters] == [len(each.arguments) for each in kernels]
    for number, each in enumerate(kernels):
        assert all(before < number for before in each.after)
        names = [name.split()[-1] for name in parameters[number]]
        given = dict(zip(names, each.arguments, strict=True))
        assert given.get("rows", workspace.at(Buffer.ROWS)) == workspace.at(Buffer.ROWS)
    # Every kernel leads to the last one: none may still run when the next step begins.
    reached = {len(kernels) - 1}
    for number in reversed(range(len(kernels))):
        assert number in reached
        reached.update(kernels[number].after)


def test_even_rows_are_added_up_alike_in_steps_of_any_size() -> None:
    """Warps share a row's sum in products, splits in attention."""
    alike = []
    for max_rows in (1, 8, 64):
        kernels, _ = recorded(FAMILIES["gemma4_moe"], max_rows, batch_invariant=True)
        warps = [re.findall(r"#define WARPS (\d+)", each.source) for each in kernels[:-1]]
        splits = [each.grid[2] for each in kernels]
        alike.append((warps, splits))
    assert alike[0] == alike[1] == alike[2]
    assert max(alike[0][1]) > 1


def _parameters(kernel: Kernel) -> list[str]:
    found = re.search(r"__launch_bounds__\((\d+)[, \d]*\) kernel\((.*?)\) \{", kernel.source)
    assert found is not None
    assert int(found[1]) == kernel.block
    return found[2].split(", ")


def test_each_row_of_a_sequence_finds_its_keys() -> None:
    spec, block = WindowKV(1, 64, 100), 64
    spans, tables = [(10, 1), (190, 5), (0, 3)], [range(40, 45), range(60, 65), range(80, 85)]
    rows = [
        HandRows(start, count, KVFormat(), (table,))
        for (start, count), table in zip(spans, tables, strict=True)
    ]
    metadata = build_metadata(0, spec, rows, block)
    numbers = np.zeros(table_start(MOST_ROWS, 1), np.int32)
    write_group(numbers, 0, metadata, 7)
    at = GroupInputs.of(group_start(MOST_ROWS, 0), MOST_ROWS)
    tiles = numbers[at.tiles :][: 6 * 9].reshape(9, 6)
    entries = [0] * 7 + metadata.block_table.tolist()
    owners = np.repeat(np.arange(3), [count for _, count in spans])
    for row, (tile, owner) in enumerate(zip(tiles.tolist(), owners.tolist(), strict=True)):
        _, _, low, high, buffer, fresh = tile
        key = int(metadata.keys[row])
        assert (low, high, fresh) == (max(0, key - 99), key + 1, spans[owner][0])
        for each in (low, key):
            assert entries[buffer + each // block] == tables[owner][each // block]
        assert numbers[at.blocks + row] == tables[owner][key // block]
        assert numbers[at.offsets + row] == key % block


def test_inputs_hold_positions_not_keys() -> None:
    """Behind a picture they are others; behind a video they may be fractions."""
    behind = np.full((3, 1), 20.5, np.float32)
    rows = [
        scheduled("a", 7, 1, [[4]], KVFormat()),
        scheduled("b", 30, 1, [[5]], KVFormat(), positions=range(12, 13)),
        scheduled("c", 40, 1, [[6]], KVFormat(), positions=behind),
    ]
    numbers = np.zeros(table_start(MOST_ROWS, 1), np.int32)
    assert write_positions(numbers, rows)
    assert numbers[4:8].view(np.float32).tolist() == [7, 12, 20.5, 0]
    apart = scheduled("d", 3, 1, [[7]], KVFormat(), positions=behind * [[1], [1], [2]])
    assert not write_positions(numbers, [*rows, apart])


@pytest.mark.slow
@pytest.mark.parametrize("max_rows", [1, 16, 64])
def test_kernels_compile(max_rows: int, tmp_path: Path) -> None:
    sources = {
        each.source
        for config in FAMILIES.values()
        for coded in (False, True)
        for each in recorded(config, max_rows, coded=coded)[0]
    }
    for source in sources:
        assert_compiles(source, tmp_path, spilled=128)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"head_dim": 32}, "heads of 32"),
        ({"hidden_activation": "gelu"}, "the activation gelu"),
    ],
)
def test_what_the_kernels_are_not_made_for(change: dict[str, Any], why: str) -> None:
    model = packed_model(FAMILIES["gemma4_moe"] | change)
    with pytest.raises(Unfit, match=why):
        check_stack(model.stack(), KVLayout.of(model.layout))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (llama_config(attention_bias=True), "without a bias|qkv_bias"),
        (gemma4_config(num_kv_shared_layers=1), "another layer's keys"),
    ],
)
def test_what_a_stack_cannot_describe(config: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        packed_model(config).stack()


def test_weights_that_are_not_packed_are_unsupported() -> None:
    with pytest.raises(UnsupportedModel, match="no packed matrix"):
        build(FAMILIES["llama"]).stack()
