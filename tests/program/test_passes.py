"""Passes keep what a program computes, to the bit, and leave few launches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from quire.device.device import open_device
from quire.program.passes import prepared
from quire.program.primitives import VIEWS
from quire.program.trace import trace
from quire.program.values import FUSED, Program
from tests.program.programs import CONFIGS, opened, worst_difference

EVERYDAY = "llama gemma4_moe gemma4_ple gpt_oss qwen3_5_moe falcon_h1 deepseek_v3 gemma3n_text"


def kinds(program: Program) -> Counter[str]:
    """Return how many launches of each kind a step is."""
    return Counter(
        node.attributes["what"] if node.kind == FUSED else node.kind
        for node in program.nodes
        if node.kind not in VIEWS
    )


@pytest.mark.parametrize("name", EVERYDAY.split())
def test_passes_change_no_logit(name: str, tmp_path: Path) -> None:
    open_device("auto")
    assert worst_difference(opened(name, tmp_path), prepared) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - set(EVERYDAY.split())))
def test_passes_change_no_logit_of_any_family(name: str, tmp_path: Path) -> None:
    open_device("auto")
    assert worst_difference(opened(name, tmp_path), prepared) == 0


def test_launches_of_a_dense_step(tmp_path: Path) -> None:
    program = prepared(trace(opened("llama", tmp_path).model).body)
    assert kinds(program) == {
        "embed": 1,
        "rows": 9,  # positions, angles, the first norm, and two of each layer
        "products": 3,
        "attention": 3,
        "linear": 6,
        "gated products": 3,
    }


def test_a_gate_of_a_part_joins_its_product(tmp_path: Path) -> None:
    """Each layer gates its part of the rows' embeddings for all layers."""
    model = opened("gemma4_ple", tmp_path).model
    found = kinds(prepared(trace(model).body))
    assert found["gated product"] == found["gated products"] == len(model.layout)


def test_launches_of_a_step_with_experts(tmp_path: Path) -> None:
    model = opened("gemma4_moe", tmp_path).model
    layers = len(model.layout)
    found = kinds(prepared(trace(model).body))
    assert found["rows"] == 2 * layers + 4  # positions, angles of two kinds, the first norm
    assert found["products"] == found["attention"] == found["gated products"] == layers
    assert found["linear"] == 3 * layers  # attention's output, the MLP's, the router's logits
    assert found["route"] == found["experts"] == layers
    assert sum(found.values()) == 10 * layers + 5
