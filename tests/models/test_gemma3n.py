"""Gemma 3n's hearing: rows and tokens of its own against transformers, names, shapes, company."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ModelError, RequestError
from quire.core.media import MediaItem, PlacedMedia
from quire.models.base import LanguageModel
from quire.models.registry import build
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import encoded, solo_logits
from tests.models.test_vision_language import assert_near, packed
from tests.support.agreement import differ
from tests.support.gemma3n import gemma3n_config
from tests.support.parity import SCENARIOS, TOLERANCE, alone, answered, assert_same, prompts
from tests.support.seeing import Prompt
from tests.support.tiny_models import random_weights

Weights = dict[str, mx.array]
ROWS, AUDIO, END, ANSWER = 20, 249, 248, 8


def sound(seed: int, frames: int) -> MediaItem:
    """Return a random spectrogram."""
    features = np.random.default_rng(seed).normal(-2, 2, (frames, 16)).astype(np.float32).tobytes()
    return MediaItem.of("audio", features, (frames, 16), ROWS, bidirectional=False)


def opened(folder: Path, weights: Weights) -> LoadedModel:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(gemma3n_config()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return open_model(str(folder), dtype="float32")


@pytest.mark.oracle
def test_rows_and_tokens_match(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the oracle needs torch")
    theirs = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    configs = pytest.importorskip("transformers.models.gemma3n.configuration_gemma3n")
    from tests.models.oracle import _draw

    audio = configs.Gemma3nAudioConfig(**gemma3n_config()["audio_config"])
    text = configs.Gemma3nTextConfig(**gemma3n_config()["text_config"])
    torch.manual_seed(0)
    tower = theirs.Gemma3nAudioEncoder(audio).eval()
    embedder = theirs.Gemma3nMultimodalEmbedder(audio, text).eval()
    published: Weights = {}
    for prefix, module in (("audio_tower", tower), ("embed_audio", embedder)):
        with torch.no_grad():
            for name, weight in module.named_parameters():
                weight.copy_(_draw(name, weight))
        state = module.state_dict().items()
        published |= {f"model.{prefix}.{name}": mx.array(w.numpy()) for name, w in state}
    plain = random_weights(gemma3n_config()["text_config"])
    published |= {k.replace("model.", "model.language_model.", 1): a for k, a in plain.items()}
    model: Any = opened(tmp_path / "model", published).model

    for number, frames in enumerate((16, 37, 64, 100)):
        item = sound(number, frames)
        heard = torch.from_numpy(np.frombuffer(item.features, np.float32).reshape(1, frames, 16))
        with torch.no_grad():
            out = tower(heard, torch.zeros(1, frames, dtype=torch.bool)).last_hidden_state
            rows = embedder(inputs_embeds=out)[0]
            padding = embedder(input_ids=torch.tensor([[255]]))[0]
        wanted = torch.cat([rows, padding.expand(ROWS - len(rows), -1)])
        (ours,) = encoded(model.encoders["audio"], item)
        assert differ(ours, wanted) < 2e-4
    with torch.no_grad():
        own = embedder(input_ids=torch.tensor([[END, 250]]))[0].numpy()
    found = np.array(model.model.embedded(mx.array([END, 3, 250])))
    assert np.abs(found[[0, 2]] - own).max() < 1e-4


def prompt(item: MediaItem) -> Prompt:
    return spelled(9, item, 21)


def spelled(*parts: int | MediaItem) -> Prompt:
    """Return tokens and sounds of so many tokens of text, a sound, and so on."""
    tokens: list[int] = []
    media: list[PlacedMedia] = []
    for part in parts:
        at = len(tokens)
        if isinstance(part, int):
            tokens += [(7 * i * i + 3 * i) % 190 for i in range(at, at + part)]
        else:
            media.append(PlacedMedia(at, part))
            tokens += [*[AUDIO] * ROWS, END]
    return tokens, media


CASES: dict[str, Prompt] = {
    "a sound": spelled(sound(1, 50), 5),
    "two of different lengths": spelled(3, sound(2, 64), sound(3, 100), 8),
    "between texts": spelled(20, sound(4, 37), 20),
    "after long text": spelled(150, sound(5, 100), 4),
    "in a second turn": spelled(9, sound(6, 64), 30, sound(7, 64), 7),
    "text alone": spelled(40),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    """Return transformers' model without the encoder that needs timm, and Quire's."""
    torch = pytest.importorskip("torch", reason="the oracle needs torch")
    theirs = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    transformers = pytest.importorskip("transformers")
    from tests.models.oracle import draw_anew

    config = transformers.AutoConfig.for_model(**deepcopy(gemma3n_config()))
    make = theirs.AutoModel.from_config

    def blind(part: Any, **options: Any) -> Any:
        seeing = part.model_type == "gemma3n_vision"
        return torch.nn.Identity() if seeing else make(part, **options)

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs.AutoModel, "from_config", blind)
        reference = theirs.Gemma3nForConditionalGeneration(config)
    draw_anew(reference)
    state = {name: mx.array(w.numpy()) for name, w in reference.state_dict().items()}
    heard = {name: array for name, array in state.items() if "vision" not in name}
    folder = Path(tmp_path_factory.mktemp("ears")) / "model"
    return reference.float().eval(), opened(folder, heard)


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_match(both: tuple[Any, LoadedModel], case: str) -> None:
    import torch

    from tests.models import oracle

    reference, loaded = both
    tokens, media = CASES[case]
    given: dict[str, Any] = {}
    if media:
        longest = max(each.item.shape[0] for each in media)
        features = torch.zeros(len(media), longest, 16)
        mask = torch.zeros(len(media), longest, dtype=torch.bool)
        for row, each in enumerate(media):
            values = np.frombuffer(each.item.features, np.float32).reshape(each.item.shape)
            features[row, : len(values)] = torch.from_numpy(values.copy())
            mask[row, : len(values)] = True
        given = {"input_features": features, "input_features_mask": mask}
    logits, greedy = oracle.reference_answer(reference, tokens, ANSWER, **given)
    assert differ(solo_logits(loaded.model, tokens, media), logits) < TOLERANCE
    # Seven tokens a step: sounds are cut.
    assert answered(loaded, tokens, media, ANSWER).tokens == greedy


def converted(weights: Weights) -> Weights:
    """Return the tensors by mlx-vlm's names; its convolutions have their channels last, too."""
    parts = {
        "layers.": "conformer.",
        "layer0.": "conv_0.",
        "layer1.": "conv_1.",
        "feed_forward1": "ffw_layer_start",
        "feed_forward2": "ffw_layer_end",
        ".linear.": ".",
        "self_attn.relative_k_proj": "attention.attn.relative_position_embedding.pos_proj",
        "self_attn.post": "attention.post",
        "self_attn.": "attention.attn.",
        "norm_pre_attn": "attention.pre_attn_norm",
        "norm_post_attn": "attention.post_norm",
        "norm_out": "norm",
    }
    ready: Weights = {}
    for name, array in weights.items():
        if name.startswith("audio_tower."):
            for ours, other in parts.items():
                name = name.replace(ours, other)
        ready[name if "audio" in name else f"language_model.{name}"] = array
    return ready


@pytest.mark.slow
def test_packed_decoders_beside_plain_encoders(tmp_path: Path) -> None:
    codes, plain = packed(converted(random_weights(gemma3n_config())), "language_model.")
    tokens, media = prompt(sound(1, 50))
    ours = solo_logits(opened(tmp_path / "packed", codes).model, tokens, media)
    assert_near(ours, solo_logits(opened(tmp_path / "plain", plain).model, tokens, media))


def test_names_of_conversions_are_read(tmp_path: Path) -> None:
    weights = random_weights(gemma3n_config())
    tokens, media = prompt(sound(1, 50))
    own = opened(tmp_path / "own", weights).model
    theirs = opened(tmp_path / "theirs", converted(weights)).model
    assert mx.array_equal(solo_logits(own, tokens, media), solo_logits(theirs, tokens, media))
    other = solo_logits(own, tokens, prompt(sound(2, 50))[1])
    assert not mx.allclose(solo_logits(own, tokens, media), other, atol=1e-3)


def test_without_its_tensors_a_model_takes_text_only(tmp_path: Path) -> None:
    weights = random_weights(gemma3n_config())
    text = {name: array for name, array in weights.items() if "audio" not in name}
    assert not opened(tmp_path / "text", text).model.encoders


def test_shapes_and_settings_that_are_not_taken_are_named() -> None:
    model: LanguageModel = build(gemma3n_config())
    encoder = model.encoders["audio"]
    assert (encoder.rows((320, 16)), encoder.feature_bytes((320, 16))) == (ROWS, 320 * 64)
    for shape in ((321, 16), (0, 16), (30, 8)):
        with pytest.raises(RequestError, match="at most 320 frames"):
            encoder.rows(shape)
    config = gemma3n_config()
    for changes, word in (
        ({"conf_attention_context_right": 1}, "attention_context_right"),
        ({"sscp_conv_stride_size": [[1, 2], [2, 2]]}, "sscp_conv_stride_size"),
        ({"vocab_offset": 1000}, "1000"),
    ):
        with pytest.raises(ModelError, match=word):
            build(config | {"audio_config": config["audio_config"] | changes})


def test_sounds_are_heard_as_if_alone(tmp_path: Path) -> None:
    loaded = opened(tmp_path / "model", random_weights(gemma3n_config()))
    config = EngineConfig("", kv_memory=64 << 20, prefix_cache=False, kv_skip_layers=())
    plain = prompts((20, 30, 40), 6)
    wanted = [
        replace(each, prompt=tuple(tokens) + each.prompt, media=tuple(media))
        for number, each in enumerate(plain)
        for tokens, media in [prompt(sound(number, 40 + 60 * number))]
    ]
    wanted[1] = plain[1]  # text beside
    got = SCENARIOS["in chunks of 33"](loaded, config, wanted)
    assert_same(got, alone(loaded, config, wanted), [request.id for request in wanted])
