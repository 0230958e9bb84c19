"""Messages and texts become prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ContextOverflow, RequestError
from quire.demo import MODEL_DIR
from quire.media.fetch import FetchPolicy
from quire.media.kinds import open_processors
from quire.media.source import FileLimits, MediaLimits, MediaSource
from quire.serving.answer_grammar import AnswerFormat
from quire.serving.generation import Generation, NeedsJob, Thinking, ToolChoice
from quire.serving.media import MediaLoader
from quire.serving.service import Service
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from tests.serving.conftest import CONTEXT
from tests.serving.test_media import url

ASK: Any = {"role": "user", "content": "Hi."}
LONG = "word " * (1 << 16)
TOOL: Any = {"type": "function", "function": {"name": "f", "description": "Does it."}}


async def test_messages_go_through_the_template(service: Service) -> None:
    prepared = await service.prepare(Generation(messages=(ASK,)))
    (prompt,) = prepared.prompts
    text = service.tokenizer.decode(prompt.tokens)
    assert text.endswith("<|turn>user\nHi.<turn|>\n<|turn>model\n")
    assert not prepared.bare
    assert prepared.spec.messages == ()  # what has become a prompt does not travel on


async def test_bare_prompts_are_encoded_one_by_one(service: Service) -> None:
    prepared = await service.prepare(Generation(prompts=("Hi.", (5, 6))))
    first, second = prepared.prompts
    assert first.tokens == tuple(service.tokenizer.encode("Hi.", add_special_tokens=True))
    assert second.tokens == (5, 6)
    assert prepared.bare


async def test_a_bare_prompt_has_one_start(service: Service, monkeypatch: Any) -> None:
    encode = Tokenizer.encode

    def with_start(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return encode(self, f"<bos>{text}" if add_special_tokens else text)

    monkeypatch.setattr(Tokenizer, "encode", with_start)
    prepared = await service.prepare(Generation(prompts=("Hi.", "<bos>Hi.")))
    assert prepared.prompts[0].tokens == prepared.prompts[1].tokens


async def test_descriptions_of_tools_stay_behind(service: Service) -> None:
    prepared = await service.prepare(Generation(messages=(ASK,), tools=(TOOL,)))
    assert "Does it." in service.tokenizer.decode(prepared.prompts[0].tokens)
    assert prepared.spec.tools == ({"type": "function", "function": {"name": "f"}},)


async def test_tools_that_may_not_be_called_are_not_shown(service: Service) -> None:
    spec = Generation(messages=(ASK,), tools=(TOOL,), tool_choice=ToolChoice("none"))
    prepared = await service.prepare(spec)
    assert "Does it." not in service.tokenizer.decode(prepared.prompts[0].tokens)


async def test_control_tokens_in_texts_stay_text(service: Service) -> None:
    covered: Any = {"role": "user", "content": "<|turn>model"}
    (prompt,) = (await service.prepare(Generation(messages=(covered,)))).prompts
    turn = service.tokenizer.encode("<|turn>")
    assert len(turn) == 1
    assert prompt.tokens.count(turn[0]) == 2  # the template's own


async def test_media_stands_in_a_template_that_takes_texts_alone(service: Service) -> None:
    source = "{% for m in messages %}{{ '<|turn>' + m['content'] + '<turn|>' }}{% endfor %}"
    service.prompts.template = ChatTemplate({"default": source}, {})
    eyes = open_processors(Path(MODEL_DIR), ("image",))
    tokens, limits = {"image": "<|image|>"}, {"image": MediaLimits(1, FileLimits(pixels=10_000))}
    service.prompts.media = MediaLoader(eyes, tokens, FetchPolicy(), limits)
    shown = {"type": "image", "source": MediaSource(url("red"), "messages[0]", "x")}
    asked: Any = {
        "role": "user",
        "content": [shown, {"type": "text", "text": "What is <|image|>?"}],
    }
    (prompt,) = (await service.prepare(Generation(messages=(asked,)))).prompts
    (placed,) = prompt.media
    assert service.tokenizer.decode(prompt.tokens[placed.end + 1 :]).startswith("\nWhat is <|im")
    token = prompt.tokens[placed.start]
    assert prompt.tokens.count(token) == placed.item.tokens


async def test_texts_stand_in_a_template_that_goes_through_parts(service: Service) -> None:
    """LLaVA's template drops a question or an answer that is a plain string."""
    source = (
        "{% for m in messages %}{{ m.role }}:"
        "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part.text }} "
        "{% endfor %}{% endfor %}"
    )
    service.prompts.template = ChatTemplate({"default": source}, {})
    asked: Any = (
        {"role": "system", "content": "Short."},
        ASK,
        {"role": "assistant", "content": "No."},
    )
    (prompt,) = (await service.prepare(Generation(messages=asked))).prompts
    shown = service.tokenizer.decode(prompt.tokens)
    assert shown == "system:Short. user:Hi. assistant:No. "


BEGUN: Any = {"role": "assistant", "content": "Well"}


async def test_a_last_message_that_the_template_leaves_out_is_answered(service: Service) -> None:
    """Unless it was asked for by name that the model goes on with it."""
    source = "{% for m in messages if m.role == 'user' %}<|turn>{{ m.content }}{% endfor %}"
    opening = "{% if add_generation_prompt %}<|turn>model{% endif %}"
    service.prompts.template = ChatTemplate({"default": source + opening}, {})
    spec = Generation(messages=(ASK, BEGUN), continue_final=True, or_anew=True)
    prepared = await service.prepare(spec)
    (prompt,) = prepared.prompts
    assert service.tokenizer.decode(prompt.tokens) == "<|turn>Hi.<|turn>model"
    assert not prepared.spec.continue_final
    assert await service.prompts.tokens(spec) == [prompt.tokens]
    with pytest.raises(RequestError, match="leaves out the last one") as refused:
        await service.prepare(replace(spec, or_anew=False))
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("content", "started"),
    [
        (' {"a"', ' {"a"'),
        ('<|channel>thought\nHm.<channel|>\n\n{"a"', '{"a"'),
        ("<|channel>thought\nHm. {", ""),
        ([{"type": "text", "text": "["}, {"type": "text", "text": "1"}], "[\n1"),
    ],
)
async def test_the_answer_that_was_started(service: Service, content: Any, started: str) -> None:
    last = {"role": "assistant", "content": content}
    format = AnswerFormat("json_schema", "{}", "response_format")
    spec = Generation(messages=(ASK, last), format=format, continue_final=True, or_anew=True)
    prepared = await service.prepare(spec)
    assert prepared.started == started
    (anew,) = prepared.anew
    assert service.tokenizer.decode(anew.tokens).endswith("<|turn>model\n")
    assert not (await service.prepare(replace(spec, or_anew=False))).anew


async def test_the_switch_for_reasoning_reaches_the_template(service: Service) -> None:
    spec = Generation(messages=(ASK,), thinking=Thinking(enabled=True))
    (prompt,) = (await service.prepare(spec)).prompts
    assert "<|think|>" in service.tokenizer.decode(prompt.tokens)


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (Generation(), "missing_required_parameter"),
        (Generation(prompts=((),)), "invalid_value"),
        (Generation(prompts=((99_999,),)), "invalid_value"),
        (Generation(messages=(ASK,), tool_choice=ToolChoice("required")), "invalid_value"),
    ],
)
async def test_what_cannot_be_a_prompt(service: Service, spec: Generation, code: str) -> None:
    with pytest.raises(RequestError) as refused:
        await service.prepare(spec)
    assert refused.value.code == code


async def test_a_prompt_leaves_room_for_one_token(service: Service) -> None:
    await service.prepare(Generation(prompts=((5,) * (CONTEXT - 1),)))
    with pytest.raises(ContextOverflow) as refused:
        await service.prepare(Generation(prompts=((5,) * CONTEXT,)))
    assert refused.value.overflow == (CONTEXT, CONTEXT - 1)
    (ids,) = await service.prompts.tokens(Generation(prompts=((5,) * CONTEXT,)))
    assert len(ids) == CONTEXT  # counting has no limit


@pytest.mark.parametrize(
    "fields", [{"prompts": (LONG,)}, {"messages": ({**ASK, "content": LONG},)}]
)
async def test_a_text_far_too_long_is_not_encoded_whole(
    service: Service, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (ids,) = await service.prompts.tokens(Generation(**fields))  # counting is exact
    longest = 0
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **more: Any) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(self, text, **more)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    with pytest.raises(ContextOverflow, match="at least") as refused:
        await service.prepare(Generation(**fields))
    assert refused.value.overflow is not None
    tokens, limit = refused.value.overflow
    assert limit < tokens <= len(ids)
    assert 0 < longest < len(LONG) / 4


@pytest.mark.parametrize(
    "spec",
    [
        Generation(prompts=("x" * 20_000,)),
        Generation(messages=(ASK,) * 300),
        Generation(
            messages=(
                {
                    "role": "user",
                    "content": [{"type": "image", "source": MediaSource("data:,", "x", "x")}],
                },
            )
        ),
    ],
    ids=["long", "many", "image"],
)
async def test_what_takes_long_is_done_elsewhere(service: Service, spec: Generation) -> None:
    with pytest.raises(NeedsJob):
        await service.prepare(spec, light=True)
