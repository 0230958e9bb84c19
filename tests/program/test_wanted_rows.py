"""Programs whose end computes wanted rows only compute what the model does."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.device.device import open_device
from quire.program.passes import prepared, simplified
from quire.program.trace import trace
from quire.program.values import Form, Program
from quire.program.wanted_rows import FIELD, with_wanted_rows
from tests.program.programs import CONFIGS, opened, worst_difference

EVERYDAY = "llama gemma4_moe gemma4_ple gpt_oss qwen3_5_moe falcon_h1 deepseek_v3"


def narrowed(program: Program) -> Program:
    return prepared(with_wanted_rows(simplified(program)))


@pytest.mark.parametrize("name", EVERYDAY.split())
def test_logits_of_wanted_rows_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    open_device("auto")
    loaded = opened(name, tmp_path)
    body = trace(loaded.model).body
    found = with_wanted_rows(simplified(body))
    assert found.fields.keys() - body.fields.keys() == {FIELD}
    assert found.values[found.outputs[0]].shape[0] == Form(0, (("R", 1),))
    assert worst_difference(loaded, narrowed) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - set(EVERYDAY.split())))
def test_logits_of_wanted_rows_of_any_family(name: str, tmp_path: Path) -> None:
    open_device("auto")
    assert worst_difference(opened(name, tmp_path), narrowed) < 1e-5


def test_layers_that_keep_nothing_attend_for_wanted_rows_only(tmp_path: Path) -> None:
    body = simplified(trace(opened("gemma4_ple", tmp_path).model).body)
    found = with_wanted_rows(body, attends=True)
    shapes = {
        "k" in each.roles: found.values[each.outputs[0]].shape[0].terms  # type: ignore[union-attr]
        for each in found.nodes
        if each.kind == "attend"
    }
    assert shapes == {True: (("T", 1),), False: (("R", 1),)}


def test_the_last_layer_behind_its_attention_has_wanted_rows(tmp_path: Path) -> None:
    body = trace(opened("llama", tmp_path).model).body
    found = with_wanted_rows(simplified(body))
    narrow = [
        each.kind
        for each in found.nodes
        if any(
            dict(n.terms).get("R")
            for n in found.values[each.outputs[0]].shape
            if isinstance(n, Form)
        )
    ]
    assert narrow.count("Gather") == 2, "the residual stream and attention's result"
    assert narrow.count("linear") == 4, "its output, and the MLP"
    assert narrow.count("rms_norm") == 2
