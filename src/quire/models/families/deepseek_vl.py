"""DeepSeek-VL (arXiv:2403.05525), which encodes a picture as one tile, with one or two encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx

from quire.core.media import CLIP_COLOURS
from quire.models.base import LanguageModel, MediaEncoder
from quire.models.decoder import DecoderModel
from quire.models.description import Norm
from quire.models.families.common import Family, activation
from quire.models.families.vision import (
    decoder_of,
    tiled_vision_model,
    vision_transformer,
    visual_names,
    without_vision,
)
from quire.models.layers.feed_forward import MLP
from quire.models.settings import Settings
from quire.models.vision.hybrid import HybridEncoder, HybridVision
from quire.models.vision.projectors import LayersProjector
from quire.models.vision.sam import Sam
from quire.models.vision.vit import VisionTransformer
from quire.models.weights import original_names
from quire.models.weights.names import Weights

_PARTS = {
    "vision_model.": "vision_tower.",
    "aligner.linear1.": "multi_modal_projector.linear_1.",
    "aligner.linear2.": "multi_modal_projector.linear_2.",
}


def deepseek_vl(s: Settings) -> LanguageModel:
    return _one_encoder(s, _as_llava)


def _as_llava(weights: Weights) -> Weights:
    """Rename tensors to the names of most tiled vision families."""
    ready: Weights = {}
    for name, array in weights.items():
        plain = name.removeprefix("model.")
        theirs = next((each for each in _PARTS if plain.startswith(each)), "")
        ready[_PARTS[theirs] + plain.removeprefix(theirs) if theirs else name] = array
    return ready


def _one_encoder(s: Settings, prepare: Callable[[Weights], Weights]) -> LanguageModel:
    decoder = decoder_of(s, "llama")
    if not s.has("vision_config"):
        return without_vision(decoder)
    kind = vision_transformer(s.within("vision_config"), (-1,), last_norm=True)
    return tiled_vision_model(decoder, kind, LayersProjector("gelu"), prepare=prepare)


def deepseek_vl_hybrid(s: Settings) -> LanguageModel:
    return _two_encoders(s, prepare=None)


def _two_encoders(s: Settings, prepare: Callable[[Weights], Weights] | None) -> LanguageModel:
    text = decoder_of(s, "llama")
    assert isinstance(text, DecoderModel)
    if not s.has("vision_config"):
        return text
    low = vision_transformer(s.within("vision_config"), (-1,), last_norm=True)
    high = sam(s.within("high_res_vision_config").changed(model_type="sam_vision_model"))
    return HybridModel(text, low, high, prepare=prepare)


def multi_modality(s: Settings) -> LanguageModel:
    """Build DeepSeek-VL or Janus as DeepSeek publishes them. Janus's image generation is
    left out.
    """
    if s.has("high_res_vision_config"):
        return _two_encoders(s, original_names.deepseek_vl_hybrid)
    return _one_encoder(s, original_names.deepseek_vl)


def sam(v: Settings) -> Sam:
    """Describe SAM's encoder."""
    hidden = v.integer("hidden_size", default=768)
    patch = v.integer("patch_size", default=16)
    for name in ("use_abs_pos", "use_rel_pos"):
        v.only(name, True)
    inner = int(hidden * v.number("mlp_ratio", default=4.0))
    whole = v.integers("global_attn_indexes") or (2, 5, 8, 11)
    return Sam(
        depth=v.integer("num_hidden_layers", default=12),
        hidden_size=hidden,
        heads=v.integer("num_attention_heads", default=12),
        mlp=MLP(v.integer("mlp_dim", default=inner), activation(v, "gelu"), gated=False, bias=True),
        norm=Norm(v.number("layer_norm_eps", default=1e-6, minimum=0.0), centred=True, bias=True),
        side=v.integer("image_size", default=1024) // patch,
        patch=patch,
        window=v.integer("window_size", default=14),
        whole=whole,
        channels=v.integer("output_channels", default=256),
        colours=CLIP_COLOURS,
        qkv_bias=v.flag("qkv_bias", default=True),
    )


_VISUAL = ("vision_model.", "high_res_vision_", "aligner.", "visual.")


class HybridModel(DecoderModel):
    """The decoder with both encoders; without their tensors, a model of text only."""

    def __init__(
        self,
        text: DecoderModel,
        low: VisionTransformer,
        high: Sam,
        prepare: Callable[[Weights], Weights] | None,
    ) -> None:
        super().__init__(text.description, text.names)
        self._prepare = prepare
        self.visual: HybridVision | None = HybridVision(low, high, text.description.hidden_size)
        self._low = low

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        return {} if self.visual is None else {"image": HybridEncoder(self.visual)}

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        text: Weights = {}
        low: Weights = {}
        ready: Weights = {}
        named = weights if self._prepare is None else self._prepare(weights)
        for name, array in named.items():
            plain = name.removeprefix("model.").removeprefix("visual.")
            if not plain.startswith(_VISUAL):
                text[name] = array
            elif plain.startswith("vision_model."):
                low["vision_tower." + plain.removeprefix("vision_model.")] = array
            else:
                ready["visual." + _high_name(plain)] = laid_out(plain, array)
        if not ready:
            self.visual = None
        for name, array in visual_names(self._low, low).items():
            ready[name.replace("vision_tower.", "visual.vision_model.", 1)] = array
        return super().sanitize(text) | ready


def _high_name(name: str) -> str:
    for theirs, ours in (
        (".vision_encoder.", "."),
        (".patch_embed.projection.", ".patch_embed."),
        (".mlp.lin1.", ".mlp.up_proj."),
        (".mlp.lin2.", ".mlp.down_proj."),
    ):
        name = name.replace(theirs, ours)
    return name


def laid_out(name: str, array: mx.array) -> mx.array:
    """Convert a convolution to channels last, and one over patches to a matrix."""
    if array.ndim != 4 or name.endswith("pos_embed"):
        return array
    array = array.moveaxis(1, -1) if array.shape[2] == array.shape[3] else array
    return array.flatten(1) if "patch_embed" in name else array


FAMILIES = (
    Family("deepseek_vl", "DeepSeek-VL 1.3B, text and images", deepseek_vl),
    Family("deepseek_vl_hybrid", "DeepSeek-VL 7B, text and images", deepseek_vl_hybrid),
    Family("multi_modality", "DeepSeek-VL, Janus, as DeepSeek has them", multi_modality),
)
