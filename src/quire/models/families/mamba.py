"""Mamba (arXiv:2312.00752), Mamba 2 (arXiv:2405.21060), and shared parts of their hybrids."""

from __future__ import annotations

from typing import Any

from quire.core.values import require
from quire.models.base import LanguageModel
from quire.models.description import Layer, Norm
from quire.models.families.common import Family, channels_last, decoder
from quire.models.layers.mamba import Mamba
from quire.models.layers.mamba2 import Mamba2
from quire.models.settings import Settings
from quire.models.weights.names import Names


def mamba2(s: Settings) -> LanguageModel:
    """Build Mamba 2, whose layers are all state space layers."""
    s.only("hidden_act", "silu")
    heads, head_dim = s.integer("num_heads"), s.integer("head_dim")
    width = s.integer("expand", default=2) * s.integer("hidden_size")
    require("num_heads * head_dim", heads * head_dim, (width,))
    minimum, maximum = step_limits(s)
    norm = Norm(s.number("layer_norm_epsilon", default=1e-5, minimum=0.0))
    layer = Layer(
        (
            Mamba2(
                heads=heads,
                head_dim=head_dim,
                state_dim=s.integer("state_size", "ssm_state_size"),
                groups=s.integer("n_groups", default=8),
                kernel=s.integer("conv_kernel", default=4),
                eps=norm.eps,
                conv_bias=s.flag("use_conv_bias", default=True),
                bias=s.flag("use_bias", default=False),
                min_step=minimum,
                max_step=maximum,
            ),
        ),
        feed_forward=None,
    )
    return decoder(s, (layer,) * s.integer("num_hidden_layers"), _names(s), norm=norm)


def mamba(s: Settings) -> LanguageModel:
    return _first(s, inner=None)


def falcon_mamba(s: Settings) -> LanguageModel:
    """Build Falcon Mamba, which normalises steps and the vectors that write and read, without
    weights.
    """
    eps = s.number("mixer_rms_eps", default=1e-6, minimum=0.0)
    return _first(s, Norm(eps, weighted=False))


def _first(s: Settings, inner: Norm | None) -> LanguageModel:
    """Build a model of Mamba's first state space layers."""
    s.only("hidden_act", "silu")
    hidden = s.integer("hidden_size", default=768)
    wide = (
        s.integer("expand", default=2) * hidden
    )  # if a file has both keys, `intermediate_size` counts
    if s.value("time_step_rank", "auto") == "auto":
        s = s.changed(time_step_rank=-(-hidden // 16))
    norm = Norm(s.number("layer_norm_epsilon", default=1e-5, minimum=0.0))
    state_space = Mamba(
        channels=s.integer("intermediate_size", default=wide),
        state_dim=s.integer("state_size", default=16),
        step_rank=s.integer("time_step_rank"),
        kernel=s.integer("conv_kernel", default=4),
        norm=inner,
        conv_bias=s.flag("use_conv_bias", default=True),
        bias=s.flag("use_bias", default=False),
    )
    layers = (Layer((state_space,), feed_forward=None),) * s.integer(
        "num_hidden_layers", default=32
    )
    return decoder(s, layers, _names(s), norm=norm, tied=True)


def _names(s: Settings) -> Names:
    parts = {
        "model.backbone": "model",
        "embeddings": "embed_tokens",
        "embedding": "embed_tokens",
        "norm_f": "norm",
        "mixer": "mamba",
    }
    parts |= {
        f"layers.{index}.norm": f"layers.{index}.input_layernorm"
        for index in range(s.integer("num_hidden_layers"))
    }
    return Names(renamed=parts, prepare=channels_last)


def hybrid_mamba2(s: Settings, **changes: Any) -> Mamba2:
    """Return the state space layer of Granite 4 and Falcon-H1, whose keys start with `mamba_`."""
    s.only("hidden_act", "silu")
    heads = s.integer("mamba_n_heads", default=128)
    inner = s.integer("mamba_expand", default=2) * s.integer("hidden_size")
    if s.values.get("mamba_d_head") in (None, "auto"):
        s = s.changed(mamba_d_head=s.integer("mamba_d_ssm", default=inner) // heads)
    minimum, maximum = step_limits(s)
    usual: dict[str, Any] = {
        "heads": heads,
        "head_dim": s.integer("mamba_d_head"),
        "state_dim": s.integer("mamba_d_state", default=256),
        "groups": s.integer("mamba_n_groups", default=1),
        "kernel": s.integer("mamba_d_conv", default=4),
        "conv_bias": s.flag("mamba_conv_bias", default=True),
        "bias": s.flag("mamba_proj_bias", default=False),
        "min_step": minimum,
        "max_step": maximum,
    }
    return Mamba2(**usual | changes)


def step_limits(s: Settings) -> tuple[float, float]:
    """Return the least and the largest time step of a token."""
    given = s.values.get("time_step_limit")
    if isinstance(given, list):  # transformers 5 writes infinity as an object
        s = s.changed(time_step_limit=[_INFINITE if e == _INFINITY else e for e in given])
    minimum, maximum = s.numbers("time_step_limit", (0.0, _INFINITE))
    return minimum, maximum


_INFINITE = float("inf")
_INFINITY = {"__float__": "Infinity"}


def _context(s: Settings) -> int:
    """Return the context length. The state's size does not limit it."""
    return s.integer("max_position_embeddings", default=1 << 20)


FAMILIES = (
    Family("mamba", "Mamba", mamba, context=_context),
    Family("mamba2", "Mamba 2, Codestral Mamba", mamba2, context=_context),
    Family("falcon_mamba", "Falcon Mamba", falcon_mamba, context=_context),
)
