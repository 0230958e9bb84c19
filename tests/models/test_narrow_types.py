"""A model in a narrow type computes everything in it: nothing turns activations into float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.device.device import current_device
from quire.executor.eager import EagerExecutor
from quire.executor.inputs import StepInputs
from quire.models.weights.loader import open_model
from tests.models.test_family_parity import with_published_names
from tests.support import registered, tiny_models
from tests.support.everyday import everyday
from tests.support.parity import Company, prompts


def written(name: str, folder: Path) -> Path:
    """Return a random model of the family."""
    if name in tiny_models.CONFIGS:
        return tiny_models.tiny_model(folder, name)
    tiny_models.write_model(folder, registered.CONFIGS[name])
    if name == "glm4":
        with_published_names(folder / "model.safetensors")
    return folder


@pytest.fixture
def kernels() -> Iterator[None]:
    """Use products as on the default set-up: the CPU kernels where they were compiled."""
    current_device().choose_products("auto")
    yield
    current_device().choose_products("mlx")


@pytest.mark.parametrize(
    "name",
    everyday([*registered.CONFIGS, *tiny_models.CONFIGS], lambda name: "-" not in name),
)
def test_queries_keys_values_and_rows_stay_narrow(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert computed_types(name, tmp_path, monkeypatch) == {mx.bfloat16}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["qwen2", "kimi_linear", "olmo_hybrid", "jamba"])
def test_they_stay_narrow_beside_kernels_for_float32(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert computed_types(name, tmp_path, monkeypatch) == {mx.bfloat16}


def computed_types(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[mx.Dtype]:
    """Return the types of what is attended to and of a step's last rows, with weights in
    bfloat16.
    """
    types: set[mx.Dtype] = set()
    attend, finish = StepInputs.attend, EagerExecutor._finish

    def attends(self: StepInputs, layer: int, *given: Any, **named: Any) -> mx.array:
        types.update(each.dtype for each in given if isinstance(each, mx.array))
        return attend(self, layer, *given, **named)

    def finishes(self: EagerExecutor, inputs: Any, computed: Any, *rest: Any, **named: Any) -> Any:
        types.add(computed.hidden.dtype)
        return finish(self, inputs, computed, *rest, **named)

    monkeypatch.setattr(StepInputs, "attend", attends)
    monkeypatch.setattr(EagerExecutor, "_finish", finishes)
    loaded = open_model(str(written(name, folder)), dtype="bfloat16")
    Company(loaded, EngineConfig(str(folder), kv_memory=64 << 20)).run(prompts([5], 2))
    return types
