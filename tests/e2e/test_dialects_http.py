"""Every case of every dialect: a model says it, the real engine and server carry it, and both
official SDKs show what it means, streamed and whole alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.e2e import spoken
from tests.e2e.dialect_cases import CASES, Case, cases_of, script_token, write_model
from tests.e2e.spoken import Spoken
from tests.support.child import running
from tests.support.serve_scripted import NAME
from tests.text.dialects.scripts import TOOLS

AT_ONCE = 16
SORTS = ("qwen3", "harmony")
"""A dialect of each sort, tried over HTTP every day; each takes a server of its own. What parsers
make of the other cases and dialects is tried every day where they are, without a server."""


def _daily() -> set[Case]:
    """Return the first case of each sort and shape of answer."""
    first: dict[tuple[object, ...], Case] = {}
    for case in CASES:
        if case.dialect in SORTS:
            several = min(len(case.calls), 2)
            cut = bool(case.max_tokens)
            shape = (bool(case.reasoning), bool(case.content), several, cut, case.spelled)
            first.setdefault((case.dialect, *shape, case.tools), case)
    return set(first.values())


DAILY = _daily()


@dataclass(frozen=True)
class Asked:
    """One case in the words of each protocol."""

    case: Case
    prompt: str

    @property
    def chat(self) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": self.prompt}]}
        if self.case.max_tokens:
            body["max_tokens"] = self.case.max_tokens
        if self.case.tools:
            body["tools"] = [
                {"type": "function", "function": {"name": t.name, "parameters": t.parameters}}
                for t in TOOLS
            ]
        return body

    @property
    def messages(self) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": self.prompt}]}
        body["max_tokens"] = self.case.max_tokens or 4000
        if self.case.tools:
            body["tools"] = [{"name": t.name, "input_schema": t.parameters} for t in TOOLS]
        return body

    @property
    def responses(self) -> dict[str, Any]:
        body: dict[str, Any] = {"input": self.prompt}
        if self.case.max_tokens:
            body["max_output_tokens"] = self.case.max_tokens
        if self.case.tools:
            body["tools"] = [
                {"type": "function", "name": t.name, "parameters": t.parameters, "strict": False}
                for t in TOOLS
            ]
        return body


@dataclass
class Played:
    """Answers of one server, by case and kind of request."""

    answers: dict[Case, dict[str, Spoken | BaseException]] = field(default_factory=dict)


async def _play(url: str, cases: Sequence[Case]) -> Played:
    """Asks for every case in every way, many at once."""
    gate = asyncio.Semaphore(AT_ONCE)
    played = Played()

    async def ask(case: Case, way: str, answer: Awaitable[Spoken]) -> None:
        async with gate:
            try:
                seen: Spoken | BaseException = await answer
            except Exception as error:  # shown by the test of this case, not by all of them
                seen = error
        played.answers.setdefault(case, {})[way] = seen

    openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    anthropic = AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
    async with openai, anthropic, asyncio.TaskGroup() as tasks:
        for number, case in enumerate(cases):
            asked = Asked(case, f"Play {script_token(number)}")
            for way, body in (
                ("chat", asked.chat),
                ("messages", asked.messages),
                ("responses", asked.responses),
            ):
                sdk: Any = anthropic if way == "messages" else openai
                for name in (way, f"{way}_streamed"):
                    answer = getattr(spoken, name)(sdk, model=NAME, **body)
                    tasks.create_task(ask(case, name, answer))
    return played


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Played]:
    """Return a dialect's answers of every day, or its others; a server runs once and only for
    them.
    """

    @cache
    def play(dialect: str, daily: bool) -> Played:
        folder = tmp_path_factory.mktemp(dialect)
        cases = [case for case in cases_of(dialect) if (case in DAILY) == daily]
        write_model(folder, dialect, cases)
        with running(folder, "tests.support.serve_scripted", str(folder), dialect) as child:
            return asyncio.run(_play(child.url, cases))

    return play


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.dialect}-{n}",
            marks=[] if case in DAILY else [pytest.mark.slow],
        )
        for n, case in enumerate(CASES)
    ],
)
def test_case(play: Callable[[str, bool], Played], case: Case) -> None:
    played = play(case.dialect, case in DAILY)
    expected = Spoken(case.reasoning, case.content, case.calls, case.end)
    counts = set()
    for way, seen in played.answers[case].items():
        if isinstance(seen, BaseException):
            raise AssertionError(f"{way} failed: {case}") from seen
        # Compared outside the assertion, whose diff takes minutes on a long text of one pattern.
        same = replace(seen, tokens=(0, 0)) == expected
        assert same, f"{way}: {seen!r} is not {expected!r}"
        counts.add(seen.tokens)
    assert len(counts) == 1
