"""The engine's outputs become events: text, stop strings, log-probabilities, usage, one end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.request import Failure, FinishReason, Output, TokenLogprobs
from quire.text.detokenizer import Detokenizer
from quire.text.dialects import DIALECTS
from quire.text.events import (
    Event,
    Failed,
    Finished,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from quire.text.output import OutputStream
from quire.text.stops import StopMatcher, StopStrings
from tests.support.folding import fold
from tests.support.work import counted
from tests.text.dialects.scripts import STOP_TOKEN, TOOLS, answer, encode, tokenizer, vocabulary

CALL = '<tool_call>{"name": "now", "arguments": {"stop": "END"}}</tool_call>'


def stream(stops: Sequence[str] = (), dialect: str = "qwen3") -> OutputStream:
    parser = DIALECTS[dialect].parser([], TOOLS, vocabulary(dialect))
    return OutputStream(Detokenizer(tokenizer(dialect)), parser, StopMatcher(StopStrings(stops)))


def outputs(text: str, **last: object) -> list[Output]:
    ids = encode("qwen3", [text])
    made = [Output("r", (token,), prompt_tokens=9, cached_tokens=4, reuse="new") for token in ids]
    return [*made, Output("r", (), prompt_tokens=9, cached_tokens=4, reuse="new", **last)]  # type: ignore[arg-type]


def played(feed: OutputStream, given: Sequence[Output]) -> list[Event]:
    return [event for output in given for event in feed.feed(output)]


def test_events_in_order_and_exact_usage() -> None:
    ids = encode("qwen3", ["<think>a b</think>", "Hi", CALL, STOP_TOKEN])
    thought = encode("qwen3", ["<think>a b</think>"])
    found = stream().feed(
        Output("r", tuple(ids), finish=FinishReason.STOP, prompt_tokens=9, cached_tokens=4)
    )
    kinds = [type(event) for event in found]
    assert [kind for i, kind in enumerate(kinds) if kind is not kinds[i - 1] or i == 0] == [
        Reasoning,
        Text,
        ToolCallStarted,
        ToolCallArguments,
        ToolCallEnded,
        Finished,
    ]
    usage = Usage(9, len(ids), len(thought), 4)
    assert found[-1] == Finished(FinishReason.STOP, usage, None, 1)


def test_stop_string_ends_the_answer_and_the_rest_is_ignored() -> None:
    feed = stream(["END"])
    found = played(feed, outputs("One ENDless day", finish=FinishReason.LENGTH))
    assert feed.stopped
    assert fold(found).text == "One "
    assert [type(event) for event in found].count(Finished) == 1
    last = found[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.stop) == (FinishReason.STOP, "END")
    assert last.usage.completion_tokens < len(encode("qwen3", ["One ENDless day"]))


@pytest.mark.parametrize("text", ["<think>END</think>Hi", CALL, "EN<think>x</think>D", "EN"])
def test_stop_strings_are_looked_for_in_the_answer_alone(text: str) -> None:
    feed = stream(["END"])
    found = fold(played(feed, outputs(text, finish=FinishReason.STOP)))
    whole = fold(played(stream(), outputs(text, finish=FinishReason.STOP)))
    assert not feed.stopped
    assert (found.text, found.reasoning) == (whole.text, whole.reasoning)
    assert len(found.tool_calls) == len(whole.tool_calls)


def test_stop_string_in_a_malformed_call_counts_as_it_is_text() -> None:
    assert answer("qwen3", "<tool_call>prose END x", stops=["END"]).text == "<tool_call>prose "


def test_logprobs_go_with_the_text_that_their_tokens_completed() -> None:
    ids = encode("qwen3", ["<think>a</think>", "Grüße 🙂 END", "x"])
    given = [Output("r", (t,), (TokenLogprobs(t, -i / 8),)) for i, t in enumerate(ids)]
    given.append(Output("r", finish=FinishReason.LENGTH))
    found = played(stream(["never"]), given)
    texts = [event for event in found if isinstance(event, Text)]
    assert all(event.logprobs for event in texts)
    thought = len(encode("qwen3", ["<think>a</think>"]))
    assert [entry.token_id for entry in fold(found).logprobs] == ids[thought:]


THOUGHTS = [
    ("qwen3", "<think>a</think>", "b"),
    ("qwen3", "<think>a \n</think>", "\n\nb"),
    ("gemma4", "<|channel>thought\na<channel|>", "b"),
    ("harmony", "<|channel|>analysis<|message|>a<|end|>",
     "<|start|>assistant<|channel|>final<|message|>b"),
    ("qwen3", "<think>" + "\n" * 70 + "a", ""),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "thought", "said"), THOUGHTS)
def test_logprobs_of_reasoning_stand_apart_with_its_marks(
    dialect: str, thought: str, said: str
) -> None:
    within, beyond = encode(dialect, [thought]), encode(dialect, [said, STOP_TOKEN])
    entries = {token: TokenLogprobs(token, -1.0) for token in (*within, *beyond)}
    given = [Output("r", (token,), (entries[token],)) for token in (*within, *beyond[:-1])]
    given.append(Output("r", (beyond[-1],), (entries[beyond[-1]],), FinishReason.STOP))
    found = fold(played(stream(dialect=dialect), given))
    assert found.reasoning.strip() == "a"
    assert [entry.token_id for entry in found.reasoning_logprobs][: len(within)] == within
    seen = [*found.reasoning_logprobs, *found.logprobs]
    assert [entry.token_id for entry in seen] == [*within, *beyond]
    assert len(found.logprobs) == (len(beyond) if said else 0)


def test_calls_and_the_end_have_logprobs_too() -> None:
    thought = encode("qwen3", ["<think>a</think>"])
    ids = [*thought, *encode("qwen3", ["Hi", CALL, STOP_TOKEN])]
    given = [Output("r", (t,), (TokenLogprobs(t, -1.0),)) for t in ids[:-1]]
    given.append(Output("r", (ids[-1],), (TokenLogprobs(ids[-1], -1.0),), FinishReason.STOP))
    found = fold(played(stream(), given))
    assert len(found.tool_calls) == 1
    assert [entry.token_id for entry in found.logprobs] == ids[len(thought) :]


def test_failures_end_the_stream_once() -> None:
    failure = Failure("no room", status=503)
    feed = stream()
    found = played(feed, [*outputs("Hi"), Output("r", error=failure, finish=FinishReason.ERROR)])
    assert isinstance(found[-1], Failed)
    assert found[-1].error == failure
    assert feed.feed(Output("r", (1,), finish=FinishReason.LENGTH)) == []
    assert isinstance(stream().feed(Output("r", finish=FinishReason.ERROR))[0], Failed)


def test_abort_and_empty_answers_end_once() -> None:
    for reason in (FinishReason.ABORT, FinishReason.LENGTH, FinishReason.LOOP):
        found = stream().feed(Output("r", finish=reason))
        assert found == [Finished(reason, Usage(0, 0))]


def test_the_fold_leaves_out_calls_that_never_ended() -> None:
    started: list[Event] = [ToolCallStarted(0, "a", "f"), ToolCallArguments(0, "{")]
    assert fold(started).tool_calls == []
    whole = fold([*started, ToolCallArguments(0, "}"), ToolCallEnded(0)])
    assert [(c.id, c.name, c.arguments) for c in whole.tool_calls] == [("a", "f", "{}")]
    assert whole.finish is None


@given(st.text("abEND <\n🙂", max_size=30), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_stops_cut_as_if_the_whole_text_were_known(text: str, group: int) -> None:
    found = answer("none", text, stops=["END"], group=group)
    assert found.text == text.partition("END")[0]


CUT = [
    ("qwen3", "<think>some thoughts, of many words</think>", "An answer of words. " + CALL + "!"),
    ("gemma4", "<|channel>thought\nsome thoughts here<channel|>", "An answer of a few words."),
    ("harmony", "<|channel|>analysis<|message|>some thoughts here<|end|>",
     "<|start|>assistant<|channel|>final<|message|>An answer of a few words."),
]  # fmt: skip


@pytest.mark.parametrize("stops", [[], ["words"], ["s. "]])
@pytest.mark.parametrize(("dialect", "thought", "rest"), CUT)
def test_tokens_that_come_together_are_what_they_are_apart(
    dialect: str, thought: str, rest: str, stops: list[str]
) -> None:
    ids = tuple(encode(dialect, [thought, rest, "Grüße 🙂 "]))
    folds = []
    for size in (1, 2, 3, 7, len(ids)):
        feed = stream(stops, dialect)
        given = [Output("r", ids[at : at + size]) for at in range(0, len(ids), size)]
        folds.append(fold(played(feed, [*given, Output("r", finish=FinishReason.LENGTH)])))
        for call in folds[-1].tool_calls:
            call.id = "same"
    assert all(each == folds[0] for each in folds)


def test_plain_tokens_that_come_together_are_read_as_one() -> None:
    """A frame of a fast stream holds some ten tokens."""
    word = tuple(encode("qwen3", ["word, "]))[:1] * 2
    feed = stream()
    played(feed, [Output("r", word)])
    _, apart = counted(lambda: [feed.feed(Output("r", word[:1])) for _ in range(32)])
    found, together = counted(lambda: feed.feed(Output("r", word * 16)))
    assert len(found) == 1
    assert together < apart / 8
    assert feed.usage.completion_tokens == 66


def test_plain_tokens_of_a_whole_answer_are_read_as_one_between_others() -> None:
    """Its start, and characters of several tokens, are read token by token."""
    ids = encode("qwen3", ["word, " * 32, "🙂", "word, " * 32])
    feed = stream()
    _, apart = counted(lambda: [feed.feed(Output("r", (token,))) for token in ids])
    feed = stream()
    found, together = counted(lambda: feed.feed(Output("r", tuple(ids))))
    assert together < apart / 4
    assert len(found) < len(ids) / 4
    assert fold(found).text == ("word, " * 32 + "🙂" + "word, " * 32).rstrip()
    assert feed.usage.completion_tokens == len(ids)
