"""Sampling defaults of the model and of the operator for parameters that a request omits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.core.config import ServerConfig
from quire.core.errors import RequestError
from quire.core.request import SamplingParams
from quire.demo import MODEL_DIR
from quire.serving.sampling_defaults import RECOMMENDABLE, overridden, recommended, reported
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Served, start

RECOMMENDED = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
}
ASK = [{"role": "user", "content": "Hi."}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK},
    "completions": {"prompt": "x"},
    "responses": {"input": "x"},
    "messages": {"model": "quire-demo", "messages": ASK, "max_tokens": 5},
}

ServeFolder = Callable[..., Served]


@pytest.fixture
def serve(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[ServeFolder]:
    """Yield `serve(generation_config, **settings)`: the demonstration with another such file."""
    with ExitStack() as stack:

        def serve(generation: dict[str, Any], **settings: Any) -> Served:
            for file in MODEL_DIR.iterdir():
                if file.name != "generation_config.json" and file.is_file():
                    (tmp_path / file.name).symlink_to(file)
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
            return start(stack, tokenizer, ServerConfig(**settings), tmp_path)

        yield serve


def drawn(served: Served, path: str, **more: Any) -> SamplingParams:
    answer = HTTP.post(f"{served.url}/v1/{path}", json={**BODIES[path], **more})
    assert answer.status_code == 200, answer.text
    if path == "responses":
        sampling = served.engine.requests[-1].sampling
        assert answer.json()["temperature"] == sampling.temperature
        assert answer.json()["top_p"] == sampling.top_p
    return served.engine.requests[-1].sampling


def values(sampling: SamplingParams) -> tuple[float, ...]:
    return tuple(
        getattr(sampling, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    )


def test_what_a_request_leaves_out_is_the_models(serve: ServeFolder) -> None:
    served = serve(RECOMMENDED)
    for path in BODIES:
        assert values(drawn(served, path)) == (0.6, 20, 0.95, 0.01, 1.05), path
        named = {"temperature": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
        assert values(drawn(served, path, **named)) == (1.0, 0, 0.95, 0.0, 1.0), path
    told = HTTP.get(f"{served.url}/v1/models").json()["data"][0]["sampling_defaults"]
    assert told == {name: value for name, value in RECOMMENDED.items() if name != "do_sample"}


def test_openais_defaults_hold_if_the_operator_says_so(serve: ServeFolder) -> None:
    served = serve(RECOMMENDED, sampling_defaults="openai", sampling_overrides={"top_k": 40})
    assert values(drawn(served, "chat/completions")) == (1.0, 40, 1.0, 0.0, 1.0)


def test_the_operators_own_go_before_the_models(serve: ServeFolder) -> None:
    overrides = {"temperature": 0.2, "top_p": 0.5}
    served = serve({"do_sample": False, "top_k": 20}, sampling_overrides=overrides)
    assert values(drawn(served, "chat/completions")) == (0.2, 20, 0.5, 0.0, 1.0)


def test_clients_are_told_the_operators_other_defaults() -> None:
    assert reported(SamplingParams()).keys() == set(RECOMMENDABLE)
    assert reported(SamplingParams(typical_p=0.5))["typical_p"] == 0.5


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0.0)),
        ({"temperature": None, "top_k": -1}, SamplingParams()),
    ],
)
def test_what_the_file_says(
    tmp_path: Path, generation: dict[str, Any], expected: SamplingParams
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert recommended(tmp_path) == expected


def test_no_file_recommends_openais(tmp_path: Path) -> None:
    assert recommended(tmp_path) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("temperature", -3, "a number from 0 to 3.4e38"),
        ("temperature", "hot", "a number from 0 to 3.4e38"),
        ("top_p", -0.5, "a number from 0 to 1"),
        ("top_k", 1.5, "an integer from -1 to 2147483647"),
        ("top_k", -2, "an integer from -1 to 2147483647"),
        ("repetition_penalty", float("nan"), "a number from 0.01 to 10"),
        ("min_p", True, "a number from 0 to 1"),
    ],
)
def test_a_value_out_of_bounds_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any, limit: str
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.5, "top_p": 0.9, name: value}))
    usual = SamplingParams(temperature=0.5, top_p=0.9)
    assert recommended(tmp_path) == replace(usual, **{name: getattr(SamplingParams(), name)})
    (said,) = caplog.messages
    assert said.startswith(f"{file}: {name} = {value!r} is ignored, since it must be {limit};")


def test_greedy_decoding_has_no_use_for_a_temperature(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 3}')
    assert recommended(tmp_path) == SamplingParams(temperature=0.0)
    assert not caplog.messages


def test_a_model_is_served_whatever_its_file_recommends(serve: ServeFolder) -> None:
    served = serve({"min_p": 3, "top_k": 20})
    assert values(drawn(served, "chat/completions")) == (1.0, 20, 1.0, 0.0, 1.0)


def test_the_operators_value_out_of_bounds_is_an_error(serve: ServeFolder) -> None:
    with pytest.raises(RequestError, match="'top_p': must be a number from 0 to 1, not 3"):
        serve({}, sampling_overrides={"top_p": 3.0})


@pytest.mark.parametrize(("name", "value"), [("top_k", -5), ("top_p", -0.5), ("min_p", 2)])
def test_the_operators_value_is_refused_before_it_is_clamped(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"'{name}': must be .*, not {value}"):
        overridden(SamplingParams(), {name: value})
