"""Opening described families that see: names of all kinds of checkpoint, parts, shapes, times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.errors import ModelError, RequestError
from quire.core.media import PlacedMedia
from quire.models.base import LanguageModel
from quire.models.weights.loader import context_length, open_model
from quire.models.weights.names import renamed
from tests.models.solo import encoded, solo_logits
from tests.support.seeing import CONFIGS, MERGE, PATCH, PROMPTS, film, picture, prompt, speech
from tests.support.tiny_models import GLM_NORMS, random_weights, write_model

Weights = dict[str, mx.array]
TOKENS, MEDIA = PROMPTS["in a second turn"]
OLD = ("qwen2_vl", "qwen2_5_vl")
OTHERS = ("glm4v", "glm46v", "glm_ocr", "qwen3_omni_moe_thinker")
"""Text of them alone is served under another name, or not at all."""


def opened(folder: Path, config: dict[str, Any], weights: Weights) -> LanguageModel:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return open_model(str(folder)).model


def theirs(name: str, weights: Weights, *, conversion: bool) -> Weights:
    """Return the tensors as they are published, or as mlx-vlm converts them."""
    old = name in OLD
    parts = {
        "qwen2_vl": {".mlp.up_proj.": ".mlp.fc1.", ".mlp.down_proj.": ".mlp.fc2."},
        "qwen2_5_vl": {},
    }.get(name, {".mlp.up_proj.": ".mlp.linear_fc1.", ".mlp.down_proj.": ".mlp.linear_fc2."})
    if old:
        parts |= {"merger.norm": "merger.ln_q", "merger.linear_fc1": "merger.mlp.0"}
        parts["merger.linear_fc2"] = "merger.mlp.2"
    ready: Weights = {}
    for key, array in weights.items():
        if not key.startswith("visual."):
            ready[_text_name(key, old=old, conversion=conversion)] = array
            continue
        for ours, other in parts.items():
            key = key.replace(ours, other)
        if key == "visual.patch_embed.proj.weight":
            array = array.reshape(-1, 2, PATCH, PATCH, 3)
            array = array if conversion else array.moveaxis(-1, 1)
        front = "vision_tower." if conversion else "visual." if old else "model.visual."
        ready[front + key.removeprefix("visual.")] = array
    return ready


def _text_name(key: str, *, old: bool, conversion: bool) -> str:
    if conversion:
        return "language_model." + key.replace(".experts.", ".switch_mlp.")
    if old or not key.startswith("model."):
        return key
    return "model.language_model." + key.removeprefix("model.")


def published_experts(weights: Weights) -> Weights:
    """Return Qwen3-VL-MoE's, gate and up in one, transposed."""
    ready = {}
    for key, array in weights.items():
        base, _, part = key.removesuffix(".weight").rpartition(".")
        if not base.endswith(".experts"):
            ready[key] = array
        elif part == "down_proj":
            ready[f"{base}.down_proj"] = array.swapaxes(1, 2)
        elif part == "gate_proj":
            both = mx.concatenate([array, weights[f"{base}.up_proj.weight"]], axis=1)
            ready[f"{base}.gate_up_proj"] = both.swapaxes(1, 2)
    return ready


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_names_of_all_kinds_of_checkpoint_are_read(name: str, tmp_path: Path) -> None:
    weights = random_weights(CONFIGS[name])
    published = theirs(name, weights, conversion=False)
    if name == "qwen3_vl_moe":
        published = published_experts(published)
    kinds = (weights, published, theirs(name, weights, conversion=True))

    models = [
        opened(tmp_path / str(number), CONFIGS[name], kind) for number, kind in enumerate(kinds)
    ]

    logits = [solo_logits(model, TOKENS, MEDIA) for model in models]
    assert mx.array_equal(logits[0], logits[1])
    assert mx.array_equal(logits[0], logits[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_conversions_over_recurrent_layers_are_read(name: str, tmp_path: Path) -> None:
    """Conversions have mlx-vlm's names, plain and packed; the oracle tests open published ones."""
    config = CONFIGS[name]
    weights = random_weights(config)
    converted = theirs(name, weights, conversion=True)
    kinds = [weights, converted, *packed(converted, "language_model.")]
    models = [opened(tmp_path / str(number), config, kind) for number, kind in enumerate(kinds)]
    logits = [solo_logits(model, TOKENS, MEDIA) for model in models]
    assert mx.array_equal(logits[0], logits[1])
    assert_near(logits[2], logits[3])


def omni(weights: Weights, *, conversion: bool) -> Weights:
    """Return Qwen3-Omni's tensors, beside parts that speak."""
    parts = {".mlp.up_proj.": ".mlp.linear_fc1.", ".mlp.down_proj.": ".mlp.linear_fc2."}
    if not conversion:
        parts |= {"deepstack_merger_list": "merger_list", ".norm.": ".ln_q."}
        parts |= {".linear_fc1.": ".mlp.0.", ".linear_fc2.": ".mlp.2."}
    ready: Weights = {"talker.model.norm.weight": mx.ones(4), "code2wav.upsample.bias": mx.ones(4)}
    for key, array in weights.items():
        front, _, rest = key.partition(".")
        if front == "visual":
            within = "merger" in rest
            for ours, other in parts.items():
                if within == (ours.startswith(".mlp")) or (conversion and within):
                    continue
                rest = rest.replace(ours, other)
            if rest == "patch_embed.proj.weight":
                array = array.reshape(-1, 2, PATCH, PATCH, 3)
                array = array if conversion else array.moveaxis(-1, 1)
            front = "vision_tower" if conversion else front
        elif front == "audio_tower":
            array = array.moveaxis(-1, 1) if array.ndim == 4 and not conversion else array
        elif conversion:
            front = f"language_model.{front}"
            rest = rest.replace(".experts.", ".switch_mlp.")
        ready[f"thinker.{front}.{rest}"] = array
    return ready


def test_a_thinker_is_read_from_a_model_that_speaks(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_omni_moe_thinker"]
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": config, "talker_config": {}}
    weights = random_weights(config)
    tokens, media = prompt(4, speech(1, 130), 3, picture(8, 4, 6), 9)
    published, converted = (omni(weights, conversion=each) for each in (False, True))
    kinds = [published, converted, *packed(converted, "thinker.language_model.")]
    models = [opened(tmp_path / str(number), whole, kind) for number, kind in enumerate(kinds)]
    logits = [solo_logits(model, tokens, media) for model in models]
    wanted = solo_logits(opened(tmp_path / "thinker", config, weights), tokens, media)
    assert mx.array_equal(logits[0], wanted)
    assert mx.array_equal(logits[1], wanted)
    assert_near(logits[2], logits[3])
    deaf = {key: array for key, array in weights.items() if not key.startswith("audio_tower.")}
    assert {*opened(tmp_path / "deaf", config, deaf).encoders} == {"image", "video"}
    assert context_length(whole) == 1024


GLM_VISION = {
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.norm": "post_conv_layernorm",
    "merger.norm": "post_layernorm",
    "merger.downsample": "downsample",
}
GLM_TEXT = {
    "shared_expert": "shared_experts",
    "e_score_correction_bias": "gate.e_score_correction_bias",
    "experts": "switch_mlp",
}


def glm_converted(name: str, weights: Weights) -> Weights:
    """Return GLM's tensors as mlx-vlm converts them: the dense decoder's gates in one, kernels
    last.
    """
    ready: Weights = {}
    for key, array in weights.items():
        front, _, rest = key.partition(".")
        if front == "visual":
            if rest == "patch_embed.proj.weight":
                array = array.reshape(-1, 2, PATCH, PATCH, 3)
            elif rest == "merger.downsample.weight":
                array = array.reshape(len(array), MERGE, MERGE, -1)
            ready[f"vision_tower.{renamed(rest, GLM_VISION)}"] = array
        elif name in ("glm4v_moe", "glm46v, experts"):
            ready[f"language_model.{renamed(key, GLM_TEXT)}"] = array
        elif not key.endswith("up_proj.weight"):
            if key.endswith("gate_proj.weight"):
                array = mx.concatenate([array, weights[key.replace("gate_", "up_")]])
                key = key.replace("gate_", "gate_up_")
            ready[f"language_model.{renamed(key, GLM_NORMS)}"] = array
    return ready


@pytest.mark.parametrize("name", ["glm4v", "glm46v, experts", "glm4v_moe", "glm_ocr"])
def test_conversions_of_glm_are_read_packed_too(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    whole = open_model(str(write_model(tmp_path / "own", config))).model
    converted = glm_converted(name, random_weights(config))
    kinds = [converted, *packed(converted, "language_model.")]
    models = [opened(tmp_path / str(number), config, kind) for number, kind in enumerate(kinds)]
    logits = [solo_logits(model, TOKENS, MEDIA) for model in models]
    assert mx.array_equal(logits[0], solo_logits(whole, TOKENS, MEDIA))
    assert_near(logits[1], logits[2])


PADDLE = {
    "patch_embed.proj": "embeddings.patch_embedding",
    "pos_embed": "embeddings.position_embedding",
    "merger.post_layernorm": "post_layernorm",
    "blocks": "encoder.layers",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn": "self_attn",
    "attn.proj": "self_attn.out_proj",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "merger.norm": "mlp_AR.pre_norm",
    "merger.linear_fc1": "mlp_AR.linear_1",
    "merger.linear_fc2": "mlp_AR.linear_2",
}


def paddle(weights: Weights, *, conversion: bool) -> Weights:
    """Return PaddleOCR-VL's tensors, with parts that are left out."""
    unread = "visual.vision_model.embeddings.packing_position_embedding.weight"
    ready: Weights = {} if conversion else {unread: mx.ones(4)}
    for key, array in weights.items():
        front, _, rest = key.partition(".")
        if front != "visual":
            ready[f"language_model.{key}" if conversion else key] = array
            continue
        rest = renamed(rest, PADDLE)
        if "patch_embedding.weight" in rest:
            array = array.reshape(-1, PATCH, PATCH, 3)
            array = array if conversion else array.moveaxis(-1, 1)
        if conversion:
            rest = rest.removeprefix("encoder.").replace("mlp_AR", "projector")
            ready[f"visual.{rest}"] = array
        elif "qkv" in rest:
            for part, third in zip("qkv", mx.split(array, 3), strict=True):
                ready[f"visual.vision_model.{rest.replace('qkv', f'{part}_proj')}"] = third
        else:
            rest = rest if rest.startswith("mlp_AR") else f"visual.vision_model.{rest}"
            ready[rest] = array
    return ready


def test_names_of_paddles_checkpoints_are_read(tmp_path: Path) -> None:
    nested = CONFIGS["paddleocr_vl"]
    flat = nested["text_config"] | nested | {"text_config": None}
    weights = random_weights(nested)
    published, converted = (paddle(weights, conversion=each) for each in (False, True))
    kinds = [weights, published, converted, *packed(converted, "language_model.")]
    models = [
        opened(tmp_path / str(number), flat if number == 1 else nested, kind)
        for number, kind in enumerate(kinds)
    ]
    logits = [solo_logits(model, TOKENS, MEDIA) for model in models]
    assert mx.array_equal(logits[0], logits[1])
    assert mx.array_equal(logits[0], logits[2])
    assert_near(logits[3], logits[4])


def ernie(weights: Weights, *, conversion: bool) -> Weights:
    """Return ERNIE 4.5 VL's tensors."""
    encoder = {"merger.norm": "ln", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
    for ours, kind in (("merger", "spatial_linear"), ("temporal", "temporal_linear")):
        for part, number in (("linear_fc1", 0), ("linear_fc2", 2), ("ln", 3)):
            at = f"{kind}.layers.{number}" if conversion else f"{kind}.{number}"
            encoder[f"{ours}.{part}"] = f"resampler_model.{at}"
    encoder |= {f"temporal.{part}": f"resampler_model.{part}" for part in ("mlp", "after_norm")}
    ready: Weights = {}
    for key, array in weights.items():
        front, _, rest = key.partition(".")
        if front == "visual":
            rest = renamed(rest, encoder)
            resampled = rest.startswith("resampler_model.")
            tower = "vision_tower." if conversion else "vision_model."
            middle = "" if conversion else "model."
            ready[middle + rest if resampled else tower + rest] = array
        elif ".text_moe." in key or ".vision_moe." in key:
            ready |= ernie_experts(key, array, weights, conversion=conversion)
        else:
            key = key.replace("shared_expert.", "shared_experts.")
            ready[f"language_model.{key}" if conversion else key] = array
    return ready


def ernie_experts(key: str, array: mx.array, weights: Weights, *, conversion: bool) -> Weights:
    """Return a tensor of a router, or of stacked experts."""
    base, kind, last = re.fullmatch(r"(.*)\.(text|vision)_moe\.(.*)", key).groups()
    number = int(kind == "vision")
    if conversion:
        suffix = "_1" * number
        head, _, rest = last.partition(".")
        head = "switch_mlp" if head == "experts" else head
        return {f"language_model.{base}.{head}{suffix}{'.' if rest else ''}{rest}": array}
    if last == "gate.weight":
        return {f"{base}.gate.weight{'_1' * number}": array.T}
    if last == "e_score_correction_bias":
        both = [weights[f"{base}.{each}_moe.{last}"] for each in ("text", "vision")]
        return {f"{base}.moe_statics.e_score_correction_bias": mx.stack(both)}
    part = last.removeprefix("experts.")
    return {f"{base}.experts.{8 * number + n}.{part}": each for n, each in enumerate(array)}


def test_names_of_ernies_checkpoints_are_read(tmp_path: Path) -> None:
    config = CONFIGS["ernie4_5_vl_moe"]
    weights = random_weights(config)
    published, converted = (ernie(weights, conversion=each) for each in (False, True))
    kinds = [weights, published, converted, *packed(converted, "language_model.")]
    models = [opened(tmp_path / str(number), config, kind) for number, kind in enumerate(kinds)]
    logits = [solo_logits(model, TOKENS, MEDIA) for model in models]
    assert mx.array_equal(logits[0], logits[1])
    assert mx.array_equal(logits[0], logits[2])
    assert_near(logits[3], logits[4])


def packed(weights: Weights, prefix: str) -> tuple[Weights, Weights]:
    """Return the tensors with the decoder's matrices in 4 bits, and with what those stand for.

    Converters leave encoders alone.
    """
    codes: Weights = {}
    plain: Weights = {}
    for key, array in weights.items():
        base = key.removesuffix(".weight")
        whole = array.ndim > 1 and array.shape[-1] % 32 == 0 and "conv1d" not in key
        if key.startswith(prefix) and base != key and whole:
            parts = mx.quantize(array, group_size=32, bits=4)
            codes |= dict(zip((key, f"{base}.scales", f"{base}.biases"), parts, strict=True))
            plain[key] = mx.dequantize(*parts, group_size=32, bits=4)
        else:
            codes[key] = plain[key] = array
    return codes, plain


def assert_near(ours: mx.array, wanted: mx.array) -> None:
    assert mx.max(mx.abs(ours - wanted)).item() < 1e-3 * mx.max(mx.abs(wanted)).item()


PACKED_DAILY = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in PACKED_DAILY else pytest.mark.slow)
        for name in CONFIGS
        if not name.startswith("glm")  # see above
    ],
)
def test_packed_decoders_beside_plain_encoders(name: str, tmp_path: Path) -> None:
    codes, plain = packed(random_weights(CONFIGS[name]), "model.")
    ours = solo_logits(opened(tmp_path / "packed", CONFIGS[name], codes), TOKENS, MEDIA)
    wanted = solo_logits(opened(tmp_path / "plain", CONFIGS[name], plain), TOKENS, MEDIA)
    assert_near(ours, wanted)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in OTHERS])
def test_without_its_tensors_a_model_takes_text_only(name: str, tmp_path: Path) -> None:
    weights = random_weights(CONFIGS[name])
    text = {key: array for key, array in weights.items() if not key.startswith("visual.")}
    whole, part = (
        opened(tmp_path / "whole", CONFIGS[name], weights),
        opened(tmp_path / "part", CONFIGS[name], text),
    )
    none = opened(tmp_path / "none", CONFIGS[name] | {"vision_config": None}, text)
    prompt = TOKENS[:9]
    assert "image" in whole.encoders
    for model in (part, none):
        assert not model.encoders
        assert model.positions(TOKENS, MEDIA) is None
        assert mx.array_equal(solo_logits(model, prompt), solo_logits(whole, prompt))


def test_a_tower_that_lacks_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    weights = random_weights(CONFIGS["qwen3_vl"])
    del weights["visual.deepstack_merger_list.1.norm.bias"]
    with pytest.raises(ModelError, match=r"deepstack_merger_list\.1\.norm\.bias"):
        opened(tmp_path / "model", CONFIGS["qwen3_vl"], weights)


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"hidden_act": "relu6"}, "relu6"), ({"num_heads": 5}, "5 heads"), ({"depth": "3"}, "depth")],
)
def test_settings_that_are_not_known_are_named(changes: dict[str, Any], word: str) -> None:
    config = CONFIGS["qwen3_vl"]
    vision = config["vision_config"] | changes
    with pytest.raises(ModelError, match=word):
        random_weights(config | {"vision_config": vision})


def test_heads_that_cannot_share_keys_are_named() -> None:
    config = CONFIGS["exaone4_5"]
    vision = config["vision_config"] | {"num_key_value_heads": 3}
    with pytest.raises(ModelError, match="4 heads of a vision encoder cannot share 3"):
        random_weights(config | {"vision_config": vision})


def test_shapes_that_the_encoders_do_not_take_are_named(tmp_path: Path) -> None:
    config = CONFIGS["qwen2_vl"]
    encoders = opened(tmp_path / "model", config, random_weights(config)).encoders
    assert encoders["image"].rows((4, 6)) == 6
    assert encoders["video"].rows((3, 4, 6, 1)) == 18
    assert encoders["video"].feature_bytes((3, 4, 6, 1)) == 3 * 24 * 2 * 48
    for kind, shape in (("image", (3, 4)), ("image", (0, 4)), ("video", (1, 4, 5, 0))):
        with pytest.raises(RequestError, match=r"squares of 2 by 2"):
            encoders[kind].rows(shape)


def test_an_item_depends_on_nothing_around_it(tmp_path: Path) -> None:
    """Moments of a video do not see each other, and a picture is a moment of two equal frames."""
    config = CONFIGS["qwen2_5_vl"]
    encoders = opened(tmp_path / "model", config, random_weights(config)).encoders
    still = picture(1, 6, 10)
    patches = np.frombuffer(still.features, np.uint8).reshape(60, 48)
    twice = np.tile(patches, (1, 2)).tobytes()
    whole = encoders["video"](mx.array(np.frombuffer(twice * 2, np.uint8)), (2, 6, 10, 0))[0]
    alone = encoded(encoders["image"], still)[0]
    for half in mx.split(whole, 2):
        assert mx.max(mx.abs(half - alone)).item() < 1e-4


def test_what_follows_a_long_video_goes_on_from_its_last_moment(tmp_path: Path) -> None:
    config = CONFIGS["qwen2_5_vl"]  # two positions a second
    model = opened(tmp_path / "model", config, random_weights(config))
    item = film(0, 5, 4, 4, 1_500_000)
    found = model.positions([0] * (3 + item.tokens + 2), [PlacedMedia(3, item)])
    assert found is not None
    assert found[0, 3::4][:5].tolist() == [3, 6, 9, 12, 15]
    assert found[1:, 3:7].tolist() == [[3, 3, 4, 4], [3, 4, 3, 4]]
    assert found[:, -2:].tolist() == [[16, 17]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.1), ("float16", 0.02)])
@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_is_near(name: str, dtype: str, error: float, tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "model", CONFIGS[name]))
    full, half = (open_model(folder, dtype=each).model for each in ("float32", dtype))
    items = {"image": picture(1, 6, 10), "video": film(2, 2, 4, 6, 0), "audio": speech(3, 230)}
    for kind, encoder in half.encoders.items():
        wanted = encoded(full.encoders[kind], items[kind])
        for ours, other in zip(encoded(encoder, items[kind]), wanted, strict=True):
            assert str(ours.dtype) == f"mlx.core.{dtype}"
            far = (mx.square(ours - other).mean() / mx.square(other).mean()).item() ** 0.5
            assert 0 < far < error, kind
