"""The check of recorded steps: faults of a node are named, rounding that adds up is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.executor import agreement
from quire.executor.agreement import number_of, worst_row
from quire.executor.graphs import input_numbers, opening
from quire.executor.graphs.runner import CUDAGraphs
from quire.executor.graphs.step_check import StepCheck, _compared, _nudged, by_rounding
from quire.models.base import LanguageModel
from quire.program.trace import StepPrograms, trace
from quire.program.tracing import Variant
from quire.program.values import Node
from tests.executor.graphs.recorded import opened, served
from tests.executor.graphs.test_recording import FAMILIES
from tests.support.emulated_card import EmulatedCompiler, emulate_card
from tests.support.emulated_metal import why_not
from tests.support.grown import grown_config
from tests.support.parity import prompts
from tests.support.seeing import CONFIGS as SEEING

emulated = pytest.mark.skipif(bool(why_not()), reason=why_not())

PLAIN = EngineConfig("", kv_memory=64 << 20, prefix_cache=False)
FAULTS = {
    "rotated the other way": (
        "x = a[i] * cosine[i] - b[i] * sine[i];",
        "x = a[i] * cosine[i] + b[i] * sine[i];",
    ),
    "a head lost": ("const int own = query ? head :", "const int own = query ? head & ~1 :"),
    "one wrong expert": (
        "own_expert = expert;",
        "own_expert = k == 1 ? (expert + 1) % EXPERT_COUNT : expert;",
    ),
}


def relative_error(found: mx.array, expected: mx.array) -> float:
    return number_of(worst_row(found, expected))


def test_a_fault_of_one_row_is_as_large_as_if_it_were_of_all() -> None:
    expected = mx.random.normal((64, 128), key=mx.random.key(0)).astype(mx.bfloat16)
    rounded = (expected.astype(mx.float32) * 1.003).astype(mx.bfloat16)
    assert 0 < relative_error(rounded, expected) < 0.01
    wrong = mx.array(rounded)
    wrong[7, :16] = 0
    assert relative_error(wrong, expected) > 0.2
    wrong[7, :16] = mx.nan
    assert relative_error(wrong, expected) == float("inf")


def test_what_remains_of_terms_that_cancel_is_measured_by_other_rows() -> None:
    expected = mx.concatenate([mx.ones((63, 8)), mx.full((1, 8), 1e-3)])
    assert relative_error(expected + 1e-3, expected) < 0.02


def test_rounding_explains_errors_of_its_size_and_no_nan() -> None:
    assert by_rounding(0.3, 0.2, tolerance=0.05)
    assert not by_rounding(0.3, 0.1, tolerance=0.05)
    assert not by_rounding(float("inf"), float("inf"), tolerance=0.05)


def routed(chosen: list[int], weights: list[float]) -> dict[int, mx.array]:
    """Return the results of a router for one row, beside its logits."""
    logits = mx.array([[1.0, 2.0, 2.0, 3.0]])
    return {0: logits, 1: mx.array([chosen]), 2: mx.array([weights])}


def test_experts_of_equal_score_replace_each_other_whatever_their_weights() -> None:
    """Gemma 4 multiplies weights by a factor of the expert."""
    node = Node("route", (0,), (1, 2), ("logits",))
    known = routed([3, 2], [0.7, 0.6])
    pairs = _compared(node, routed([1, 3], [0.1, 0.7]), known)
    assert max(relative_error(*each) for each in pairs) == 0
    for wrong in (routed([3, 2], [0.6, 0.7]), routed([3, 0], [0.7, 0.6])):
        pairs = _compared(node, wrong, known)
        assert max(relative_error(*each) for each in pairs) > 0.1


def checked(
    wholes: list[CUDAGraphs], family: str | dict[str, Any], config: EngineConfig = PLAIN
) -> list[bool]:
    """Return whether graphs of the steps of a request passed, by their number of rows."""
    wanted = [replace(each, max_tokens=3) for each in prompts([3])]
    served(opened(FAMILIES[family] if isinstance(family, str) else family), wanted, config)
    (whole,) = wholes
    return list(whole.verified.values())


@pytest.mark.slow
@emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_kernel_is_named(
    fault: str,
    wholes: list[CUDAGraphs],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right, wrong = FAULTS[fault]
    functions = EmulatedCompiler.functions

    def faulty(self: EmulatedCompiler, sources: Sequence[str]) -> list[int]:
        assert any(right in each for each in sources)
        return functions(self, [each.replace(right, wrong) for each in sources])

    emulate_card(monkeypatch)
    monkeypatch.setattr(agreement, "_TOLERANCE", 1e-6)  # of a small model one expert is little
    monkeypatch.setattr(EmulatedCompiler, "functions", faulty)
    with caplog.at_level(logging.WARNING, "quire.engine"):
        assert not any(checked(wholes, "qwen3_moe"))
    node = "what=route" if "expert" in fault else "what=attention"
    assert all("relative error" in each and node in each for each in caplog.messages)


@emulated
def test_other_positions_are_named(
    wholes: list[CUDAGraphs], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No node differs: each reads the same positions on both sides."""
    emulate_card(monkeypatch)
    monkeypatch.setattr(agreement, "_TOLERANCE", 1e-6)
    right = input_numbers._whole
    monkeypatch.setattr(input_numbers, "_whole", lambda rows: [each + 1 for each in right(rows)])
    with caplog.at_level(logging.WARNING, "quire.engine"):
        assert not any(checked(wholes, "llama"))
    assert caplog.messages
    assert all("other positions" in each for each in caplog.messages)


@pytest.mark.slow
@emulated
@pytest.mark.parametrize("format", [KVFormat(), KVFormat("page", 4, 4)], ids=str)
def test_results_that_only_rounding_makes_differ_agree(
    format: KVFormat, wholes: list[CUDAGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any difference from the model is too much here, as that of a deep model's rounding is. The
    ends of tails, where a prompt has no tokens, hold what was there before."""
    emulate_card(monkeypatch)
    monkeypatch.setattr(agreement, "_TOLERANCE", 1e-6)
    found = checked(wholes, "llama", replace(PLAIN, kv_format=format, kv_skip_layers=()))
    assert found
    assert all(found)


@emulated
def test_nodes_that_read_positions_of_three_axes_are_held_against_mlx(
    wholes: list[CUDAGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_card(monkeypatch)
    monkeypatch.setattr(agreement, "_TOLERANCE", 1e-6)
    text = grown_config(SEEING["qwen2_vl"]["text_config"])
    found = checked(wholes, SEEING["qwen2_vl"] | {"text_config": text})
    assert found
    assert all(found)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_last_bits_of_embeddings_are_moved_by_one(dtype: mx.Dtype) -> None:
    numbers = mx.random.normal((8, 64), key=mx.random.key(0)).astype(dtype)
    numbers[0, 0] = 0
    moved, ulp = _nudged(numbers), {2: mx.uint16, 4: mx.uint32}[dtype.size]
    bits = [each.view(ulp).astype(mx.int64) for each in (numbers, moved)]
    steps = (bits[1] - bits[0]).flatten().tolist()
    assert steps[0] == 0
    assert set(steps[1:]) == {1, -1}


@emulated
@pytest.mark.parametrize("moves", [True, False])
def test_what_last_bits_move_as_far_is_no_fault(
    moves: bool,
    wholes: list[CUDAGraphs],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The program, computed by MLX, is made to agree with the graph to the bit."""

    def replayed(check: StepCheck, *_: Any, nudged: bool = False) -> mx.array:
        return check._whole * (1.5 if nudged and moves else 1)

    emulate_card(monkeypatch)
    monkeypatch.setattr(agreement, "_TOLERANCE", 1e-6)
    monkeypatch.setattr(StepCheck, "_replayed", replayed)
    with caplog.at_level(logging.WARNING, "quire.engine"):
        found = checked(wholes, "llama")
    assert found
    assert all(found) if moves else not any(found)
    assert all("0 by last bits of embeddings" in each for each in caplog.messages)


@pytest.mark.slow
@emulated
def test_a_program_that_is_not_the_model_is_named(
    wholes: list[CUDAGraphs], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its kernels compute what the program says."""

    def wrongly(node: Node) -> Node:
        return replace(node, attributes={**node.attributes, "scale": 0.5})

    def other(model: LanguageModel, variant: Variant) -> StepPrograms:
        found = trace(model, variant)
        nodes = (wrongly(each) if each.kind == "attend" else each for each in found.body.nodes)
        return replace(found, body=replace(found.body, nodes=tuple(nodes)))

    emulate_card(monkeypatch)
    monkeypatch.setattr(opening, "trace", other)
    with caplog.at_level(logging.WARNING, "quire.engine"):
        assert not any(checked(wholes, "llama"))
    assert all("the traced program: relative error" in each for each in caplog.messages)
