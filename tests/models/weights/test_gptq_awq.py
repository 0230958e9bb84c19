"""GPTQ and AWQ checkpoints, packed as their libraries write them, against what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest

from quire.core.errors import ModelError
from quire.models.base import named_layers
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import solo_logits
from tests.support.tiny_models import qwen3_moe_config, random_weights

PROMPT = [(11 * i + 5) % 256 for i in range(40)]
Numbers = npt.NDArray[Any]


def _codes(matrix: Numbers, bits: int, groups: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return asymmetric codes `[in, out]`, zero points and scales `[groups, out]` of `[in,
    out]`.
    """
    top = 2**bits - 1
    count = groups.max() + 1
    low = np.stack([matrix[groups == g].min(0) for g in range(count)])
    high = np.stack([matrix[groups == g].max(0) for g in range(count)])
    scales = ((high - low) / top).astype(np.float16)
    wide = scales.astype(np.float32)
    zeros = np.clip(np.round(-low / wide), 1, top)
    codes = np.clip(np.round(matrix / wide[groups] + zeros[groups]), 0, top)
    return codes.astype(np.int64), zeros.astype(np.int64), scales


def _words(codes: Numbers, bits: int) -> Numbers:
    """Pack `[..., n]` into `[..., n * bits / 32]`, a stream of bits, the low ones first."""
    stream = (codes[..., None] >> np.arange(bits)) & 1
    packed = np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return packed.view(np.int32)


Parts = dict[str, Numbers]
Pack = Callable[[Numbers, int, Numbers], tuple[Parts, Numbers]]


def _gptq(offset: int) -> Pack:
    def pack(matrix: Numbers, bits: int, groups: Numbers) -> tuple[Parts, Numbers]:
        codes, zeros, scales = _codes(matrix, bits, groups)
        parts = {
            "qweight": _words(codes.T, bits).T,
            "qzeros": _words(zeros - offset, bits),
            "scales": scales,
            "g_idx": groups.astype(np.int32),
        }
        return parts, (codes - zeros[groups]) * scales.astype(np.float32)[groups]

    return pack


def _awq(matrix: Numbers, bits: int, groups: Numbers) -> tuple[Parts, Numbers]:
    codes, zeros, scales = _codes(matrix, bits, groups)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight outputs stands at each place of a word

    def interleaved(numbers: Numbers) -> Numbers:
        return _words(numbers.reshape(len(numbers), -1, 8)[..., order].reshape(numbers.shape), 4)

    parts = {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": scales}
    return parts, (codes - zeros[groups]) * scales.astype(np.float32)[groups]


def _in_order(size: int) -> Callable[[int], Numbers]:
    return lambda width: np.arange(width) // (width if size < 0 else size)


def _shuffled(width: int) -> Numbers:
    return np.random.default_rng(width).permutation(width) // 32


GPTQ = {"quant_method": "gptq"}
AUTO_ROUND = [
    (_gptq(1), {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}),
    (_awq, {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}),
    (_gptq(0), {"quant_method": "auto-round", "packing_format": "auto_round"}),
    (_gptq(0), {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"}),
    (_gptq(1), {"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"}),
    (_gptq(0), {"quant_method": "intel/auto-round", "backend": "autoround:exllamav2"}),
    (_awq, {"quant_method": "intel/auto-round", "backend": "auto_round:awq"}),
]
CASES: dict[str, tuple[Pack, dict[str, Any], int, Callable[[int], Numbers], bool]] = {
    "gptq-4": (_gptq(1), GPTQ, 4, _in_order(32), True),
    "gptq-8-groups-of-64": (_gptq(1), GPTQ, 8, _in_order(64), True),
    "gptq-2": (_gptq(1), GPTQ, 2, _in_order(32), True),
    "gptq-3": (_gptq(1), GPTQ, 3, _in_order(32), True),
    "gptq-v2": (_gptq(0), GPTQ | {"checkpoint_format": "gptq_v2"}, 4, _in_order(32), True),
    "gptq-a-scale-a-column": (_gptq(1), GPTQ, 4, _in_order(-1), True),
    "gptq-in-another-order": (_gptq(1), GPTQ | {"desc_act": True}, 4, _shuffled, False),
    "gptq-groups-of-16": (_gptq(1), GPTQ, 4, _in_order(16), False),
    "awq": (_awq, {"quant_method": "awq", "version": "gemm"}, 4, _in_order(32), True),
    **{
        f"auto-round-{index}": (pack, method, 4, _in_order(32), True)
        for index, (pack, method) in enumerate(AUTO_ROUND)
    },
}


def _write(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return str(folder)


def _separate(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return one tensor an expert."""
    ready = {}
    for name, array in weights.items():
        path, experts, rest = name.partition(".experts.")
        if experts:
            ready |= {f"{path}.experts.{i}.{rest}": array[i] for i in range(array.shape[0])}
        else:
            ready[name] = array
    return ready


@pytest.mark.parametrize("name", CASES)
def test_codes_compute_what_they_stand_for(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pack, method, bits, groups, kept = CASES[name]
    said = method | {"bits": bits}
    ours, theirs = _opened(tmp_path, pack, said, lambda path: bits, groups)
    assert ("are unpacked" in caplog.text) != kept
    assert (ours.parameter_bytes < theirs.parameter_bytes) == kept


EIGHT = {"bits": 8, "group_size": 32}


@pytest.mark.parametrize(
    "method",
    [
        GPTQ | {"dynamic": {"+:.*down_proj.*": EIGHT, "-:.*q_proj.*": {}}},
        {"quant_method": "auto-round", "extra_config": {"model.layers.0.mlp.down_proj": EIGHT}},
    ],
    ids=["dynamic", "extra_config"],
)
def test_modules_have_widths_of_their_own(method: dict[str, Any], tmp_path: Path) -> None:
    def bits(path: str) -> int | None:
        return None if "q_proj" in path else 8 if "down_proj" in path else 4

    ours, _ = _opened(tmp_path, _gptq(1), method | {"bits": 4}, bits, _in_order(32))
    layers = named_layers(ours.model)
    assert layers["model.layers.1.mlp.up_proj"].bits == 4
    assert layers["model.layers.1.mlp.down_proj"].bits == 8
    assert isinstance(layers["model.layers.1.self_attn.q_proj"], nn.Linear)


def _opened(
    folder: Path,
    pack: Pack,
    said: dict[str, Any],
    bits: Callable[[str], int | None],
    groups: Callable[[int], Numbers],
) -> tuple[LoadedModel, LoadedModel]:
    """Return a model with packed matrices, whose logits are those of the other's plain ones."""
    config = qwen3_moe_config(moe_intermediate_size=64, tie_word_embeddings=False)
    packed, plain = {}, {}
    for key, array in _separate(random_weights(config)).items():
        packed[key] = plain[key] = array
        if array.ndim == 2 and "embed" not in key and ".gate.weight" not in key:
            matrix = np.array(packed.pop(key)).T  # [in, out]
            path = key.removesuffix(".weight")
            if (width := bits(path)) is None:
                packed[key] = array
                continue
            parts, stands_for = pack(matrix, width, groups(matrix.shape[0]))
            packed |= {f"{path}.{part}": mx.array(value) for part, value in parts.items()}
            plain[key] = mx.array(stands_for.T.astype(np.float32))
    quantized = config | {"quantization_config": said}

    ours = open_model(_write(folder / "packed", quantized, packed))
    theirs = open_model(_write(folder / "plain", config, plain))

    difference = solo_logits(ours.model, PROMPT) - solo_logits(theirs.model, PROMPT)
    assert mx.max(mx.abs(difference)).item() < 1e-4
    return ours, theirs


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ({"quant_method": "hqq", "bits": 4}, "hqq"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:fake"}, "auto_round:fake"),
        ({"quant_method": "gptq", "bits": 4}, "up_proj.qweight' has no qzeros"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    method: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config = qwen3_moe_config() | {"quantization_config": method}
    codes = {"model.layers.1.mlp.up_proj.qweight": mx.zeros((8, 128), dtype=mx.int32)}
    with pytest.raises(ModelError, match=named):
        open_model(_write(tmp_path / "model", config, codes))


def _packed_matrix(config: dict[str, Any]) -> tuple[str, dict[str, mx.array]]:
    """Return a model's tensors with one matrix in GPTQ's codes, and the path of that."""
    weights, path = random_weights(config), "model.layers.1.mlp.up_proj"
    matrix = np.array(weights.pop(f"{path}.weight")).T
    parts, _ = _gptq(1)(matrix, 4, np.arange(matrix.shape[0]) // 32)
    return path, weights | {f"{path}.{part}": mx.array(value) for part, value in parts.items()}


@pytest.mark.parametrize(
    ("part", "wrong", "named"),
    [
        ("scales", mx.ones((2, 2)), r"qzeros': .* do not fit \[2, 2\] scales: gptq is read"),
        ("scales", mx.ones((2, 128), dtype=mx.int16), "scales' holds int16, which is not a type"),
        ("qzeros", mx.ones((1, 1), dtype=mx.int32), r"qzeros': \[1, 1\] words do not fit"),
        ("qzeros", mx.ones((2, 20), dtype=mx.int32), "gptq is read with 2, 3, 4, 8 bits"),
        ("qzeros", mx.ones((2, 16)), "no words"),
        ("qweight", mx.ones((8, 128)), "no words"),
        ("qweight", mx.ones((3, 3), dtype=mx.int32), "do not fit each other"),
        ("g_idx", mx.ones(7, dtype=mx.int32), "do not fit each other"),
        ("g_idx", mx.full(64, 2, dtype=mx.int32), "do not fit each other"),
        ("g_idx", mx.full(64, -1, dtype=mx.int32), "do not fit each other"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    part: str, wrong: mx.array, named: str, tmp_path: Path
) -> None:
    config = qwen3_moe_config() | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    path, weights = _packed_matrix(config)
    with pytest.raises(ModelError, match=f"{path}.*{named}"):
        open_model(_write(tmp_path / "model", config, weights | {f"{path}.{part}": wrong}))


def test_rows_that_fill_no_words_are_named(tmp_path: Path) -> None:
    config = qwen3_moe_config() | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    weights, path = random_weights(config), "model.layers.1.mlp.up_proj"
    parts, _ = _awq(np.array(weights.pop(f"{path}.weight")).T, 4, np.arange(64) // 32)
    packed = weights | {f"{path}.{part}": mx.array(value) for part, value in parts.items()}
    packed[f"{path}.qweight"] = mx.ones((3, 3), dtype=mx.int32)
    with pytest.raises(ModelError, match=rf"{path}.qweight': \[3, 3\] words are no packing"):
        open_model(_write(tmp_path / "model", config, packed))


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    """GPTQ's first libraries wrote one for each matrix, whether the model has one or not."""
    config = qwen3_moe_config() | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    path, weights = _packed_matrix(config)
    plain = open_model(_write(tmp_path / "plain", config, weights))
    biased = weights | {f"{path}.bias": mx.zeros(128)}

    ours = open_model(_write(tmp_path / "biased", config, biased))

    assert mx.array_equal(solo_logits(ours.model, PROMPT), solo_logits(plain.model, PROMPT))
    with pytest.raises(ModelError, match=rf"does not know, '{path}.bias'$"):
        open_model(_write(tmp_path / "wrong", config, biased | {f"{path}.bias": mx.ones(128)}))
