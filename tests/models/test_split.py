"""A split model: what each part has, and what cannot be split."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from quire.core.errors import ModelError
from quire.device.ranks import Part
from quire.models.base import named_parameters
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


@pytest.mark.parametrize(
    ("name", "size", "why"),
    [
        ("llama", 3, "not a multiple of 3"),
        ("mamba", 2, "cannot be split yet"),
        ("gemma3n_text", 2, "cannot be split yet"),
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path: Path, name: str, size: int, why: str) -> None:
    folder = write_model(tmp_path, CONFIGS[name])
    with pytest.raises(ModelError, match=why):
        open_model(str(folder), part=Part(0, size))
