"""A decode step as recorded kernels, as far as that can be seen without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from quire.attention.metadata import build_metadata
from quire.attention.paged import cuda as paged
from quire.attention.paged import packed
from quire.cache.formats.base import LayerShape
from quire.cache.formats.registry import make_store
from quire.cache.specs import AttentionSpec, FullKV, KVLayout, WindowKV
from quire.core.kv_format import KVFormat
from quire.device.cuda.driver import Card
from quire.engine.decode.head import Head
from quire.engine.decode.pools import LayerPool, PagePool, PlainPool, kind_of
from quire.engine.decode.recorder import Kernel, Recorder
from quire.engine.decode.recording import Recording
from quire.engine.decode.served import MOST_ROWS, UnsupportedStack, check_stack, has_head
from quire.engine.decode.whole import in_one_block, write_group, write_positions
from quire.engine.decode.workspace import Buffer, GroupInputs, Workspace, group_start, table_start
from quire.models.base import LanguageModel, named_parameters
from quire.models.registry import build
from quire.models.stack import UnsupportedModel
from quire.models.weights.quantization import pack_like
from tests.attention.rows import HandRows
from tests.device.cuda.cards import CARDS, H200, RTX_4090
from tests.engine.rows import scheduled
from tests.support.nvcc import assert_compiles
from tests.support.tiny_models import (
    gemma4_config,
    gemma4_moe_config,
    llama_config,
    qwen3_moe_config,
    with_small_scores,
)

SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 64}
EXPERTS = {"num_experts": 32, "moe_intermediate_size": 64}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": llama_config(**SIZES),
    "qwen3_moe": qwen3_moe_config(**SIZES, **EXPERTS, mlp_only_layers=[]),
    "gemma4_moe": gemma4_moe_config(**SIZES, **EXPERTS, **TYPES),
}
PLAIN = KVFormat()
BITS = (2, 3, 4, 5, 6, 8)
FORMATS = (PLAIN, KVFormat("page", 4, 8), KVFormat("uniform", 4, 4), KVFormat("turbo", 4, 4))


def packed_model(config: dict[str, Any]) -> LanguageModel:
    twin, model = build(config), build(config)
    nn.quantize(twin, 64, 4)
    weights = {name: _narrow(each) for name, each in named_parameters(twin).items()}
    if str(config["model_type"]).startswith("gemma4"):
        weights = with_small_scores(weights)
    pack_like(model, weights)
    model.load_weights(list(weights.items()))
    mx.eval(list(weights.values()))
    return model


def _narrow(each: mx.array) -> mx.array:
    return each.astype(mx.bfloat16) if each.dtype == mx.float32 else each


def pool_of(layout: KVLayout, layer: int, format: KVFormat) -> LayerPool:
    """Of a layer, with addresses that only differ from each other."""
    group, own = layout.group[layer], format.of_layer(layer)
    if own.scheme == "plain":
        return PlainPool(group, 64, (1, 2))
    if own.scheme == "page":
        return PagePool(
            group, 64, tuple(range(8)), packed.Codes(int(own.key_bits), int(own.value_bits), 64)
        )
    spec = layout.groups[group].spec.attention
    assert spec is not None
    store = make_store(LayerShape.of(spec, 64, mx.bfloat16), own)
    return kind_of(own).of(store, group, id)


def recorded(
    config: dict[str, Any],
    max_rows: int,
    *,
    format: KVFormat = PLAIN,
    batch_invariant: bool = False,
    card: Card = H200,
    address: Callable[[mx.array], int] = id,
) -> tuple[list[Kernel], Workspace]:
    model = packed_model(config)
    layout, stack = KVLayout.of(model.layout), model.stack()
    check_stack(stack, layout, card, batch_invariant=batch_invariant)
    workspace = Workspace(stack, len(layout.groups), MOST_ROWS, 100, id)
    pools = {n: pool_of(layout, n, format) for n in range(len(stack.layers))}
    recorder = Recorder(max_rows, address, workspace, card, batch_invariant=batch_invariant)
    Recording(stack, pools, recorder, 3, 4).record()
    return recorder.kernels, workspace


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_kernel_gets_what_it_names_after_what_it_reads(family: str, format: KVFormat) -> None:
    kernels, workspace = recorded(FAMILIES[family], 8, format=format)
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


@pytest.mark.parametrize("format", FORMATS[2:], ids=lambda each: each.name)
def test_coding_single_tokens_takes_no_kernel_of_its_own(format: KVFormat) -> None:
    coded, plain = (recorded(FAMILIES["llama"], 8, format=each)[0] for each in (format, PLAIN))
    assert [each.grid[:2] for each in coded] == [each.grid[:2] for each in plain]


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_read_no_array_that_mlx_keeps_beside_the_host(
    family: str, format: KVFormat
) -> None:
    read: list[int] = []

    def address(array: mx.array) -> int:
        read.append(array.nbytes)
        return id(array)

    recorded(FAMILIES[family], 8, format=format, address=address)
    small = [size for size in read if 0 < size <= 8]  # stores have no blocks here
    assert not small, "see `in_device_memory`"


def test_layers_that_a_format_skips_are_recorded_plain() -> None:
    skipping = replace(FORMATS[-1], skip_layers=(1,))
    kernels, _ = recorded(FAMILIES["gemma4_moe"], 8, format=skipping)
    plain, _ = recorded(FAMILIES["gemma4_moe"], 8)
    coded, _ = recorded(FAMILIES["gemma4_moe"], 8, format=FORMATS[-1])
    own = [each.source for each in kernels]
    half = len(own) // 2
    assert own[:half] == [each.source for each in coded][:half]
    assert own[-half + 2 :] == [each.source for each in plain][-half + 2 :]


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
def test_even_rows_are_added_up_alike_in_steps_of_any_size(format: KVFormat) -> None:
    """Warps share a row's sum in products, splits in attention."""
    alike = []
    for max_rows in (1, 8, 64):
        kernels, _ = recorded(FAMILIES["gemma4_moe"], max_rows, format=format, batch_invariant=True)
        warps = [re.findall(r"#define (?:WARPS|CHUNK) (\d+)", each.source) for each in kernels[:-1]]
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


@pytest.mark.parametrize("spec", [FullKV(1, 64), WindowKV(1, 64, 100)])
def test_each_row_finds_codes_before_its_block_and_its_block_as_written(
    spec: AttentionSpec,
) -> None:
    format, block = KVFormat("page", 4, 8), 64
    spans, tables = [(10, 1), (190, 2), (0, 40), (64, 21)], [range(40, 45), range(60, 65)] * 2
    rows = [
        HandRows(start, count, format, (table,), (7 + number,))
        for number, ((start, count), table) in enumerate(zip(spans, tables, strict=True))
    ]
    metadata = build_metadata(0, spec, rows, block)
    numbers = np.zeros(table_start(MOST_ROWS, 1), np.int32)
    write_group(numbers, 0, metadata, 7)
    at = GroupInputs.of(group_start(MOST_ROWS, 0), MOST_ROWS)
    entries = [0] * 7 + metadata.block_table.tolist()
    owners = np.repeat(np.arange(4), [count for _, count in spans]).tolist()
    tails = numbers[at.tails :][:MOST_ROWS].tolist()
    coded, own = (
        numbers[start:][: 6 * MOST_ROWS].reshape(-1, 6).tolist() for start in (at.coded, at.own)
    )
    for row, owner in enumerate(owners):
        key = int(metadata.keys[row])
        first, begin = int(spec.first_visible(key)), key // block * block
        assert tails[row] == 7 + owner
        assert coded[row][:4] == [row, 1, first, begin]
        for number in range(first // block, key // block):
            assert entries[coded[row][4] + number] == tables[owner][number]
        assert own[row][:4] == [row, 1, max(first, begin), key + 1]
        assert tails[own[row][4] + key // block] == 7 + owner
    assert not any(map(sum, (*coded[len(owners) :], *own[len(owners) :])))


def test_rows_of_one_block() -> None:
    def lie_in_one(start: int, count: int) -> bool:
        return in_one_block(scheduled("a", start, count, [[4]], KVFormat("page", 4, 4)), 64)

    assert lie_in_one(127, 1)
    assert lie_in_one(64, 64)
    assert lie_in_one(100, 28)
    assert not lie_in_one(100, 29)
    assert not lie_in_one(63, 2)


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
        for format in (
            *FORMATS,
            KVFormat("uniform", 8, 3),
            KVFormat("turbo", 3.5, 3.5),
            KVFormat("page", 3, 6),
            KVFormat("page", 2, 5),
        )
        for each in recorded(config, max_rows, format=format)[0]
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
    with pytest.raises(UnsupportedStack, match=why):
        check_stack(model.stack(), KVLayout.of(model.layout), H200)


def test_a_card_with_too_little_shared_memory_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    model = packed_model(FAMILIES["llama"])
    stack, layout = model.stack(), KVLayout.of(model.layout)
    check_stack(stack, layout, RTX_4090)
    assert has_head(stack, RTX_4090)
    small = Card(28, 4000)
    with pytest.raises(
        UnsupportedStack, match="256 columns do not fit 4000 bytes of shared memory"
    ):
        check_stack(stack, layout, small)
    with caplog.at_level("INFO", "quire.engine"):
        assert not has_head(stack, small)
    assert "logits by MLX's own kernels: 256 columns" in caplog.text


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_what_thread_blocks_keep_fits_the_card(card: Card) -> None:
    for hidden in (2048, 2816, 4096, 5376):
        for rows in (1, 2, 8, 16, 64):
            head = Head(rows, hidden, 128_256, 64, None, card)
            assert head.fits
            assert head.grid[0] * head.tiles * 8 >= rows
    for dim, kv_heads, group in ((128, 8, 4), (256, 16, 2), (512, 4, 8), (256, 8, 2), (512, 2, 8)):
        shape = paged.Shape(mx.bfloat16, dim, dim, kv_heads, group, 64, False, False)
        codes = [packed.Codes(n, m, 128 if m > 5 else 64) for n in BITS for m in BITS]
        asked = [packed.shared_memory(shape, each) for each in codes]
        asked += [paged.single_memory(shape), paged.shared_memory(shape, shape.many_tiles)]
        assert max(asked) <= card.shared


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
