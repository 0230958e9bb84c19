"""In a narrow type everything is computed in it: nothing on the way makes activations float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.engine.inputs import StepInputs
from quire.engine.runner import Runner
from quire.models.loader import open_model
from tests.models.test_family_parity import with_published_names
from tests.support import registered, tiny_models
from tests.support.parity import Company, prompts


def written(name: str, folder: Path) -> Path:
    """A random model of the family."""
    if name in tiny_models.CONFIGS:
        return tiny_models.tiny_model(folder, name)
    tiny_models.write_model(folder, registered.CONFIGS[name])
    if name == "glm4":
        with_published_names(folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", [*registered.CONFIGS, *tiny_models.CONFIGS])
def test_queries_keys_values_and_rows_stay_narrow(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types: set[mx.Dtype] = set()
    attend, finish = StepInputs.attend, Runner._finish

    def attends(self: StepInputs, layer: int, *given: Any, **named: Any) -> mx.array:
        types.update(each.dtype for each in given if isinstance(each, mx.array))
        return attend(self, layer, *given, **named)

    def finishes(self: Runner, step: Any, ending: Any, computed: Any, *rest: Any) -> None:
        types.add(computed.rows.dtype)
        finish(self, step, ending, computed, *rest)

    monkeypatch.setattr(StepInputs, "attend", attends)
    monkeypatch.setattr(Runner, "_finish", finishes)
    loaded = open_model(str(written(name, tmp_path)), dtype="bfloat16")
    Company(loaded, EngineConfig(str(tmp_path), kv_memory=64 << 20)).run(prompts([5], 2))
    assert types == {mx.bfloat16}
