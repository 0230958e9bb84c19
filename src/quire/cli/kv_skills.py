"""Measures greedy answers of a model under a KV format, and the share of right ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from quire.cli.kv_scores import Score
from quire.core.errors import QuireError
from quire.core.kv_format import KVFormat
from quire.demo.skills import SkillAnswer, SkillItem, judge, load
from quire.llm import LLM, Answer, ChatOptions, Settings

_KV_MEMORY = 1 << 30
_LONGEST = 512
"""Most tokens of an answer."""
_TOGETHER = 64
"""Most conversations that are asked at once."""


@dataclass(frozen=True, slots=True)
class Answering:
    """A model that answers under any of its KV formats, in an engine's process.

    Args:
        llms: the same model by the group size of its formats.
    """

    llms: dict[int, LLM]

    def generate(
        self, format: KVFormat, prompts: Seq[Seq[int]], *, max_tokens: int
    ) -> list[Answer]:
        """Return the greedy answers to prompts."""
        return self.llms[format.group_size].generate(
            list(prompts), max_tokens=max_tokens, **_greedy(format)
        )

    def ask(self, format: KVFormat, item: SkillItem) -> Answer:
        """Return the greedy answer to a skill's question."""
        asked: ChatOptions = {"enable_thinking": item.enable_thinking, "max_tokens": _LONGEST}
        if item.tools is not None:
            asked["tools"] = item.tools
        return self.llms[format.group_size].chat(item.messages, **asked, **_greedy(format))


@contextmanager
def answering(
    model: str, formats: Seq[KVFormat], *, adapter: str | None, as_served: bool
) -> Iterator[Answering]:
    """Open a model for answers under some formats.

    Args:
        as_served: whether packed formats leave the server's default layers plain; else none.

    Raises:
        ModelError: the model cannot be opened.
    """
    settings: Settings = {
        "kv_memory": _KV_MEMORY,
        "kv_scheme": "uniform",
        "kv_bits": 8,
        "prefix_cache": False,
        "sampling_defaults": "openai",
        "speculate": "off",
    }
    if adapter is not None:
        settings["adapter"] = adapter
    if not as_served:
        settings["kv_skip_layers"] = ()
    sizes = dict.fromkeys(each.group_size for each in formats)
    with ExitStack() as opened:
        llms = {}
        for size in sizes:
            settings["kv_group_size"] = cast(Literal[64, 32], size)
            llms[size] = opened.enter_context(LLM(model, **settings))
        yield Answering(llms)


def count_skills(
    model: Answering,
    formats: Seq[KVFormat],
    files: Seq[Path],
    count: int,
    scores: Seq[Score],
    done: Callable[[], None],
) -> None:
    """Count the right answers of each format to `count` items, spread over each file.

    Args:
        done: called after each format.

    Raises:
        QuireError: a file holds pictures.
    """
    items: list[SkillItem] = []
    for path in files:
        known = load(path)
        if any(isinstance(m.get("content"), list) for item in known for m in item.messages):
            raise QuireError(f"--skills: {path} holds images; eval-kv evaluates text only")
        items += known[:: max(1, len(known) // count)][:count]
    for format, score in zip(formats, scores, strict=True):
        with ThreadPoolExecutor(_TOGETHER) as threads:
            answers = threads.map(partial(model.ask, format), items)
        for item, answer in zip(items, answers, strict=True):
            right, asked = score.skills.get(item.skill, (0, 0))
            score.skills[item.skill] = (right + judge(item, _judged(answer)), asked + 1)
        done()


def _greedy(format: KVFormat) -> dict[str, Any]:
    """Return the options of greedy answers in a format."""
    bits = "none"
    if format.scheme != "plain":
        bits = f"{format.key_bits:g}/{format.value_bits:g}"
    return {"temperature": 0, "kv_scheme": format.dtype or format.scheme, "kv_bits": bits}


def _judged(answer: Answer) -> SkillAnswer:
    calls = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in answer.tool_calls]
    return SkillAnswer(answer.text, answer.reasoning, calls)
