"""The parity matrix of the described families; a few, of many traits, stand for all every day."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.models.loader import open_model
from tests.engine.test_parity import Opened
from tests.support.families import CONFIGS as HELD_AGAINST_TRANSFORMERS
from tests.support.families import HELD_AGAINST_MLX_LM
from tests.support.parity import SCENARIOS, alone, assert_same, prompts
from tests.support.tiny_models import write_model

CONFIGS = HELD_AGAINST_TRANSFORMERS | HELD_AGAINST_MLX_LM
DAILY = {
    "falcon_h1",  # two mixers in a layer, one of them with a state
    "gemma3_text",  # norms around blocks, windows, two rotations
    "cohere2",  # blocks in parallel, neighbouring pairs, layers without rotation
    "glm4_moe",  # experts after a dense layer, a shared one, part of a head rotated
}
LENGTHS, TOKENS = (1, 40, 65), 30


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    """A family's model and what each prompt gets alone, computed once."""
    known: dict[str, Opened] = {}

    def find(name: str) -> Opened:
        if name not in known:
            folder = write_model(Path(tmp_path_factory.mktemp(name)), CONFIGS[name])
            if name == "glm4":
                _with_published_names(folder / "model.safetensors")
            loaded = open_model(str(folder), dtype="float32")
            config = EngineConfig(str(folder), kv_memory=64 << 20, prefix_cache=False)
            known[name] = loaded, config, alone(loaded, config, prompts(LENGTHS, TOKENS))
        return known[name]

    return find


def _with_published_names(path: Path) -> None:
    """GLM-4 calls norms by names that have another meaning here, which the loader translates."""
    published = {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    mx.eval(weights)
    named = {
        ".".join(published.get(part, part) for part in name.split(".")): array
        for name, array in weights.items()
    }
    mx.save_safetensors(str(path), named)


def _families() -> list[Any]:
    return [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in CONFIGS]


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if "pre-empted" not in name])
@pytest.mark.parametrize("family", _families())
def test_as_if_alone(opened: Callable[[str], Opened], family: str, scenario: str) -> None:
    loaded, config, expected = opened(family)
    wanted = prompts(LENGTHS, TOKENS)
    got = SCENARIOS[scenario](loaded, config, wanted)
    assert_same(got, expected, [request.id for request in wanted])
