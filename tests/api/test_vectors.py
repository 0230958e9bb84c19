"""`/v1/embeddings`, `/v1/rerank` and `/v1/score`, by official clients against a real server."""

from __future__ import annotations

import struct
from base64 import b64decode
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError

from quire.core.config import ServerConfig
from tests.api.conftest import HTTP, Serve, openai_client
from tests.support.child import Child
from tests.support.scripted_engine import Script

TEXTS = ["a cat sleeps", "the sky is blue", "a cat sleeps"]


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return HTTP.post(f"{url}{path}", json=body)


def test_vectors_by_the_official_client(child: Child) -> None:
    client = openai_client(child.url)
    answer = client.embeddings.create(model="quire-demo", input=TEXTS)  # asks for base64
    assert [each.index for each in answer.data] == [0, 1, 2]
    one, other, again = (np.array(each.embedding) for each in answer.data)
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
    assert np.array_equal(one, again)
    assert not np.allclose(one, other)
    floats = client.embeddings.create(model="quire-demo", input=TEXTS[0], encoding_format="float")
    assert np.allclose(floats.data[0].embedding, one, atol=1e-7)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 2


def test_token_ids_are_what_the_text_becomes(child: Child) -> None:
    ids = post(child.url, "/tokenize", prompt=TEXTS[0]).json()["tokens"]
    written = post(child.url, "/v1/embeddings", input=TEXTS[0]).json()
    assert post(child.url, "/v1/embeddings", input=ids).json()["data"] == written["data"]
    assert post(child.url, "/v1/embeddings", input=[ids, ids]).json()["data"][1] == {
        **written["data"][0],
        "index": 1,
    }
    assert written["usage"]["prompt_tokens"] == len(ids)


def test_the_answer_says_what_the_vectors_are(child: Child) -> None:
    answer = post(child.url, "/v1/embeddings", input="x").json()
    assert answer["pooling"] == {"type": "mean", "normalized": True, "trained": False}
    last = post(child.url, "/v1/embeddings", input="x y", pooling="last", normalize=False).json()
    assert last["pooling"] == {"type": "last", "normalized": False, "trained": False}
    assert abs(np.linalg.norm(last["data"][0]["embedding"]) - 1) > 0.01


def test_dimensions_are_the_first_ones_scaled_anew(child: Child) -> None:
    whole = np.array(post(child.url, "/v1/embeddings", input="x").json()["data"][0]["embedding"])
    body = {"input": "x", "dimensions": 16, "encoding_format": "base64"}
    packed = post(child.url, "/v1/embeddings", **body).json()["data"][0]["embedding"]
    short = np.array(struct.unpack("<16f", b64decode(packed)))
    assert np.allclose(short, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-6)
    with pytest.raises(BadRequestError, match=f"have only {len(whole)}"):
        openai_client(child.url).embeddings.create(
            model="quire-demo", input="x", dimensions=len(whole) + 1
        )


def test_long_and_many_inputs(child: Child) -> None:
    """A body of this size is read in a job."""
    answer = post(child.url, "/v1/embeddings", input=["word " * 2000] * 3).json()
    assert len(answer["data"]) == 3
    cut = post(child.url, "/v1/embeddings", input="word " * 2000, truncate_prompt_tokens=5).json()
    assert cut["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "temperature": 1}, "temperature"),
        ({"input": "x", "model": "other"}, "model"),
        ({"input": "x", "prompt_name": "query"}, "prompt_name"),
        ({"input": [10**8]}, "input"),
        ({"input": ""}, "input"),
    ],
)
def test_what_cannot_be_honoured_is_refused(child: Child, body: Any, param: str) -> None:
    answer = post(child.url, "/v1/embeddings", **body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_documents_by_their_score(child: Child) -> None:
    body: dict[str, Any] = {"query": "cats", "documents": [*TEXTS[:2], {"text": "cats"}]}
    answer = post(child.url, "/v1/rerank", **body).json()
    scores = [each["relevance_score"] for each in answer["results"]]
    assert sorted(each["index"] for each in answer["results"]) == [0, 1, 2]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    assert answer["method"] == "judge"
    best = post(child.url, "/v2/rerank", **body, top_n=1, return_documents=True).json()["results"]
    texts = ["a cat sleeps", "the sky is blue", "cats"]
    assert [each["document"]["text"] for each in best] == [texts[best[0]["index"]]]
    pairs = post(child.url, "/v1/score", text_1="cats", text_2=texts).json()["data"]
    by_index = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert {each["index"]: each["score"] for each in pairs} == pytest.approx(by_index, abs=1e-6)
    wrong = post(child.url, "/v1/score", text_1=["a", "b"], text_2=["c"])
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text_2")


def test_cohere_runs_unchanged(child: Child) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(api_key="none", base_url=child.url)
    answer = client.rerank(model="quire-demo", query="cats", documents=TEXTS, top_n=2)
    assert len(answer.results) == 2
    assert answer.results[0].relevance_score >= answer.results[1].relevance_score
    assert answer.meta.tokens.input_tokens > 0


def test_callers_share_no_prefixes(serve: Serve) -> None:
    served = serve(config=ServerConfig(api_keys=("a" * 20, "b" * 20)))
    for key in "ab":
        headers = {"authorization": f"Bearer {key * 20}"}
        HTTP.post(f"{served.url}/v1/embeddings", json={"input": "x"}, headers=headers)
    salts = {each.cache_salt for each in served.engine.requests}
    assert len(salts) == 2
    assert "" not in salts


@pytest.mark.parametrize("packed", ["float", "base64"])
def test_vectors_that_are_no_numbers_are_an_error(serve: Serve, packed: str) -> None:
    served = serve(lambda _: Script(vector=(0.5, float("nan"))))
    answer = post(served.url, "/v1/embeddings", input=["x", "y"], encoding_format=packed)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "not_finite")
    assert "--dtype" in answer.json()["error"]["message"]
