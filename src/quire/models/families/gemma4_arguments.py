"""Reads the text part of Gemma 4's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from quire.cache.specs import FullKV, LayerSpec, SharedKV, WindowKV
from quire.core.errors import ModelError
from quire.core.values import require
from quire.device.ranks import WHOLE
from quire.models.arguments import read_arguments
from quire.models.layers.common import ACTIVATIONS
from quire.models.layers.rope import RopeParameters
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.shares import Run, Split

_DEFAULT_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True)
class Gemma4Arguments:
    """The keys of the text part of `config.json` that affect the computation.

    Attributes:
        head_dim, num_key_value_heads: head size and KV heads of sliding layers.
        global_head_dim, num_global_key_value_heads: head size and KV heads of full layers.
        attention_k_eq_v: whether full layers use the key projection for values too.
        num_kv_shared_layers: number of last layers that read an earlier layer's keys and values.
        use_double_wide_mlp: whether the MLPs of these layers are twice as wide.
        hidden_size_per_layer_input: size of each layer's own token embedding; 0 means none.
        layer_types: `sliding_attention` or `full_attention`, one per layer.
        pad_token_id: the token whose embeddings, including the layers' own, rows of media get.
        rope: rotary parameters by layer type.
        split: the rank whose heads these are, and whose part of each width.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    global_head_dim: int
    num_global_key_value_heads: int
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_k_eq_v: bool = False
    sliding_window: int = 512
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = True
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 262_144
    enable_moe_block: bool = False
    num_experts: int = 0
    top_k_experts: int = 0
    moe_intermediate_size: int = 0
    use_bidirectional_attention: str | None = None
    pad_token_id: int = 0
    rope: dict[str, RopeParameters] = field(default_factory=dict)
    split: Split = field(default_factory=lambda: Split(WHOLE))

    def __post_init__(self) -> None:
        require("hidden_activation", self.hidden_activation, ACTIVATIONS)
        # "vision": rows of one image see each other, by the engine's visible ranges.
        require("use_bidirectional_attention", self.use_bidirectional_attention, (None, "vision"))
        if self.enable_moe_block:
            for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
                if not getattr(self, name):
                    raise ModelError(f"config.json: enable_moe_block needs {name!r}")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read a text configuration, or the text part of a multimodal one."""
        s = Settings(config).within("text_config")
        text, count = s.values, s.integer("num_hidden_layers")
        types = s.layer_types([SLIDING if (i + 1) % 6 else FULL for i in range(count)])
        types = (*types[:-1], FULL)  # the last layer is always full
        rope = s.nested("rope_parameters", needed=False).filled(**_DEFAULT_ROPE)
        head_dim, kv_heads = _full_layer_shape(s, types)
        return read_arguments(
            cls,
            text,
            layer_types=types,
            split=Split(WHOLE),
            rope={
                kind: RopeParameters.from_dict(rope.nested(kind, needed=False).values)
                for kind in (FULL, SLIDING)
            },
            global_head_dim=head_dim,
            num_global_key_value_heads=kv_heads,
            # A null means no such embedding; only an absent key means the default size.
            hidden_size_per_layer_input=text.get("hidden_size_per_layer_input", 256) or 0,
        )

    @property
    def first_shared(self) -> int:
        """Index of the first layer that reads another's keys and values; the number of layers if
        none does.
        """
        return self.num_hidden_layers - self.num_kv_shared_layers

    def mlp_width(self, index: int) -> tuple[int, Run]:
        """Return this rank's values between the products of a layer's block, and their run."""
        wide = self.use_double_wide_mlp and index >= self.first_shared
        return self.split.width(self.intermediate_size * (2 if wide else 1))

    @property
    def expert_width(self) -> tuple[int, Run]:
        """Return this rank's values between the products of one expert, and their run."""
        return self.split.width(self.moe_intermediate_size)

    def share(self, split: Split) -> Self:
        """Return a rank's share, see `LanguageModel.share`."""
        keys = "heads of keys and values"
        return replace(
            self,
            num_attention_heads=split.heads(self.num_attention_heads),
            num_key_value_heads=split.few(self.num_key_value_heads, keys),
            num_global_key_value_heads=split.few(self.num_global_key_value_heads, keys),
            split=split,
        )

    def layer_spec(self, index: int) -> LayerSpec:
        """Return the state that layer `index` keeps."""
        kind = self.layer_types[index]
        if index >= self.first_shared:
            own = self.layer_types[: self.first_shared]
            if kind not in own:
                raise ModelError(f"config.json: no layer of type {kind!r} comes before the shared")
            return SharedKV(self.first_shared - 1 - own[::-1].index(kind))
        if kind == SLIDING:
            return WindowKV(
                self.num_key_value_heads,
                self.head_dim,
                self.sliding_window,
                bidirectional_media=self.use_bidirectional_attention == "vision",
            )
        return FullKV(self.num_global_key_value_heads, self.global_head_dim)


def _full_layer_shape(s: Settings, types: tuple[str, ...]) -> tuple[int | None, int | None]:
    """Return head size and KV heads of full layers; None if the file does not give them.

    There are two spellings. The older has `global_head_dim` and `num_global_key_value_heads`, which
    counts only if K and V share a projection. Transformers 5 lists differences by layer in
    `per_layer_config`, whose keys have leading zeros.
    """
    text = s.values
    if not s.has("per_layer_config"):
        heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
        return text.get("global_head_dim") or 512, heads or text.get("num_key_value_heads")
    listed = s.nested("per_layer_config", needed=False)
    changes = [listed.nested(layer, needed=False).values for layer in listed.values]
    full = [index for index, kind in enumerate(types) if kind == FULL]
    named = sorted(int(layer) if layer.isdecimal() else -1 for layer in listed.values)
    known = {"head_dim", "num_key_value_heads"}
    if named != full or any(c != changes[0] or c.keys() - known for c in changes):
        raise ModelError(
            "config.json: per_layer_config is supported where it gives all full layers, and no "
            "others, the same head_dim and num_key_value_heads"
        )
    return (
        changes[0].get("head_dim", text.get("head_dim")),
        changes[0].get("num_key_value_heads", text.get("num_key_value_heads")),
    )
