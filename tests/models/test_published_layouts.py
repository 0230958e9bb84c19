"""Checkpoints as publishers lay them out, where no library here writes them so."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from quire.models.base import named_parameters
from quire.models.weights.loader import open_model
from quire.models.weights.names import renamed
from tests.models.solo import solo_logits
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


def test_kimi_k3_as_it_is_published(tmp_path: Path) -> None:
    """Scores of sums have a norm and a product, delta nets three convolutions, experts numbers."""
    folder = write_model(tmp_path, HELD_AGAINST_MLX_LM["kimi_k3"])
    ours = named_parameters(open_model(str(folder)).model)
    parts = {
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.e_score_correction_bias": "block_sparse_moe.gate.e_score_correction_bias",
        "mlp.shared_expert": "block_sparse_moe.shared_experts",
        "mlp.fc1_latent_proj": "block_sparse_moe.routed_expert_down_proj",
        "mlp.fc2_latent_proj": "block_sparse_moe.routed_expert_up_proj",
        "mlp.latent_norm": "block_sparse_moe.routed_expert_norm",
        "model.hc_head": "model.output_attn_res",
    }
    matrices = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    published = {"vision_tower.blocks.0.weight": mx.ones(4), "mm_projector.proj.0": mx.ones(4)}
    for name, array in ours.items():
        given = f"language_model.{renamed(name, parts)}"
        if ".mlp.experts." in name:
            path, _, matrix = name.removesuffix(".weight").rpartition(".")
            given = f"language_model.{path.replace('.mlp.', '.block_sparse_moe.')}"
            for number, each in enumerate(array):
                published[f"{given}.{number}.{matrices[matrix]}.weight"] = each
        elif name.endswith(".conv1d.weight"):
            for part, each in zip("qkv", mx.split(array, 3), strict=True):
                published[given.replace("conv1d", f"{part}_conv1d")] = each.swapaxes(-1, -2)
        elif name.endswith(".A_log"):
            published[given] = mx.pad(array, (0, 4)).reshape(1, 1, -1, 1)
        elif name.endswith((".embed_q.weight", ".unembed_out.weight")):
            pass
        elif name.endswith(("_res.weight", "hc_head.weight")):
            path = given.removesuffix(".weight")
            published[f"{path}_norm.weight"] = mx.full(array.size, 0.5)
            published[f"{path}_proj.weight"] = 2.0 * array
        else:
            published[given] = array
        if name.endswith(".embed_q.weight"):
            values = ours[name.replace("embed_q", "unembed_out")]
            both = mx.concatenate([array.swapaxes(-1, -2), values], axis=1).flatten(0, 1)
            published[given.replace("embed_q", "kv_b_proj")] = both
    mx.save_safetensors(str(folder / "model.safetensors"), published)

    theirs = named_parameters(open_model(str(folder)).model)

    assert theirs.keys() == ours.keys()
    for name, array in ours.items():
        assert mx.array_equal(theirs[name], array).item(), name


@pytest.mark.parametrize("fp8", [False, True])
def test_mimo_v2_as_it_is_published(fp8: bool, tmp_path: Path) -> None:
    """Queries, keys and values are one matrix; in FP8, one for each rank, with blocks of its own.
    Blocks of 40 rows fit ranks of 88 and 128 rows only.
    """
    config = CONFIGS["mimo_v2_flash"] | {"model_type": "mimo_v2", "num_key_value_heads": 2}
    folder = write_model(tmp_path / "split", config)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.eval(weights)
    ranks, (high, wide) = 2 if fp8 else 1, (40, 32)
    published = {"visual.blocks.0.weight": mx.ones(4), "audio_encoder.weight": mx.ones(4)}
    for name in [name for name in weights if name.endswith("q_proj.weight")]:
        paths = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        whole = [weights[path].reshape(ranks, -1, 64) for path in paths]
        joined = mx.concatenate(whole, axis=1)  # [ranks, rows, 64]
        to = name.replace("q_proj", "qkv_proj")
        if fp8:
            count = -(-joined.shape[1] // high)
            scales = mx.random.uniform(0.5, 2.0, (ranks, count, 64 // wide))
            each = mx.repeat(mx.repeat(scales, high, axis=1), wide, axis=2)[:, : joined.shape[1]]
            codes = mx.to_fp8(joined / each)
            published[f"{to}_scale_inv"] = scales.flatten(0, 1)
            published[to] = codes.flatten(0, 1)
            joined = mx.from_fp8(codes, mx.float32) * each
        else:
            published[to] = joined.flatten(0, 1)
        ends = [whole[0].shape[1], whole[0].shape[1] + whole[1].shape[1]]
        for path, part in zip(paths, mx.split(joined, ends, axis=1), strict=True):
            weights[path] = part.flatten(0, 1)
    rest = {name: each for name, each in weights.items() if not name.endswith(_JOINED)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    said = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [high, wide]}}
    joined_folder = write_model(tmp_path / "joined", config | (said if fp8 else {}))
    mx.save_safetensors(str(joined_folder / "model.safetensors"), published | rest)

    ours, theirs = (open_model(str(each)).model for each in (folder, joined_folder))

    expected, found = (solo_logits(model, [5, 9, 40, 7] * 9) for model in (ours, theirs))
    assert mx.allclose(found, expected, atol=1e-4).item()


_JOINED = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
