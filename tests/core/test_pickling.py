"""Requests cross to the engine's process as tuples of their values."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from dataclasses import replace

from quire.core.frames import encode
from quire.core.kv_format import KVFormat
from quire.core.messages import Submit
from quire.core.request import Embed, Request, SamplingParams, TokenRules

REQUEST = Request(
    "a",
    (1, 2, 3),
    SamplingParams(temperature=0.5, logit_bias=((3, 1.5),), seed=7),
    kv_format=KVFormat("page", 4, 4),
    rules=TokenRules(allowed=(1, 2)),
    task=Embed("mean"),
    hold=3,
)


def calls_to_send(message: object) -> int:
    """Return how many Python functions run to write and read a message."""
    calls: Counter[str] = Counter()
    pickle.loads(encode(message)[8:])
    sys.setprofile(lambda frame, event, _: calls.update([event] * (event == "call")))
    try:
        pickle.loads(encode(message)[8:])
    finally:
        sys.setprofile(None)
    return calls["call"]


def test_a_request_arrives_equal() -> None:
    arrived = pickle.loads(pickle.dumps(REQUEST))
    assert arrived == REQUEST
    assert replace(arrived, id="b") != REQUEST


def test_a_request_takes_few_calls_to_send() -> None:
    assert calls_to_send(Submit((Request("a", (1, 2, 3)),))) <= 16


def test_tokens_of_many_streams_take_no_calls_each() -> None:
    def calls(streams: int) -> int:
        tokens = tuple((f"{number}", (1, 2), 0, 0) for number in range(streams))
        return calls_to_send(((), tokens))

    assert calls(32) == calls(1) == 1  # `encode`
