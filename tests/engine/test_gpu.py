"""The parity matrix on a GPU: `MLX_ENABLE_TF32=0 pytest -m gpu`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quire.attention.backend import AttentionBackend, AttentionCase, Backends
from quire.attention.paged import PortableBackend
from quire.attention.reference import ReferenceBackend
from quire.attention.registry import open_backends
from quire.core.config import EngineConfig
from quire.core.kv_choice import parse_format
from quire.core.request import Request
from quire.executor import eager
from quire.models.vision.gemma4 import (
    Gemma4VisionArguments,
    Gemma4VisionEncoder,
    Projector,
    VisionTower,
)
from quire.models.weights.loader import open_model
from tests.engine.test_image_parity import FAMILIES, requests
from tests.support.parity import SCENARIOS, TOLERANCE, alone, assert_same, prompts
from tests.support.tiny_models import CONFIGS, tiny_model, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(mx.default_device() == mx.cpu, reason="needs a GPU"),
]


def check_matrix(folder: Path, wanted: list[Request], tolerance: float = TOLERANCE) -> None:
    """Every scenario gives each request what it gets alone, in float32 without TF32."""
    assert mx.metal.is_available() or os.environ.get("MLX_ENABLE_TF32") == "0"
    loaded = open_model(str(folder), dtype="float32")
    config = EngineConfig(str(folder), kv_memory=64 << 20, prefix_cache=False)
    expected = alone(loaded, config, wanted)
    for scenario in SCENARIOS.values():
        got = scenario(loaded, config, wanted)
        assert_same(got, expected, [request.id for request in wanted], tolerance)


@pytest.mark.parametrize("family", CONFIGS)
def test_as_if_alone_on_this_gpu(tmp_path: Path, family: str) -> None:
    check_matrix(tiny_model(tmp_path, family), prompts(tokens=40))


@pytest.mark.parametrize("family", FAMILIES)
def test_images_as_if_alone_on_this_gpu(tmp_path: Path, family: str) -> None:
    """Rows of Gemma 4's encoder, whose scores are not scaled, move by 1e-5 with the number of items
    that are encoded at once, those of others by 5e-7; logits then move by up to 3e-4.
    """
    check_matrix(write_model(tmp_path, FAMILIES[family]), requests(family), 10 * TOLERANCE)


@pytest.mark.parametrize(
    ("family", "format"),
    [
        *(("llama", each) for each in ("uniform-4", "uniform-8", "turbo-4", "turbo-3.5")),
        ("gemma4", "uniform-4"),
    ],
)
def test_codes_are_read_in_company_as_by_the_reference(
    tmp_path: Path, family: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels answer a batch; the reference answers each request alone.

    A row's last bits depend on its company on a GPU, so a code may turn: tokens may part where
    logits are that near.
    """
    assert mx.metal.is_available() or os.environ.get("MLX_ENABLE_TF32") == "0"
    folder = tiny_model(tmp_path, family)
    loaded, wanted = open_model(str(folder), dtype="float32"), prompts(tokens=24)
    config = EngineConfig(
        str(folder),
        kv_memory=64 << 20,
        prefix_cache=False,
        kv_format=parse_format(format),
        kv_skip_layers=(),
    )
    with monkeypatch.context() as patched:
        patched.setattr(eager, "open_backends", lambda: Backends([ReferenceBackend()]))
        expected = alone(loaded, config, wanted)
    backends = _Noting(open_backends().all)
    monkeypatch.setattr(eager, "open_backends", lambda: backends)
    got = SCENARIOS["batch of unequal lengths"](loaded, config, wanted)
    assert backends.portable >= {1}, "no kernel read the codes"
    same = 0
    for request in wanted:
        ours, theirs = got[request.id], expected[request.id]
        for number, token in enumerate(theirs.tokens):
            position = len(request.prompt) + number
            logits, usual = (np.array(each.logits[position]) for each in (ours, theirs))
            assert np.abs(logits - usual).max() < 0.02 * np.abs(usual).max(), (request.id, number)
            if ours.tokens[number] != token:
                break
        same += ours.tokens == theirs.tokens
    assert same >= len(wanted) - 2


class _Noting(Backends):
    """Notes the numbers of rows of a sequence for which the portable kernels served codes."""

    def __init__(self, backends: Sequence[AttentionBackend]) -> None:
        super().__init__(backends)
        self.portable: set[int] = set()

    def backend_for(self, case: AttentionCase) -> AttentionBackend:
        chosen = super().backend_for(case)
        if isinstance(chosen, PortableBackend) and case.format.scheme != "plain":
            self.portable.add(case.rows)
        return chosen


@pytest.mark.parametrize("head_dim", [64, 72])
def test_a_large_image_is_encoded_as_on_a_cpu(head_dim: int) -> None:
    """2,520 patches, as many as an image has by default, with the heads of E2B and of 26B-A4B."""
    args = Gemma4VisionArguments(
        text_hidden_size=64,
        hidden_size=4 * head_dim,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=head_dim,
    )
    mx.random.seed(0)
    projector = Projector(args.hidden_size, args.text_hidden_size, args.rms_norm_eps)
    encoder = Gemma4VisionEncoder(VisionTower(args), projector)
    patches = mx.random.randint(0, 256, (42 * 60, args.patch_values)).astype(mx.uint8)
    (on_gpu,) = encoder(patches, (42, 60))
    mx.eval(on_gpu)
    with mx.stream(mx.cpu):
        (on_cpu,) = encoder(patches, (42, 60))
        mx.eval(on_cpu)
    assert on_gpu.shape == (280, 64)
    assert mx.abs(on_gpu - on_cpu).max().item() < 1e-3 * mx.abs(on_cpu).max().item()
