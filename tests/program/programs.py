"""A traced program in the place of its model, in the real engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.device.device import current_device
from quire.device.operations import Operations
from quire.executor.inputs import StepInputs
from quire.executor.repeated import RepeatedSteps
from quire.models.base import ForwardContext, LanguageModel
from quire.models.weights.loader import LoadedModel, open_model
from quire.program.replay import run_node
from quire.program.trace import StepPrograms, trace
from quire.program.tracing import Variant
from quire.program.values import Program
from quire.program.wanted_rows import FIELD, WANTED
from tests.models.test_family_parity import with_published_names
from tests.support.families import CONFIGS as DESCRIBED
from tests.support.families import HELD_AGAINST_MLX_LM
from tests.support.parity import Company, Generated, executor_of, prompts
from tests.support.tiny_models import CONFIGS as TINY
from tests.support.tiny_models import write_model

CONFIGS: dict[str, dict[str, Any]] = {
    **{name: make() for name, make in TINY.items()},
    **DESCRIBED,
    **HELD_AGAINST_MLX_LM,
}

Pass = Callable[[Program], Program]


def opened(name: str, folder: Path, dtype: str = "float32") -> LoadedModel:
    """Return a small model of a configuration, with random weights."""
    path = write_model(folder / name, CONFIGS[name])
    if name == "glm4":
        with_published_names(path / "model.safetensors")
    return open_model(str(path), dtype=dtype)


def replay(
    program: Program,
    operations: Operations,
    given: Mapping[str, mx.array],
    sizes: Mapping[str, int],
    step: ForwardContext | None = None,
) -> list[mx.array]:
    """Return the outputs of a program, computed node by node.

    Args:
        given: the program's fields, by name.
        sizes: values of the symbols.
        step: the forward context whose pools the program uses.
    """
    known = {id: each.array for id, each in program.constants.items()}
    known |= {id: given[name] for name, id in program.fields.items()}
    for node in program.nodes:
        run_node(program, node, known=known, operations=operations, sizes=sizes, step=step)
    return [known[id] for id in program.outputs]


class ProgramModel:
    """Computes steps by programs, which it traces when a kind of step first comes."""

    def __init__(self, model: LanguageModel, passes: Pass) -> None:
        self._model, self._passes = model, passes
        self._programs: dict[Variant, StepPrograms] = {}
        self.steps = self.narrowed = 0
        """Steps computed, and those of them whose end computed wanted rows only."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, step: ForwardContext) -> mx.array:
        assert step.media is None, "media is not tried here"
        axes = 0 if step.positions.ndim == 1 else step.positions.shape[0]
        sizes = {"T": len(step.tokens)}
        given = {"tokens": step.tokens, "positions": step.positions.T}
        self.steps += 1
        body = self._traced(Variant(axes)).body
        if FIELD in body.fields:
            assert isinstance(step, StepInputs)
            step.narrowed = bool(step.wanted_rows)
            given[FIELD] = step.wanted if step.narrowed else mx.arange(len(step.tokens))
            sizes[WANTED] = len(given[FIELD])
            self.narrowed += step.narrowed
        (hidden,) = replay(body, current_device().operations, given, sizes, step)
        return hidden

    def logits(self, hidden: mx.array) -> mx.array:
        head = self._traced(Variant()).head
        sizes, operations = {"R": len(hidden)}, current_device().operations
        (logits,) = replay(head, operations, {"hidden": hidden}, sizes)
        return logits

    def _traced(self, variant: Variant) -> StepPrograms:
        if variant not in self._programs:
            found = trace(self._model, variant)
            self._programs[variant] = StepPrograms(
                self._passes(found.body), self._passes(found.head)
            )
        return self._programs[variant]


def worst_difference(
    loaded: LoadedModel, passes: Pass = lambda p: p, format: KVFormat | None = None
) -> float:
    """Serve three requests by the model and by its programs, in steps that mix prompts and rows.

    Returns:
        The largest difference of a logit relative to the largest of its row; infinite if tokens
        differ.
    """
    config = EngineConfig("", kv_memory=16 << 20, prefix_cache=False, max_step_tokens=24)
    if format is not None:
        config = replace(config, kv_format=format, kv_skip_layers=())

    def answers(model: ProgramModel | None) -> Mapping[str, Generated]:
        company = Company(loaded, config)
        if model is not None:
            executor = executor_of(company.engine)
            executor.model = model  # type: ignore[assignment]  # stands in for it
            executor._repeated = RepeatedSteps(
                model, executor.pools, logits=model.logits, compiles=False
            )
        return company.run(prompts((1, 40, 9), 6), every=2)

    expected, stand_in = answers(None), ProgramModel(loaded.model, passes)
    found = answers(stand_in)
    assert stand_in.steps > 5
    worst = 0.0
    for name, own in expected.items():
        if own.tokens != found[name].tokens:
            return float("inf")
        for position, row in own.logits.items():
            a, b = (np.array(each) for each in (row, found[name].logits[position]))
            worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
    return worst
