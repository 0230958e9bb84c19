"""A decode step as recorded kernels, as far as that can be seen without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.attention.metadata import build_metadata
from quire.attention.paged import cuda as paged
from quire.attention.paged import packed
from quire.cache.formats.base import LayerShape
from quire.cache.formats.registry import make_store
from quire.cache.specs import AttentionSpec, FullKV, KVLayout, WindowKV
from quire.core.kv_format import KVFormat
from quire.device.cuda import boxes
from quire.device.cuda.cublas import Library
from quire.device.cuda.driver import Card
from quire.device.cuda.skinny_gemm import VAST, SkinnyGemm
from quire.device.weights import PackedWeight, Packing
from quire.executor.graphs.attention.coded_pools import PagePool
from quire.executor.graphs.attention.pool_kinds import kind_of
from quire.executor.graphs.attention.pools import LayerPool, PlainPool
from quire.executor.graphs.coverage import Survey
from quire.executor.graphs.graph_cache import MAX_ROWS
from quire.executor.graphs.input_numbers import write_group, write_positions
from quire.executor.graphs.layout import InputLayout, group_of
from quire.executor.graphs.operands import (
    HeadOperand,
    Part,
    ProductMatrix,
    UnsupportedNode,
    check_heads,
)
from quire.executor.graphs.places import Place
from quire.executor.graphs.recorder import Buffer, Kernel, Recorder, launches
from quire.executor.graphs.recording import Recording
from quire.executor.graphs.sizes import in_one_block
from quire.executor.graphs.states import unplaced_states
from quire.models.base import LanguageModel
from quire.models.layers.linear import joined_matrices, use_device_products
from quire.models.registry import build
from quire.program.passes import prepared, recordable, simplified, split_experts
from quire.program.side_by_side import with_matrices_joined
from quire.program.trace import trace
from quire.program.values import Node, Weight
from quire.program.wanted_rows import FIELD as WANTED_FIELD
from quire.program.wanted_rows import with_wanted_rows
from tests.attention.rows import HandRows
from tests.device.cuda.cards import CARDS, H200, RTX_4090
from tests.engine.rows import scheduled
from tests.executor.graphs.layers import empty_step
from tests.support.emulated_card import emulate_boxes
from tests.support.grown import grown
from tests.support.nvrtc import assert_compiles
from tests.support.packed_models import experts_in_mxfp4, packed_model
from tests.support.packings import page_codes
from tests.support.tiny_models import (
    gemma4_config,
    gemma4_moe_config,
    llama_config,
    qwen3_moe_config,
)

SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 64}
EXPERTS = {"num_experts": 32, "moe_intermediate_size": 64}
SHARED = {
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "global_head_dim": 128,
}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": llama_config(**SIZES),
    "qwen3_moe": qwen3_moe_config(**SIZES, **EXPERTS, mlp_only_layers=[]),
    "gemma4_moe": gemma4_moe_config(**SIZES, **EXPERTS, **TYPES),
}
PLAIN = KVFormat()
BITS = (2, 3, 4, 5, 6, 8)
FORMATS = (PLAIN, KVFormat("page", 4, 8), KVFormat("uniform", 4, 4), KVFormat("turbo", 4, 4))


def pool_of(layout: KVLayout, layer: int, format: KVFormat, at: int = 1) -> LayerPool:
    """Return a layer's pool with made-up addresses, distinct and from `at` on."""
    group, own = layout.group[layer], format.of_layer(layer)
    if own.scheme == "plain":
        return PlainPool(group, 64, (at, at + 1))
    if own.scheme == "page":
        codes = page_codes(int(own.key_bits), int(own.value_bits), 64)
        return PagePool(group, 64, tuple(range(at, at + 8)), codes)
    spec = layout.groups[group].spec.attention
    assert spec is not None
    store = make_store(LayerShape.of(spec, 64, mx.bfloat16), own)
    return kind_of(own).of(store, group, id)


def pools_of(
    layout: KVLayout, format: KVFormat = PLAIN, at: Callable[[int], int] = lambda layer: 1
) -> dict[int, LayerPool]:
    """Return the pools of all layers that keep keys."""
    return {
        layer: pool_of(layout, layer, format, at(layer))
        for group in layout.groups
        if group.spec.attention is not None
        for layer in group.layers
    }


def recorded(
    config: dict[str, Any], max_rows: int, **options: Any
) -> tuple[list[Kernel], InputLayout]:
    return _record(packed_model(config), max_rows, **options)


def test_products_of_several_experts_with_weighted_inputs_read_plain_rows() -> None:
    """Each of a row's experts has an input of its own, and digits are those of one row."""
    kernels, _ = recorded(grown("llama4_text-several"), 1)
    experts = [str(each.source) for each in kernels if "#define EXPERTS 1" in str(each.source)]
    first = [text for text in experts if "#define FIRST 1" in text]
    assert first
    assert not any("#define DIGITS 1\n" in text for text in first)


def test_products_of_experts_in_mxfp4_read_interleaved_rows() -> None:
    """Those of large tiles; who else reads the same rows has them as they are."""
    numbers = count(1 << 20, 1 << 12)
    model = packed_model(grown("gpt_oss"), experts_in_mxfp4)
    kernels, _ = _record(model, MAX_ROWS, address=lambda array: next(numbers))
    sources = [str(each.source) for each in kernels]
    readers = [n for n, text in enumerate(sources) if "#define INTERLEAVED 1\n" in text]
    firsts = [n for n in readers if "#define FIRST 1" in sources[n]]
    layers = grown("gpt_oss")["num_hidden_layers"]
    assert (len(firsts), len(readers)) == (layers, 2 * layers)
    for number in firsts:
        assert "#define Y_INTERLEAVED 1\n" in sources[number]
        rows = kernels[number].arguments[0]
        (norm,) = [n for n in range(number) if kernels[n].arguments[-1] == rows][-1:]
        assert "store_interleaved(laid_out" in sources[norm]
        plain = kernels[norm].arguments[-2]
        router = next(n for n in range(norm + 1, number) if plain in kernels[n].arguments)
        assert "EXPERTS 1" not in sources[router]
    few, _ = _record(model, 16)
    assert not any("store_interleaved(laid_out" in str(each.source) for each in few)


def _record(
    model: LanguageModel, max_rows: int = 8, **options: Any
) -> tuple[list[Kernel], InputLayout]:
    """Record a step of a model; for options see `recorder_of`."""
    recorder = recorder_of(model, max_rows, **options)
    return recorder.kernels, recorder.inputs


def recorder_of(
    model: LanguageModel,
    max_rows: int,
    *,
    format: KVFormat = PLAIN,
    batch_invariant: bool = False,
    card: Card = H200,
    address: Callable[[mx.array], int] = id,
    pools_at: Callable[[int], int] = lambda layer: 1,
    library: Library | None = None,
    ending: bool = False,
) -> Recorder:
    """Record a step of a model.

    Args:
        pools_at: the first address of a layer's pool.
        library: see `Recorder`.
        ending: whether the step's end computes wanted rows only.
    """
    layout, programs = KVLayout.of(model.layout), trace(model)
    whole = simplified(split_experts(programs.body))
    whole = with_wanted_rows(whole) if ending else whole
    joined = {} if library is None else joined_matrices(model)
    body = prepared(with_matrices_joined(whole, joined))
    head = recordable(programs.head)
    inputs = InputLayout(len(layout.groups), MAX_ROWS, 100, address)
    pools = pools_of(layout, format, pools_at)
    recorder = Recorder(
        max_rows,
        address,
        inputs,
        card,
        batch_invariant=batch_invariant,
        library=library,
    )
    hidden, logits = Buffer(3, 0), Buffer(4, 0)
    given = {"tokens": Place(inputs.tokens, None), "positions": Place(inputs.positions, None)}
    given[WANTED_FIELD] = Place(inputs.wanted, None)
    recording = Recording(recorder, pools, layout, unplaced_states(layout, mx.bfloat16))
    recording.record(body, given, [hidden])
    recording.code_tails()
    if max_rows <= MAX_ROWS:
        recording.record(head, {"hidden": Place(hidden.address, hidden)}, [logits])
    return recorder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_of_a_step_has_wanted_rows(family: str, tmp_path: Path) -> None:
    numbers = count(10**6)
    recorder = recorder_of(
        packed_model(FAMILIES[family]), 128, address=lambda array: next(numbers), ending=True
    )
    gathers = [each for each in recorder.kernels if recorder.inputs.wanted in each.arguments]
    first = recorder.kernels.index(gathers[0])
    assert len(gathers) == 2, "the residual stream, and the last layer's attention"
    for number, each in enumerate(recorder.kernels):
        counts = {recorder.inputs.rows, recorder.inputs.wanted_rows}.intersection(each.arguments)
        expected = recorder.inputs.wanted_rows if number >= first else recorder.inputs.rows
        assert counts <= {expected}
    for each in gathers:
        assert isinstance(each.source, str)
        assert_compiles(each.source, tmp_path)


@pytest.mark.parametrize("format", FORMATS[:2], ids=lambda each: each.name)
def test_a_step_is_recorded_once_wherever_its_pools_move(format: KVFormat) -> None:
    model, functions = packed_model(FAMILIES["llama"]), range(1, 1000)

    def made(first: int) -> Recorder:
        numbers = count(10**6)
        return recorder_of(
            model,
            2,
            format=format,
            address=lambda array: next(numbers),
            pools_at=lambda layer: first + 8 * layer,
        )

    here, there = made(100), made(500)
    moved: dict[int, int] = {at: at + 400 for at in range(100, 116)}
    arguments = zip(here.kernels, there.kernels, strict=True)
    assert any(one.arguments != other.arguments for one, other in arguments)
    tables, arrays = here.moved_tables(moved)
    found = launches(here.kernels, functions[: len(here.kernels)], {**moved, **tables})
    for launch, kernel in zip(found, there.kernels, strict=True):
        known = [tables.get(each, each) for each in kernel.arguments]
        assert list(launch.arguments) == known
    wanted = list(there.tables.values())
    found_tables = [np.array(each).tolist() for each in arrays]
    assert [
        tuple(each[: len(own)]) for each, own in zip(found_tables, wanted, strict=True)
    ] == wanted
    assert bool(wanted) == (format.scheme == "page")


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_kernel_gets_what_it_names_after_what_it_reads(family: str, format: KVFormat) -> None:
    kernels, inputs = recorded(FAMILIES[family], 8, format=format)
    parameters = [_parameters(each) for each in kernels]
    assert [len(each) for each in parameters] == [len(each.arguments) for each in kernels]
    for number, each in enumerate(kernels):
        assert all(before < number for before in each.after)
        names = [name.split()[-1] for name in parameters[number]]
        given = dict(zip(names, each.arguments, strict=True))
        assert given.get("rows", inputs.rows) == inputs.rows


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
    group = group_of(empty_step(), 0)
    write_group(group, metadata, 7)
    tiles = group["tiles"][0, :9]
    entries = [0] * 7 + metadata.block_table.tolist()
    owners = np.repeat(np.arange(3), [count for _, count in spans])
    for row, (tile, owner) in enumerate(zip(tiles.tolist(), owners.tolist(), strict=True)):
        _, _, low, high, buffer, fresh = tile
        key = int(metadata.keys[row])
        assert (low, high, fresh) == (max(0, key - 99), key + 1, spans[owner][0])
        for each in (low, key):
            assert entries[buffer + each // block] == tables[owner][each // block]
        assert group["blocks"][0, row] == tables[owner][key // block]
        assert group["offsets"][0, row] == key % block


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
    group = group_of(empty_step(), 0)
    write_group(group, metadata, 7)
    entries = [0] * 7 + metadata.block_table.tolist()
    owners = np.repeat(np.arange(4), [count for _, count in spans]).tolist()
    tails, coded, own = (group[name][0].tolist() for name in ("tails", "coded", "own"))
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
    """Positions behind a picture are not the keys' numbers; behind a video they may be
    fractions.
    """
    behind = np.full((3, 1), 20.5, np.float32)
    rows = [
        scheduled("a", 7, 1, [[4]], KVFormat()),
        scheduled("b", 30, 1, [[5]], KVFormat(), positions=range(12, 13)),
        scheduled("c", 40, 1, [[6]], KVFormat(), positions=behind),
    ]
    step = empty_step()
    assert not write_positions(step, rows)  # half a position
    rows[-1] = scheduled("c", 40, 1, [[6]], KVFormat(), positions=behind + 0.5)
    assert write_positions(step, rows)
    assert step["positions"][0, :4].tolist() == [7, 12, 21, 0]
    apart = scheduled("d", 3, 1, [[7]], KVFormat(), positions=behind * [[1], [1], [2]])
    assert not write_positions(step, [*rows, apart])


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
    ("config", "why"),
    [
        (FAMILIES["gemma4_moe"] | {"head_dim": 144}, "heads of 144, with values of 144"),
    ],
)
def test_nodes_without_a_kernel_are_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedNode, match=why):
        recorded(config, 8)


@pytest.mark.parametrize(
    "config",
    [
        llama_config(**SIZES, attention_bias=True, mlp_bias=True),
        gemma4_config(**SIZES | {"num_hidden_layers": 4}, num_kv_shared_layers=2, **SHARED),
        gemma4_config(**SIZES, **TYPES, hidden_size_per_layer_input=64),
    ],
    ids=["biases", "shared keys", "embeddings of layers"],
)
def test_traits_that_hand_written_steps_refused_are_recorded(config: dict[str, Any]) -> None:
    assert recorded(config, 8)[0]


def test_a_card_with_too_little_shared_memory_is_refused() -> None:
    with pytest.raises(UnsupportedNode, match="256 columns do not fit 4000 bytes of shared memory"):
        recorded(FAMILIES["llama"], 8, card=Card(28, 4000))
    assert recorded(FAMILIES["llama"], 8, card=RTX_4090)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_recorded(family: str) -> None:
    head = recordable(trace(packed_model(FAMILIES[family])).head)
    recorder = Recorder(8, id, InputLayout(1, MAX_ROWS, 1, id), H200)
    hidden = Buffer(3, 0)
    recording = Recording(recorder, {}, KVLayout.of(()), states={})
    recording.record(head, {"hidden": Place(hidden.address, hidden)}, [Buffer(4, 0)])
    assert len(recorder.kernels) == 2, "a product, and what makes float32 of it"


@pytest.mark.parametrize("aligned", [True, False])
def test_products_of_rows_that_no_box_reaches_are_recorded(
    aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads copy these rows."""
    emulate_boxes(monkeypatch)
    monkeypatch.setattr(boxes, "reaches", lambda address: aligned)
    kernels, _ = recorded(FAMILIES["llama"], 1024)
    sources = [str(each.source) for each in kernels]
    assert sum("#define SHARING 1" in each for each in sources) == 8
    assert sum("#define X_BOXES 1" in each for each in sources) == (8 if aligned else 0)
    assert [len(_parameters(each)) for each in kernels] == [len(each.arguments) for each in kernels]


def test_warpgroups_multiply_by_heads_from_16_rows_on() -> None:
    codes, scales = mx.zeros((VAST, 64), mx.uint32), mx.zeros((VAST, 8), mx.bfloat16)
    head = ProductMatrix.of(PackedWeight(codes, scales, scales, Packing(64, 4, "affine")))
    inputs = InputLayout(1, MAX_ROWS, 1, id)
    for card in CARDS:
        for rows, few in ((8, True), (16, False), (32, False)):
            gemm = Recorder(rows, id, inputs, card).gemm(head, VAST, sharing=True)
            assert isinstance(gemm, SkinnyGemm) == (few or not card.warpgroups)
            assert gemm.fits


def test_warpgroups_multiply_by_small_matrices_in_4_bits_from_17_rows_on() -> None:
    inputs, hopper = InputLayout(1, MAX_ROWS, 1, id), Card(132, 227 << 10, warpgroups=True)

    def is_skinny(columns: int, outputs: int, rows: int, bits: int) -> bool:
        codes = mx.zeros((outputs, columns * bits // 32), mx.uint32)
        scales = mx.zeros((outputs, columns // 64), mx.bfloat16)
        packing = Packing(64, bits, "affine")
        matrix = ProductMatrix.of(PackedWeight(codes, scales, scales, packing))
        recorder = Recorder(rows, id, inputs, hopper)
        return isinstance(recorder.gemm(matrix, outputs, sharing=True), SkinnyGemm)

    assert [is_skinny(2880, 5120, rows, 4) for rows in (16, 32)] == [True, False]
    assert is_skinny(2880, 5120, 32, 8), "unmeasured"
    assert is_skinny(4096, 2816, 32, 4)
    routers = [is_skinny(2816, outputs, rows, 4) for outputs, rows in ((128, 64), (128, 128))]
    assert [*routers, is_skinny(2816, 1024, 64, 4)] == [True, False, False]


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_what_thread_blocks_keep_fits_the_card(card: Card) -> None:
    for dim, kv_heads, group in ((128, 8, 4), (256, 16, 2), (512, 4, 8), (256, 8, 2), (512, 2, 8)):
        shape = paged.Shape(mx.bfloat16, dim, dim, kv_heads, group, 64, False, False)
        codes = [page_codes(n, m, 128 if m > 5 else 64) for n in BITS for m in BITS]
        asked = [packed.shared_memory(shape, each) for each in codes]
        asked += [paged.single_memory(shape), paged.shared_memory(shape, shape.many_tiles)]
        assert max(asked) <= card.shared


def test_a_model_in_float32_is_refused() -> None:
    """Attention reads and writes keys in bfloat16, and such a model has pools of float32."""
    model = build(FAMILIES["llama"] | {"intermediate_size": 1024})
    use_device_products(model)
    layout, body = KVLayout.of(model.layout), recordable(trace(model).body)
    inputs = InputLayout(len(layout.groups), MAX_ROWS, 100, id)
    states = unplaced_states(layout, mx.float32)
    survey = Survey(Recorder(8, id, inputs, H200), pools_of(layout), layout, states)
    given = {
        name: Place(at, Buffer(at, 4 * MAX_ROWS))
        for name, at in (("tokens", inputs.tokens), ("positions", inputs.positions))
    }
    survey.record(body, given, [Buffer(3, 0)])
    refused = [reason for node, reason in survey.unsupported if node.uses_pools]
    assert refused == 2 * ["attention of mlx.core.float32"]
    reasons = {reason for _, reason in survey.unsupported}
    assert "a product with a matrix of mlx.core.float32" in reasons


def test_weighted_norms_of_values_are_refused() -> None:
    own, whole = {"weight": Weight("w", mx.ones(64)), "eps": 1e-6}, Part(0, 0, 64, head=64)
    v = HeadOperand(whole, Node("rms_norm", (0,), (1,), ("x",), attributes=own), rotate=None)
    with pytest.raises(UnsupportedNode, match="weighted norms of values"):
        check_heads(HeadOperand(whole, None, None), None, v)


def test_last_products_of_experts_may_read_the_tiles_at_their_start() -> None:
    kernels, _ = recorded(FAMILIES["qwen3_moe"], 2)
    experts = [n for n, each in enumerate(kernels) if "EXPERTS 1" in each.source]
    lasts = [n for n in experts if "FIRST 1" not in kernels[n].source]
    assert lasts
    for number in lasts:
        (before,) = kernels[number].after
        text = kernels[before].source
        # It starts others once the router's kernel is done: their name is defined and called once.
        assert text.count("others_may_start()") == 2
        assert "READY wait_for_others(), others_may_start()" in text


@pytest.mark.parametrize("rows", [2, 32])
def test_last_products_of_experts_await_the_thread_blocks_of_their_tile(rows: int) -> None:
    kernels, _ = recorded(FAMILIES["gemma4_moe"], rows)
    experts = [each for each in kernels if "EXPERTS 1" in each.source]
    firsts, lasts = experts[::2], experts[1::2]
    assert len(firsts) == len(lasts) > 0
    for first, last in zip(firsts, lasts, strict=True):
        assert "#define FIRST 1\n" in first.source
        assert "#define TILE_COUNTS 1\n" in first.source
        assert f"#define TILE_COUNTS {first.grid[0]}\n" in last.source
    routing = [each for each in kernels if "int* tiles) {" in each.source and each.block > 256]
    assert all("#define TILE_COUNTS 1\n" in each.source for each in routing)
    assert len(routing) == len(firsts)


def test_the_experts_of_one_row_are_not_counted() -> None:
    """Its routing, in one warp, makes no room for counts."""
    kernels, _ = recorded(FAMILIES["gemma4_moe"], 1)
    experts = [each.source for each in kernels if "EXPERTS 1" in each.source]
    assert experts
    assert all("#define TILE_COUNTS 0\n" in text for text in experts)
