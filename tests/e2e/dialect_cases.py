"""The dialects' cases as answers of a model, and a model folder that gives those answers.

The tables are those of `tests.text.dialects`; there each is fed to the parser, here a model says
it, and a client reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.spoken import Calls, calls_of
from tests.support.backend import backend_of
from tests.support.scripted_model import Script, write_scripted
from tests.text.dialects import test_families as families
from tests.text.dialects import test_gemma4 as gemma4
from tests.text.dialects.scripts import STOP_TOKEN, encode, spelled, tokenizer

_LONG = 2000
"""Characters of a case that tests a parser's limits: spelled in bytes, it fills a context."""


@dataclass(frozen=True)
class Case:
    """An answer and what a client should see of it.

    Attributes:
        opening: text at the end of the prompt, which the answer goes on from.
        max_tokens: cuts the answer off; 0 does not.
        spelled: the text's markers are spelled by ordinary tokens.
        tools: whether tools are offered.
    """

    dialect: str
    text: str
    reasoning: str = ""
    content: str = ""
    calls: Calls = ()
    opening: str = ""
    max_tokens: int = 0
    spelled: bool = False
    tools: bool = True

    @property
    def ids(self) -> list[int]:
        """The answer's tokens."""
        if self.spelled:
            return spelled(self.dialect, self.text)
        return encode(self.dialect, [self.text])

    @property
    def end(self) -> str:
        """Why it ends."""
        return "length" if self.max_tokens else "tool_calls" if self.calls else "stop"


def _gemma4() -> Iterator[Case]:
    for text, reasoning, content in gemma4.CHANNELS:
        yield Case("gemma4", text, reasoning, content)
    for prompt, reasoning, content in gemma4.PROMPTS:
        yield Case("gemma4", "x", reasoning, content, opening=prompt)
    for arguments, wanted in gemma4.ARGUMENTS:
        calls = calls_of([("get_weather", wanted)])
        yield Case("gemma4", gemma4.call(arguments), calls=calls)
    empty = calls_of([("get_weather", {})])
    for body in gemma4.MALFORMED:
        text = f"A{body}B{gemma4.call('{}')}"
        yield Case("gemma4", text, content=f"A{body}B", calls=empty)
    yield Case("gemma4", "<|channel>thought\nhm" + gemma4.call("{}") + "done", "hm", "done", empty)
    two = gemma4.call("{days:1}") + "\n" + gemma4.call("{q:a}", "db.find-all") + "<|tool_response>"
    yield Case(
        "gemma4",
        "<|channel>thought\nTwo.<channel|>I'll look.\n" + two,
        "Two.",
        "I'll look.",
        calls_of([("get_weather", {"days": 1}), ("db.find-all", {"q": "a"})]),
    )
    spaced = '<|tool_call> call: get_weather { city : <|"|>x<|"|> } <tool_call|>'
    yield Case("gemma4", spaced, calls=calls_of([("get_weather", {"city": "x"})]))
    prose = '<|channel>thought\nno<channel|><|tool_call>call:now{}<tool_call|><|"|>'
    yield Case("gemma4", prose, content=prose, spelled=True)
    yield Case("gemma4", gemma4.call("{}"), content=gemma4.call("{}"), tools=False)
    thought = "<|channel>thought\nI was"
    length = len(encode("gemma4", [thought]))
    yield Case("gemma4", thought + " thinking", "I was", max_tokens=length)


def _opening(dialect: str) -> str:
    """Return what its template puts at the end of a prompt, where answers depend on that."""
    return families.ASSISTANT if dialect == "harmony" else ""


def _families() -> Iterator[Case]:
    for dialect, text, reasoning, content, calls in families.CASES:
        opening = _opening(dialect)
        yield Case(dialect, text, reasoning, content, calls_of(calls), opening)
    for dialect, text in families.ONE_CALL:
        length = len(encode(dialect, [text])) // 2
        yield Case(dialect, text, opening=_opening(dialect), max_tokens=length)
    for dialect, text in families.MALFORMED:
        if len(text) < _LONG:
            yield Case(dialect, text, content=text, opening=_opening(dialect))
    for dialect, prompt, thinks in families.PROMPTS:
        seen = ("x", "") if thinks else ("", "x")
        yield Case(dialect, "x", *seen, opening=prompt)


CASES: list[Case] = [*_gemma4(), *_families()]
DIALECTS = list(dict.fromkeys(case.dialect for case in CASES))


def cases_of(dialect: str) -> list[Case]:
    """Return the cases of one dialect."""
    return [case for case in CASES if case.dialect == dialect]


def script_token(number: int) -> str:
    """Return what a user writes to get that script."""
    return f"<script_{number}>"


def write_model(folder: Path, dialect: str, cases: Sequence[Case]) -> None:
    """A folder with the dialect's vocabulary, a template, and a model that knows these cases."""
    state = json.loads(backend_of(tokenizer(dialect)).to_str())
    first = tokenizer(dialect).vocab_size
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    state["added_tokens"] += [
        {"id": first + n, "content": script_token(n), "special": True, **plain}
        for n in range(len(cases))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(state))
    config = {"eos_token": STOP_TOKEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(_template(cases))
    stop = tokenizer(dialect).token_id(STOP_TOKEN)
    assert stop is not None
    write_scripted(
        folder,
        [Script(len(encode(dialect, [case.opening])), tuple(case.ids)) for case in cases],
        vocab_size=first + len(cases),
        first_script=first,
        eos_token_id=stop,
    )


def _template(cases: Sequence[Case]) -> str:
    """Return the messages as they are, then the opening of the script that the last of them
    names.
    """
    openings = {script_token(n): case.opening for n, case in enumerate(cases) if case.opening}
    return (
        f"{{%- set openings = {json.dumps(openings)} -%}}"
        "{%- for message in messages %}{{ message.content }}{% endfor %}"
        "{{- openings.get(messages[-1].content[messages[-1].content.rfind('<script_'):], '') }}"
    )
