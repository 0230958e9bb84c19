"""HunyuanOCR against transformers and in company: rows, positions, logits, tokens; other names."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.media import CLIP_COLOURS, MediaItem
from quire.core.request import Request
from quire.media.kinds import KINDS
from quire.models.weights.loader import LoadedModel, open_model
from tests.media.test_images import encoded as file_of
from tests.media.test_images import noise
from tests.models.solo import encoded, solo_logits
from tests.support.agreement import differ
from tests.support.hunyuan import CONFIG
from tests.support.parity import (
    SCENARIOS,
    TOLERANCE,
    alone,
    answered,
    assert_same,
    prompts,
)
from tests.support.seeing import PATCH, Prompt, picture, prompt
from tests.support.tiny_models import random_weights

ANSWER = 12


def shown(seed: int, rows: int, columns: int) -> MediaItem:
    """Return a picture, with rows for ends of lines and two around it."""
    item = picture(seed, rows, columns)
    return replace(item, tokens=item.tokens + rows // 2 + 2)


PROMPTS: dict[str, Prompt] = {
    "two of different sizes": prompt(3, shown(2, 4, 4), shown(3, 10, 6), 8),
    "text alone": prompt(40),
    "a picture": prompt(shown(1, 6, 10), 5),
    "between texts": prompt(20, shown(4, 2, 12), 20),
    "after long text": prompt(150, shown(5, 8, 8), 4),
    "in a second turn": prompt(9, shown(6, 6, 6), 30, shown(7, 14, 4), 7),
}
DAILY = "two of different sizes"


def _cases(names: Any, daily: str) -> list[Any]:
    return [pytest.param(n, marks=() if n == daily else pytest.mark.slow) for n in names]


Both = tuple[Any, LoadedModel]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    pytest.importorskip("torch", reason="the oracle needs torch")
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
    from tests.models import oracle

    folder = Path(tmp_path_factory.mktemp("hunyuan"))
    config = transformers.AutoConfig.for_model(**deepcopy(CONFIG))
    reference = oracle.save_random(config, folder)
    rope = reference.model.language_model.rotary_emb
    rope.recomposition_frequencies = pairs_by_axis(rope.mrope_section)
    return reference, open_model(str(folder))


def pairs_by_axis(section: list[int]) -> Callable[[Any], Any]:
    """Let both halves of a pair turn with the same axis, as in Tencent's own code and in vLLM's.

    transformers 5.23 takes sections twice as long instead of twice, so that a pair's halves turn
    with different ones.
    """
    import torch

    def recompose(freq: Any) -> Any:
        parts = torch.cat((freq, freq), dim=-1).split(section * 2, dim=-1)
        return torch.cat([part[i % len(section)] for i, part in enumerate(parts)], dim=-1)

    return recompose


def given(items: list[MediaItem]) -> dict[str, Any]:
    """Return pictures as transformers' processor gives them: row by row, colour by colour."""
    import torch

    parts = []
    for item in items:
        rows, columns = item.shape
        raw = np.frombuffer(item.features, np.uint8)
        squares = raw.reshape(rows // 2, columns // 2, 2, 2, PATCH, PATCH, 3)
        lines = squares.swapaxes(1, 2).reshape(-1, PATCH, PATCH, 3) / 255
        scaled = (lines - np.array(CLIP_COLOURS.mean)) / np.array(CLIP_COLOURS.std)
        parts.append(scaled.transpose(0, 3, 1, 2).reshape(rows * columns, -1))
    return {
        "pixel_values": torch.from_numpy(np.concatenate(parts).astype(np.float32)),
        "image_grid_thw": torch.tensor([(1, *item.shape) for item in items]),
    }


@pytest.mark.oracle
def test_rows_of_pictures_match(both: Both) -> None:
    import torch

    reference, loaded = both
    for number, grid in enumerate(((2, 4), (6, 10), (14, 4), (8, 8), (2, 18))):
        item = shown(number, *grid)
        with torch.no_grad():
            (theirs,) = reference.model.get_image_features(**given([item])).pooler_output
        (ours,) = encoded(loaded.model.encoders["image"], item)
        assert len(ours) == loaded.model.encoders["image"].rows(grid) == item.tokens
        assert differ(ours, theirs) < 2e-4


@pytest.mark.oracle
@pytest.mark.parametrize("case", _cases(PROMPTS, DAILY))
def test_positions_logits_and_tokens_match(both: Both, case: str) -> None:
    import torch

    from tests.models import oracle

    reference, loaded = both
    tokens, media = PROMPTS[case]
    ids, pictures = torch.tensor([tokens]), given([each.item for each in media]) if media else {}
    if media:
        kinds = torch.zeros(1, len(tokens), dtype=torch.long)
        for each in media:
            kinds[0, each.start : each.end] = 1
        pictures["mm_token_type_ids"] = kinds
        places, _ = reference.model.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=pictures["image_grid_thw"]
        )
        assert np.array_equal(loaded.model.positions(tokens, media), places[:, 0].numpy())
    with torch.no_grad():
        logits = reference(ids, **pictures).logits[0]
        greedy = oracle.reference_greedy(reference, tokens, ANSWER, **pictures)
    assert differ(solo_logits(loaded.model, tokens, media), logits) < TOLERANCE
    assert answered(loaded, tokens, media, ANSWER).tokens == greedy
    assert len(set(greedy)) > 1, "a degenerate continuation proves nothing"


def opened(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> LoadedModel:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return open_model(str(folder))


def requests() -> list[Request]:
    """Return the prompts, as requests."""
    texts = prompts([1] * len(PROMPTS), tokens=20)
    return [
        replace(text, prompt=tuple(tokens), media=tuple(media))
        for text, (tokens, media) in zip(texts, PROMPTS.values(), strict=True)
    ]


PLAIN, PAGE = KVFormat(), KVFormat("page", 4, 4)
# Of page blocks the scenario's budget holds one sequence's tail, so that no two ever run.
IN_COMPANY = [
    pytest.param(name, format, marks=() if name == "batch of unequal lengths" else pytest.mark.slow)
    for name in SCENARIOS
    for format in (PLAIN, PAGE)
    if format is PLAIN or name != "pre-empted and resumed"
]


@pytest.mark.parametrize(("scenario", "format"), IN_COMPANY)
def test_as_if_alone(tmp_path: Path, scenario: str, format: KVFormat) -> None:
    loaded = opened(tmp_path / "model", CONFIG, random_weights(CONFIG))
    config = EngineConfig("", kv_memory=16 << 20, kv_format=format, kv_skip_layers=())
    config = replace(config, prefix_cache=False)
    wanted = requests()
    expected = alone(loaded, config, wanted)
    got = SCENARIOS[scenario](loaded, config, wanted)
    assert_same(got, expected, [request.id for request in wanted])


_PUBLISHED = (
    ("patch_embed.proj", "embeddings.patch_embedding"),
    ("pos_embed", "embeddings.position_embedding"),
    ("blocks.", "layers."),
    ("norm1", "input_layernorm"),
    ("norm2", "post_attention_layernorm"),
    (".attn.proj", ".self_attn.o_proj"),
    ("up_proj", "dense_h_to_4h"),
    ("down_proj", "dense_4h_to_h"),
    ("merger.norm", "merger.before_rms"),
    ("merger.proj_conv", "merger.proj.0"),
    ("merger.proj_out", "merger.proj.2"),
    ("merger.", "perceive."),
)


def theirs(
    weights: dict[str, mx.array], *, conversion: bool, width: int = 48
) -> dict[str, mx.array]:
    """Return the tensors as Tencent publishes them, or as mlx-vlm converts them.

    Args:
        width: of the encoder.
    """
    kernels = {"patch_embedding": (PATCH, 3), "proj.0": (2, width), "proj.2": (1, 2 * width)}
    ready = {}
    for key, array in weights.items():
        if not key.startswith("visual."):
            ready[f"language_model.{key}" if conversion else key] = array
            continue
        key = key.removeprefix("visual.")
        for ours, other in _PUBLISHED:
            key = key.replace(ours, other)
        front = "vision_tower." if conversion else "vit."
        if ".attn.qkv." in key:
            for part, rows in zip("qkv", mx.split(array, 3), strict=True):
                ready[front + key.replace("attn.qkv", f"self_attn.{part}_proj")] = rows
            continue
        for name, (side, channels) in kernels.items():
            if key.endswith(f"{name}.weight"):
                array = array.reshape(-1, side, side, channels)
                array = array if conversion else array.moveaxis(-1, 1)
        if key.endswith("position_embedding.weight"):
            array = mx.concatenate([array[:1], array])  # a class token's
        ready[front + key] = array
    return ready


@pytest.mark.parametrize("conversion", [False, True])
def test_other_names_are_read(tmp_path: Path, conversion: bool) -> None:
    weights = random_weights(CONFIG)
    tokens, media = PROMPTS[DAILY]
    flat = {key: value for key, value in CONFIG.items() if key != "text_config"}
    text = dict(CONFIG["text_config"])
    rope = dict(text.pop("rope_parameters"))
    scaling = {"type": "xdrope", "alpha": rope["alpha"], "xdrope_section": rope["mrope_section"]}
    flat |= text | {"model_type": "hunyuan_vl", "rope_scaling": scaling, "rope_theta": 10000.0}
    ours = solo_logits(opened(tmp_path / "ours", CONFIG, weights).model, tokens, media)
    published = theirs(weights, conversion=conversion)
    found = solo_logits(opened(tmp_path / "theirs", flat, published).model, tokens, media)
    assert mx.array_equal(ours, found)


SETTINGS: dict[str, Any] = {
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 1,
    "image_mean": list(CLIP_COLOURS.mean),
    "image_std": list(CLIP_COLOURS.std),
}
PICTURE_SIZES = [(16, 16), (7, 3), (1, 1), (24, 56), (61, 130), (640, 480), (481, 1023), (190, 1)]


@pytest.mark.oracle
@pytest.mark.parametrize("bounds", [(256, 4096), (64, 64), (1024, 65536)])
def test_pixels_grids_and_counts_match(tmp_path: Path, bounds: tuple[int, int]) -> None:
    pytest.importorskip("torch")
    oracle = pytest.importorskip("transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl")
    size = {"shortest_edge": bounds[0], "longest_edge": bounds[1]}
    theirs = oracle.HunYuanVLImageProcessorPil(**SETTINGS, size=size)
    named = {"image_processor_type": "HunYuanVLImageProcessor", "resample": 1}
    settings = SETTINGS | named | {"min_pixels": bounds[0], "max_pixels": bounds[1]}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    ours = KINDS["image"].open(tmp_path)
    assert ours is not None
    for seed, (width, height) in enumerate(PICTURE_SIZES):
        picture = noise(width, height, seed)
        wanted = theirs.preprocess(picture, return_tensors="np")
        (part,) = ours.read(file_of(picture), param="p")
        rows, columns = part.item.shape
        assert [1, rows, columns] == wanted["image_grid_thw"][0].tolist()
        assert part.item.tokens == rows // 2 * (columns // 2 + 1) + 2
        found = given([part.item])["pixel_values"].numpy()
        assert np.abs(found - wanted["pixel_values"]).max() < 1e-3


@pytest.mark.parametrize("everything", [False, True], ids=["decoder", "encoder too"])
def test_packed_weights(tmp_path: Path, everything: bool) -> None:
    """mlx-vlm packs the decoder, or every matrix that is a tensor of its own."""
    tokens, media = PROMPTS[DAILY]
    packed, plain = {}, {}
    wide = {"hidden_size": 64, "intermediate_size": 96}
    config = CONFIG | {"vision_config": CONFIG["vision_config"] | wide}
    for key, array in theirs(random_weights(config), conversion=True, width=64).items():
        base = key.removesuffix(".weight")
        inner = everything and (".self_attn." in key or ".mlp." in key)
        may = array.ndim == 2 and array.shape[-1] % 32 == 0
        if may and key.endswith(".weight") and (inner or key.startswith("language_model.")):
            parts = mx.quantize(array, group_size=32, bits=8)
            packed |= dict(zip((key, f"{base}.scales", f"{base}.biases"), parts, strict=True))
            plain[key] = mx.dequantize(*parts, group_size=32, bits=8)
        else:
            packed[key] = plain[key] = array
    inside = {key.split(".")[-2] for key in packed if "tower" in key and key.endswith("scales")}
    named = {"q_proj", "k_proj", "v_proj", "o_proj", "dense_h_to_4h", "dense_4h_to_h", "mlp"}
    assert inside == (named if everything else set())
    ours = solo_logits(opened(tmp_path / "packed", config, packed).model, tokens, media)
    wanted = solo_logits(opened(tmp_path / "plain", config, plain).model, tokens, media)
    assert mx.abs(ours - wanted).max().item() < 1e-3 * mx.abs(wanted).max().item()
