"""Text completions through the official SDK."""

from __future__ import annotations

import pytest
from openai import BadRequestError, OpenAI

from quire.api.completions.logprobs import LogprobsWriter, MeanLogprob, best_choices
from quire.api.shared.render import NoLogprobs, token_text
from quire.core.request import Request, TokenLogprobs
from quire.demo import MODEL_DIR
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Serve, Served, openai_client
from tests.support.scripted_engine import Script


def client(served: Served) -> OpenAI:
    return openai_client(served.url)


def test_whole_and_streamed_answers_agree(serve: Serve) -> None:
    served = serve(" upon a time")
    sdk = client(served)
    whole = sdk.completions.create(model="quire-demo", prompt="Once", echo=True)
    chunks = list(sdk.completions.create(model="quire-demo", prompt="Once", echo=True, stream=True))
    assert whole.choices[0].text == "".join(c.choices[0].text for c in chunks) == "Once upon a time"
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert served.engine.requests[0].max_tokens == 16


def test_prompts_as_text_lists_and_ids_make_choices_in_order(serve: Serve) -> None:
    def script(request: Request) -> Script:
        return Script(request.prompt[-2:])

    served = serve(script)
    sdk = client(served)
    ids = [list(served.ids("red fish")), list(served.ids("blue sky"))]
    for prompt in (["red fish", "blue sky"], ids):
        answer = sdk.completions.create(model="quire-demo", prompt=prompt, n=2)
        texts = [choice.text for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert texts[0] == texts[1] == served.tokenizer.decode(ids[0][-2:])
        assert texts[2] == texts[3] == served.tokenizer.decode(ids[1][-2:])
    one = sdk.completions.create(model="quire-demo", prompt=ids[0])
    assert one.usage is not None
    assert one.usage.prompt_tokens == len(ids[0])


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs(serve: Serve, stream: bool) -> None:
    served = serve("naïve fox")
    answer = client(served).completions.create(
        model="quire-demo", prompt="x", logprobs=1, stream=stream
    )
    pieces = [c.choices[0].logprobs for c in answer] if stream else [answer.choices[0].logprobs]
    names = [name for piece in pieces if piece for name in piece.tokens]
    offsets = [offset for piece in pieces if piece for offset in piece.text_offset]
    assert len(names) == len(served.ids("naïve fox<eos>"))
    assert names[1] == "bytes:\\xc3"
    shown = ["" if name.startswith("bytes:") else name for name in names]
    shown[names.index("bytes:\\xaf")] = "ï"  # a character is complete with its last byte
    assert offsets == [len("".join(shown[:index])) for index in range(len(names))]
    tops = [top for piece in pieces if piece for top in piece.top_logprobs]
    assert all(list(top.values()) == [-0.5] for top in tops)


def test_top_logprobs_hold_the_sampled_token() -> None:
    (text,) = (tokenizer := Tokenizer.open(MODEL_DIR)).encode("a", add_special_tokens=False)
    other = text + 1
    names = [token_text(tokenizer, token) for token in (text, other)]
    for top, held in (
        ((), {names[0]: -2.0}),
        (((other, -0.5),), {names[1]: -0.5, names[0]: -2.0}),
        (((text, -2.0),), {names[0]: -2.0}),
    ):
        writer = LogprobsWriter(tokenizer, Detokenizer(tokenizer))
        written = writer.write([TokenLogprobs(text, -2.0, top)])
        assert written["top_logprobs"] == [held]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [10**8]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 200, "n": 100}, "prompt"),
        ({"tools": []}, "tools"),
    ],
)
def test_what_is_not_offered_is_named(serve: Serve, fields: dict[str, object], param: str) -> None:
    body = {"prompt": "x", **fields}
    answer = HTTP.post(f"{serve().url}/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_best_of_generates_more_choices_than_it_returns(serve: Serve) -> None:
    served = serve("Hi.")
    create = client(served).completions.create
    answer = create(model="quire-demo", prompt=["x", "y"], n=2, best_of=3)
    assert [each.index for each in answer.choices] == [0, 1, 2, 3]
    assert all(each.logprobs is None for each in answer.choices)
    assert [each.sampling.logprobs for each in served.engine.requests] == [0] * 6
    assert answer.usage is not None
    one = create(model="quire-demo", prompt="x").usage
    assert one is not None
    assert answer.usage.completion_tokens == 6 * one.completion_tokens
    assert len(create(model="quire-demo", prompt="x", n=2, best_of=2).choices) == 2


def test_the_best_choices_of_each_prompt_come_first() -> None:
    assert best_choices([-3.0, -1.0, -2.0, -1.0, -9.0, -0.5], generated=3, kept=2) == [1, 2, 5, 3]
    assert best_choices([-3.0, -1.0], generated=2, kept=2) == [0, 1]
    written = MeanLogprob(NoLogprobs())
    written.add([TokenLogprobs(5, -2.0, ()), TokenLogprobs(6, -4.0, ())])
    assert (written.mean, written.body()) == (-3.0, None)


def test_a_prompt_too_long_is_refused(serve: Serve) -> None:
    with pytest.raises(BadRequestError) as caught:
        client(serve(context_length=8)).completions.create(
            model="quire-demo", prompt=list(range(3, 13))
        )
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert "10" in caught.value.message
    assert "8" in caught.value.message
