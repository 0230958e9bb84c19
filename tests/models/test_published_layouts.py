"""Checkpoints as publishers lay them out, where no library here writes them so."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from quire.models.base import named_parameters
from quire.models.weights.loader import open_model
from quire.models.weights.names import renamed
from tests.support.families import CONFIGS, HELD_AGAINST_MLX_LM
from tests.support.tiny_models import write_model


def test_step_as_it_is_published(tmp_path: Path) -> None:
    """Experts beside the block, norms less one, and layers that guess ahead."""
    folder = write_model(tmp_path, HELD_AGAINST_MLX_LM["step3p5"])
    ours = named_parameters(open_model(str(folder)).model)
    published = {
        "model.layers.4.enorm.weight": mx.ones(64),
        "model.layers.4.mtp_block.weight": mx.ones(64),
    }
    for name, array in ours.items():
        given = name.replace(".mlp.gate.", ".moe.gate.").replace(".mlp.experts.", ".moe.")
        given = given.replace(".mlp.e_score_correction_bias", ".moe.router_bias")
        given = given.replace(".mlp.shared_expert.", ".share_expert.")
        published[given] = array - 1.0 if name.endswith("norm.weight") else array
    mx.save_safetensors(str(folder / "model.safetensors"), published)

    theirs = named_parameters(open_model(str(folder)).model)

    assert theirs.keys() == ours.keys()
    assert all(mx.allclose(theirs[name], ours[name], atol=1e-6).item() for name in ours)


def test_hunyuan_4_as_it_is_published(tmp_path: Path) -> None:
    """Streams have one scale for what is read and one for what is written."""
    streams = CONFIGS["hy_v4"]["hc_mult"]
    folder = write_model(tmp_path, CONFIGS["hy_v4"])
    ours = named_parameters(open_model(str(folder)).model)
    parts = {
        "attn_hc": "hc_attn_layer.hc_pre",
        "ffn_hc": "hc_mlp_layer.hc_pre",
        "mixing.weight": "hc_fn",
        "base": "hc_base",
        "scale": "hc_scale",
        "self_attn.sinks": "self_attn.learnable_sink_param",
        "self_attn.g_proj": "self_attn.linear_gate",
        "shared_expert": "shared_experts",
        "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    }
    head = {f"hc_head.{each}": f"hc_head.hc_head_{each}" for each in ("base", "scale")}
    head["hc_head.mixing.weight"] = "hc_head.hc_head_fn"
    published = {"model.mtp_layers.0.enorm.weight": mx.ones(64)}
    for name, array in ours.items():
        given = array[::streams] if name.endswith("scale") else array
        published[renamed(name, parts | head)] = given
    mx.save_safetensors(str(folder / "model.safetensors"), published)

    theirs = named_parameters(open_model(str(folder)).model)

    assert theirs.keys() == ours.keys()
    for name, array in ours.items():
        scale = name.endswith("scale")
        expected = mx.repeat(array[::streams], streams) if scale else array
        assert mx.array_equal(theirs[name], expected).item(), name
