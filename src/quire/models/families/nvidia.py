"""Nemotron 4, Minitron (arXiv:2402.16819, arXiv:2407.14679), Nemotron-H (arXiv:2504.03624) and
Llama Nemotron (arXiv:2505.00949).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.core.values import require
from quire.models.base import LanguageModel
from quire.models.description import Layer, Norm
from quire.models.families.common import (
    EXPERT_PARTS,
    Family,
    activation,
    attention,
    channels_last,
    decoder,
    mlp,
    sigmoid_mixture,
    uniform_layers,
)
from quire.models.families.mamba import step_limits
from quire.models.layers.attention import Attention
from quire.models.layers.feed_forward import MLP
from quire.models.layers.mamba2 import Mamba2
from quire.models.layers.moe import Mixture
from quire.models.settings import Settings
from quire.models.weights.names import Names


def nemotron(s: Settings) -> LanguageModel:
    usual = attention(s, rope=s.rope(partial=0.5))
    block = mlp(s, gated=False, activation=activation(s, "relu2"))
    norm = Norm(s.number("norm_eps", default=1e-5, minimum=0.0), centred=True, bias=True)
    return decoder(s, uniform_layers(s, usual, block), Names(less_one=("norm.weight",)), norm=norm)


_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def nemotron_h(s: Settings) -> LanguageModel:
    """Build Nemotron-H, each of whose layers is one block: state space, attention or
    feed-forward.
    """
    norm = Norm(s.number("layer_norm_epsilon", default=1e-5, minimum=0.0))
    s.has("n_routed_experts")  # files of dense models contain it with a default value
    layers: dict[str, Callable[[], Layer]] = {
        "linear_attention": lambda: Layer((_state_space(s, norm),), feed_forward=None),
        "full_attention": lambda: Layer((_unordered(s),), feed_forward=None),
        "mlp": lambda: Layer((), _mlp(s)),
        "moe": lambda: Layer((), _experts(s)),
    }
    kinds = _kinds(s)
    made = {kind: layers[kind]() for kind in dict.fromkeys(kinds)}
    parts = EXPERT_PARTS | {
        "model.backbone": "model",
        "embeddings": "embed_tokens",
        "norm_f": "norm",
        "switch_mlp.fc1": "experts.up_proj",
        "switch_mlp.fc2": "experts.down_proj",
    }
    for index, kind in enumerate(kinds):
        layer = made[kind]
        mixer = layer.mixers[0].attribute if layer.mixers else "mlp"
        before = "input_layernorm" if layer.mixers else "post_attention_layernorm"
        parts |= {f"layers.{index}.mixer": f"layers.{index}.{mixer}"}
        parts |= {f"layers.{index}.norm": f"layers.{index}.{before}"}
    names = Names(renamed=parts, unused=("mtp.",), prepare=channels_last)
    return decoder(s, tuple(made[kind] for kind in kinds), names, norm=norm)


def _kinds(s: Settings) -> list[str]:
    listed = s.names("layers_block_type") or s.names("layer_types")
    listed = listed or tuple(s.word("hybrid_override_pattern", default=""))
    kinds = [_OLD_KINDS.get(kind, _KINDS.get(kind, kind)) for kind in listed]
    require("hybrid_override_pattern", bool(kinds), (True,))
    for kind in kinds:
        require("layers_block_type", kind, _KINDS.values())
    return kinds


def _state_space(s: Settings, norm: Norm) -> Mamba2:
    s.only("mamba_hidden_act", "silu")
    bias = s.flag("use_bias", default=False)
    s.only("mamba_proj_bias", bias)
    minimum, maximum = step_limits(s)
    return Mamba2(
        heads=s.integer("mamba_num_heads", default=128),
        head_dim=s.integer("mamba_head_dim", default=64),
        state_dim=s.integer("ssm_state_size", default=128),
        groups=s.integer("n_groups", default=8),
        kernel=s.integer("conv_kernel", default=4),
        eps=norm.eps,
        conv_bias=s.flag("use_conv_bias", default=True),
        bias=bias,
        min_step=minimum,
        max_step=maximum,
    )


def _unordered(s: Settings) -> Attention:
    s.only("attention_bias", False)
    s.only("sliding_window")
    head_dim = s.integer("head_dim", "attention_head_dim", default=128)
    return replace(attention(s.changed(head_dim=head_dim)), rope=None)


def _mlp(s: Settings) -> MLP:
    act, bias = _activation(s), s.flag("mlp_bias", default=False)
    return MLP(s.integer("intermediate_size", default=21504), act, gated=False, bias=bias)


def _activation(s: Settings) -> str:
    return activation(s.changed(hidden_act=s.word("mlp_hidden_act", default="relu2")))


def _experts(s: Settings) -> Mixture:
    return sigmoid_mixture(
        s.filled(n_routed_experts=8, moe_intermediate_size=7688, num_experts_per_tok=2),
        activation=_activation(s),
        shared_width=s.integer("moe_shared_expert_intermediate_size", default=7688, minimum=0),
        gated=False,
        latent_dim=s.integer("moe_latent_size") if s.has("moe_latent_size") else 0,
        latent_bias=s.flag("mlp_bias", default=False),
    )


def nemotron_nas(s: Settings) -> LanguageModel:
    """Build Llama Nemotron Super and Ultra, whose blocks differ in size; layers may lack one."""
    s = s.filled(rms_norm_eps=1e-5)
    usual = attention(s.filled(num_key_value_heads=1), rope=s.rope(theta=5e5))
    layers = [_searched(s, block, usual) for block in s.objects("block_configs")]
    require("len(block_configs)", len(layers), (s.integer("num_hidden_layers"),), file=s.file)
    return decoder(s, tuple(layers))


def _searched(s: Settings, block: Settings, usual: Attention) -> Layer:
    """Return a layer of which a search chose the size."""
    mixing, feeding = block.nested("attention"), block.nested("ffn")
    for each in (mixing, feeding):
        each.only("replace_with_linear", False)
        each.only("sparsify", False)
    for name in ("window_length", "num_sink_tokens"):
        mixing.only(name)
    mixers: tuple[Attention, ...] = ()
    if not mixing.flag("no_op", default=False):
        group = mixing.integer("n_heads_in_group")
        require(f"{mixing.prefix}n_heads_in_group", usual.heads % group, (0,), file=s.file)
        mixers = (replace(usual, kv_heads=usual.heads // group),)
    if feeding.flag("no_op", default=False):
        return Layer(mixers, feed_forward=None)
    wanted = int(2 * feeding.number("ffn_mult") * s.integer("hidden_size") / 3)
    return Layer(mixers, mlp(s.changed(intermediate_size=-(-wanted // 256) * 256)))


FAMILIES = (
    Family("nemotron", "Nemotron 4, Minitron", nemotron),
    Family("nemotron-nas", "Llama Nemotron Super, Ultra", nemotron_nas),
    Family("nemotron_h", "Nemotron-H, Nemotron Nano 2 and 3", nemotron_h),
)
