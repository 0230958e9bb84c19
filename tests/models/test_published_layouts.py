"""Checkpoints as publishers lay them out, where no library here writes them so."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from quire.models.base import named_parameters
from quire.models.weights.loader import open_model
from tests.support.families import HELD_AGAINST_MLX_LM
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
