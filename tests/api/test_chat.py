"""Chat completions through the official SDK."""

from __future__ import annotations

from openai import OpenAI

from tests.api.conftest import Serve


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


ASK = [{"role": "user", "content": "Say something."}]


def test_whole_and_streamed_answers_agree(serve: Serve) -> None:
    served = serve("The quick brown fox — naïve, 日本語.")
    sdk = client(served.url)
    whole = sdk.chat.completions.create(model="quire-demo", messages=ASK)
    chunks = list(sdk.chat.completions.create(model="quire-demo", messages=ASK, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == streamed == "The quick brown fox — naïve, 日本語."
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(served.engine.requests[0].prompt)
    assert whole.usage.completion_tokens == len(served.ids("The quick brown fox — naïve, 日本語."))
