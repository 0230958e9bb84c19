"""Requests that Python code gives to the engine itself, with what no model or cache has."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.core.kv_format import KVFormat
from quire.core.request import FinishReason, Request, SamplingParams, Score, ThinkingBudget
from quire.demo import MODEL_DIR
from quire.engine.assembly import assemble
from quire.engine.factory import open_engine
from tests.support.parity import Company

VOCABULARY = 3072


@pytest.fixture(scope="module")
def company() -> Company:
    config = EngineConfig(str(MODEL_DIR), kv_memory=32 << 20)
    return Company(open_engine(config)._loaded, config)


def asked(name: str, **fields: Any) -> Request:
    plain = {"prompt": (2, 5, 6, 7), "sampling": SamplingParams(temperature=0), "max_tokens": 3}
    return Request(name, **(plain | fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": (2, VOCABULARY)}, "prompt: .* from 0 to 3071, not 3072"),
        ({"prompt": (2, 1 << 62)}, "prompt: .* from 0 to 3071, not 4611686018427387904"),
        ({"prompt": (-1, 2)}, "prompt: .* from 0 to 3071, not -1"),
        ({"prompt": ()}, "prompt: must have at least one token"),
        ({"thinking": ThinkingBudget(1, (), (VOCABULARY,))}, "thinking.end_ids: .* not 3072"),
        ({"thinking": ThinkingBudget(1, (), ())}, "thinking.end_ids: .* not none"),
        ({"task": Score((5, VOCABULARY))}, "labels: .* not 3072"),
        ({"task": Score(())}, "labels: .* not none"),
        ({"task": Score((5.5,))}, "labels: .* not 5.5"),  # type: ignore[arg-type]
        ({"prompt": (2, 5.0, 6)}, "prompt: .* not 5.0"),
        ({"stop_token_ids": frozenset({7.5})}, "stop_token_ids: .* not 7.5"),
        ({"thinking": ThinkingBudget(1, (), (7.5,))}, "thinking.end_ids: .* not 7.5"),  # type: ignore[arg-type]
        (
            {"sampling": SamplingParams(logit_bias=((5.5, 1.0),))},
            "Invalid value for 'logit_bias': must be for token ids",
        ),  # type: ignore[arg-type]
        (
            {"sampling": SamplingParams(repetition_penalty=1e-308)},
            "Invalid value for 'repetition_penalty': must be",
        ),
        (
            {"sampling": SamplingParams(repetition_penalty=1e39)},
            "Invalid value for 'repetition_penalty': must be",
        ),
        (
            {"sampling": SamplingParams(temperature=1e39)},
            "Invalid value for 'temperature': must be a number from 0 to 3.4e38",
        ),
        (
            {"sampling": SamplingParams(temperature=float("nan"))},
            "Invalid value for 'temperature': must be a number",
        ),
        ({"kv_format": KVFormat("page", 1, 1)}, "kv_format: page-1 is none of plain, "),
        ({"kv_format": KVFormat("uniform", 4, 4, 16)}, "kv_format: uniform-4-g16 is none of "),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    company: Company, fields: dict[str, Any], said: str
) -> None:
    alone = company.run([asked("alone")])["alone"].tokens
    answers = company.run([asked("beside"), asked("wrong", **fields)])
    (refused,) = answers["wrong"].ends
    assert refused.finish is FinishReason.ERROR
    assert refused.error is not None
    assert refused.error.status == 400
    assert re.match(said, refused.error.message)
    assert answers["beside"].tokens == alone


@pytest.mark.parametrize("size", [16, 48])
def test_a_format_that_blocks_cannot_have_is_refused(company: Company, size: int) -> None:
    """Packed words of the page format hold the codes of 32 tokens."""
    loaded = company.engine._loaded
    config = EngineConfig(str(MODEL_DIR), kv_memory=32 << 20, block_size=size)
    format = KVFormat("page", 4, 4)
    with pytest.raises(ModelError, match=f"page-4 is not possible in blocks of {size} tokens"):
        assemble(loaded, replace(config, kv_format=format))
    engine = assemble(loaded, config)
    engine.add(asked("coded", kv_format=format))
    (output,) = engine.step()
    assert output.error is not None
    assert "kv_format: page-4 is none of plain, " in output.error.message


def test_an_adapter_that_cannot_be_read_costs_no_stream(tmp_path: Path) -> None:
    """A failing disk raises errors of its own, such as that of a name too long for it."""
    engine = open_engine(EngineConfig(str(MODEL_DIR), kv_memory=32 << 20))
    engine.add(asked("stream"))
    problem = engine.adapters.change("late", str(tmp_path / ("x" * 5_000)))
    assert "File name too long" in problem
    assert len(problem) < 300
    ended = [each for _ in range(9) for each in engine.step() if each.finish is not None]
    assert [each.finish for each in ended] == [FinishReason.LENGTH]
