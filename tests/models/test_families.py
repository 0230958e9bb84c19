"""The described families against Hugging Face transformers: same folder, logits and tokens."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import solo_logits
from tests.support.families import CONFIGS
from tests.support.parity import TOLERANCE, Company, Generated, prompts

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import AutoConfig  # noqa: E402

from tests.models import oracle  # noqa: E402

PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(45)]
ANSWER = 8

SEEDS = {
    "phi-qk-norm": 1,  # the first one's continuation is of few tokens
    "starcoder2": 1,  # likewise
    "glm_moe_dsa": 1,  # likewise
    "glm_moe_dsa-shared": 3,  # the first one has scores of keys that differ by rounding alone
}


def _config(name: str) -> Any:
    return AutoConfig.for_model(**deepcopy(CONFIGS[name]))  # which it changes


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", ["bfloat16", _slow("float16"), _slow("float32")])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_tokens_match(name: str, dtype: str, tmp_path: Path) -> None:
    """Checkpoints are in `dtype`; both libraries compute in float32."""
    reference = oracle.save_random(
        _config(name), tmp_path, seed=SEEDS.get(name, 0), dtype=getattr(torch, dtype)
    )
    loaded = open_model(str(tmp_path))
    (request,) = prompts([1], tokens=ANSWER)
    chunked = _in_chunks(loaded, replace(request, prompt=tuple(PROMPT)))
    theirs = oracle.reference_logits(reference, PROMPT + chunked.tokens)
    whole = solo_logits(loaded.model, PROMPT + chunked.tokens)

    bound = TOLERANCE * mx.max(mx.abs(theirs)).item()
    assert mx.max(mx.abs(whole - theirs)).item() < bound
    assert len(set(chunked.tokens)) > 2, "a degenerate continuation proves nothing"
    for logits in (whole, theirs):  # each token is the best after those before it
        assert mx.argmax(logits, axis=-1).tolist()[len(PROMPT) - 1 : -1] == chunked.tokens
    for position, logits in chunked.logits.items():
        assert mx.max(mx.abs(logits - theirs[position - 1])).item() < bound


def _in_chunks(loaded: LoadedModel, request: Request) -> Generated:
    """Return what the engine answers when it reads the prompt by nine tokens a step."""
    config = EngineConfig("", kv_memory=16 << 20, prefix_cache=False, max_step_tokens=9)
    return Company(loaded, config).run([request])[request.id]


def test_gpt_oss_is_read_as_published(tmp_path: Path) -> None:
    """The checkpoint has experts in MXFP4, as blocks and scales, gate and up in turns."""
    config = CONFIGS["gpt_oss"]
    oracle.save_random(_config("gpt_oss"), tmp_path / "plain")
    weights = mx.load(str(tmp_path / "plain" / "model.safetensors"))
    assert isinstance(weights, dict)
    published, rounded = dict(weights), dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        rows = weights[name].swapaxes(-1, -2)  # [experts, out, in]
        codes, scales = mx.quantize(rows, group_size=32, bits=4, mode="mxfp4")
        blocks = codes.view(mx.uint8).reshape(*scales.shape, 16)
        del published[name]
        published |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain = mx.dequantize(codes, scales, group_size=32, bits=4, mode="mxfp4")
        rounded[name] = plain.astype(mx.float32).swapaxes(-1, -2)
    method = {"quantization_config": {"quant_method": "mxfp4"}}
    folders = [tmp_path / "published", tmp_path / "rounded"]
    for folder, more, tensors in zip(folders, (method, {}), (published, rounded), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | more))
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)

    ours, theirs = (solo_logits(open_model(str(folder)).model, PROMPT) for folder in folders)

    assert mx.max(mx.abs(ours - theirs)).item() < 1e-4


def test_longrope_of_a_short_context_is_what_transformers_has_for_one(tmp_path: Path) -> None:
    config = CONFIGS["phi3-longrope"]
    trained = config["original_max_position_embeddings"]
    reference = oracle.save_random(_config("phi3-longrope"), tmp_path)
    prompt = PROMPT[:trained]
    theirs = oracle.reference_logits(reference, prompt)

    short = open_model(str(tmp_path), max_context=trained)
    longer = open_model(str(tmp_path), max_context=trained + 1)

    assert mx.max(mx.abs(solo_logits(short.model, prompt) - theirs)).item() < 1e-4
    assert mx.max(mx.abs(solo_logits(longer.model, prompt) - theirs)).item() > 1e-2
    assert short.fingerprint != longer.fingerprint  # their keys are not each other's
