"""The share of a skill's questions that a model answers right under a KV format."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

from quire.cli.kv_scores import Score
from quire.core.config import EngineConfig
from quire.core.errors import QuireError
from quire.core.kv_format import KVFormat
from quire.core.request import FinishReason, Output, Request, SamplingParams
from quire.demo.skills import SkillAnswer, SkillItem, judge, load
from quire.engine.assembly import assemble
from quire.models.weights.loader import LoadedModel
from quire.text.detokenizer import Detokenizer
from quire.text.dialects import choose_dialect
from quire.text.dialects.base import Dialect, Tool, Vocabulary
from quire.text.output import OutputStream, fold
from quire.text.stops import StopMatcher, StopStrings
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

_KV_MEMORY = 1 << 30
_LONGEST = 512
"""Most tokens of an answer."""


def generate(
    loaded: LoadedModel,
    format: KVFormat,
    prompts: Seq[Seq[int]],
    *,
    max_tokens: int,
    stops: frozenset[int] = frozenset(),
) -> list[tuple[int, ...]]:
    """Return the greedy answers to prompts, all in one engine."""
    config = EngineConfig(
        model=str(loaded.path),
        kv_memory=_KV_MEMORY,
        kv_format=format,
        kv_skip_layers=format.skip_layers,
        prefix_cache=False,
    )
    engine = assemble(loaded, config)
    for number, prompt in enumerate(prompts):
        engine.add(
            Request(
                str(number),
                tuple(prompt),
                SamplingParams(temperature=0),
                max_tokens=max_tokens,
                stop_token_ids=stops,
            )
        )
    answers: dict[str, tuple[int, ...]] = {str(number): () for number in range(len(prompts))}
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    return list(answers.values())


def count_skills(
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    template: ChatTemplate,
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
    prompts = [_prompt(item, tokenizer, template) for item in items]
    dialect = choose_dialect(template.source, str(loaded.config["model_type"]))
    vocabulary = Vocabulary(
        tokenizer.added_tokens,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.decode,
    )
    for format, score in zip(formats, scores, strict=True):
        stops = frozenset(loaded.eos_ids)
        answers = generate(loaded, format, prompts, max_tokens=_LONGEST, stops=stops)
        for item, prompt, tokens in zip(items, prompts, answers, strict=True):
            stream = _stream(
                item, prompt, tokenizer=tokenizer, dialect=dialect, vocabulary=vocabulary
            )
            right, asked = score.skills.get(item.skill, (0, 0))
            correct = judge(item, _answer(stream, tokens, stops))
            score.skills[item.skill] = (right + correct, asked + 1)
        done()


def _prompt(item: SkillItem, tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    rendered = template.render(
        item.messages,
        tools=item.tools,
        add_generation_prompt=True,
        enable_thinking=item.enable_thinking,
    )
    return tokenizer.encode(rendered, add_special_tokens=False)


def _stream(
    item: SkillItem,
    prompt: Seq[int],
    tokenizer: Tokenizer,
    dialect: Dialect,
    vocabulary: Vocabulary,
) -> OutputStream:
    functions = [tool["function"] for tool in item.tools or ()]
    tools = [Tool(each["name"], each.get("parameters", {})) for each in functions]
    parser = dialect.parser(prompt, tools, vocabulary)
    return OutputStream(Detokenizer(tokenizer), parser, StopMatcher(StopStrings(())))


def _answer(stream: OutputStream, tokens: tuple[int, ...], stops: frozenset[int]) -> SkillAnswer:
    """Return the answer in the tokens, parsed as the server parses it."""
    finish = FinishReason.STOP if tokens and tokens[-1] in stops else FinishReason.LENGTH
    said = fold(stream.feed(Output("", tokens, finish=finish)))
    calls = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in said.tool_calls]
    return SkillAnswer(said.text, said.reasoning, calls)
