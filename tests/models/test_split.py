"""A split model: what each part has, and what cannot be split."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from quire.core.errors import ModelError
from quire.device.ranks import Part
from quire.models.base import named_parameters
from quire.models.shares import Split, inputs, joined_pieces, own_piece, rows
from quire.models.weights.identity import WeightIdentity
from quire.models.weights.loader import open_model
from tests.support.families import CONFIGS
from tests.support.tiny_models import write_model

HALVES = (Part(0, 2), Part(1, 2))


def parameters(folder: Path, part: Part | None = None) -> dict[str, mx.array]:
    given = {} if part is None else {"part": part}
    return named_parameters(open_model(str(folder), dtype="float32", **given).model)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen2_moe"])
def test_the_parts_of_the_weights_make_the_whole(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path, CONFIGS[name])
    whole = parameters(folder)
    first, second = (parameters(folder, part) for part in HALVES)
    cuts = 0
    for place, array in whole.items():
        if place not in first or first[place].shape == array.shape:
            continue
        (axis,) = [n for n in range(array.ndim) if first[place].shape[n] != array.shape[n]]
        joined = mx.concatenate([first[place], second[place]], axis=axis)
        assert mx.array_equal(joined, array), place
        cuts += 1
    assert cuts >= 7 * 2  # of each layer: queries, keys, values, output, gate, up, down


def test_the_first_part_alone_adds_the_bias_of_a_sum(tmp_path: Path) -> None:
    config = CONFIGS["llama"] | {"attention_bias": True, "mlp_bias": True}
    folder = write_model(tmp_path, config)
    first, second = (parameters(folder, part) for part in HALVES)
    for place in ("self_attn.o_proj.bias", "mlp.down_proj.bias"):
        name = f"model.layers.0.{place}"
        assert first[name].any()
        assert not second[name].any()


def test_a_tied_head_is_cut_from_the_table(tmp_path: Path) -> None:
    config = CONFIGS["llama"] | {"tie_word_embeddings": True, "vocab_size": 201}
    folder = write_model(tmp_path, config)
    table = parameters(folder)["model.embed_tokens.weight"]
    first, second = (parameters(folder, part)["lm_head.weight"] for part in HALVES)
    assert mx.array_equal(mx.concatenate([first, second])[:201], table)
    assert first.shape == second.shape == (101, table.shape[1])


def test_parts_share_a_head_of_keys_where_there_are_fewer(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIGS["llama"] | {"num_key_value_heads": 2})
    place = "model.layers.0.self_attn.k_proj.weight"
    found = [parameters(folder, Part(rank, 4))[place] for rank in range(4)]
    assert mx.array_equal(found[0], found[1])
    assert mx.array_equal(found[2], found[3])
    assert not mx.array_equal(found[1], found[2])


def test_rows_of_several_kinds_are_cut_each_by_itself() -> None:
    whole = mx.arange(10)  # two heads of three values, then four of one
    cut = rows((2, 3), (4, 1))
    assert [cut.of("w", whole, part, joined_pieces).tolist() for part in HALVES] == [
        [0, 1, 2, 6, 7],
        [3, 4, 5, 8, 9],
    ]


def test_packed_inputs_are_cut_between_groups() -> None:
    """Three groups of 64 for two ranks: the first has one more."""
    scales = mx.arange(3)[None]
    shares = [Split(part, group=64).width(192) for part in HALVES]
    assert [width for width, _ in shares] == [128, 64]
    (_, run), _ = shares
    pieces = [inputs(run).of("scales", scales, part, joined_pieces) for part in HALVES]
    assert [each.tolist() for each in pieces] == [[[0, 1]], [[2]]]


def test_a_cut_through_a_group_is_refused() -> None:
    with pytest.raises(ModelError, match="between groups"):
        inputs((2, 32)).of("o_proj.scales", mx.zeros((4, 1)), HALVES[0], joined_pieces)
    with pytest.raises(ModelError, match="packed in groups of 64"):
        Split(HALVES[0], group=64).width(64)


@pytest.mark.parametrize(
    ("name", "size", "why"),
    [
        ("llama", 3, "attention heads, not a multiple of 3"),
        ("gemma3n_text", 3, "attention heads, not a multiple of 3"),
        ("mamba2", 3, "heads of state spaces, not a multiple"),
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path: Path, name: str, size: int, why: str) -> None:
    folder = write_model(tmp_path, CONFIGS[name])
    with pytest.raises(ModelError, match=why):
        open_model(str(folder), part=Part(0, size))


def test_the_first_part_alone_hashes_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, CONFIGS["llama"])
    hashed: list[int] = []

    class Counted(WeightIdentity):
        def __init__(self, files: Sequence[Path]) -> None:
            hashed.append(len(files))
            super().__init__(files)

    monkeypatch.setattr("quire.models.weights.loader.WeightIdentity", Counted)
    for part in HALVES:
        open_model(str(folder), part=part)
    assert hashed == [1, 0]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_piece_does_not_keep_the_whole_in_memory(tmp_path: Path, axis: int) -> None:
    path = str(tmp_path / "whole.safetensors")
    mx.save_safetensors(path, {"weight": mx.ones((2048, 2048))})
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    piece = own_piece(mx.load(path)["weight"], 1024, 2048, axis)  # type: ignore[index]
    mx.eval(piece)
    mx.clear_cache()
    assert piece.nbytes <= mx.get_active_memory() - before < 1.5 * piece.nbytes


def test_small_pieces_begin_in_memory_of_their_own() -> None:
    """A kernel reads them by address, so they must not be views."""
    whole = mx.arange(12).reshape(3, 4)
    assert own_piece(whole, 2, 4, axis=1).tolist() == [[2, 3], [6, 7], [10, 11]]
