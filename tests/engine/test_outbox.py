"""The engine's process sends outputs after each step, in order and in time."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest

from quire.core.frames import Frames
from quire.core.messages import NextTokens, StepOutputs
from quire.core.request import FinishReason, Output, Request, TokenLogprobs
from quire.engine import outbox, worker
from quire.engine.engine import Engine
from quire.engine.outbox import FRAME_S, Outbox


class Clock:
    """Stands for the clock; steps take as long as a test says."""

    expected_step_s = 0.001
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(outbox, "time", clock)
    return clock


@pytest.fixture
def pack(clock: Clock) -> Any:
    """Pack outputs for a server whose cores the engine does not use."""
    return packing(Outbox(), clock)


@pytest.fixture
def pack_on_cpu(clock: Clock) -> Any:
    """Pack outputs of an engine that computes on the server's cores."""
    return packing(Outbox(FRAME_S), clock)


class Sent(NamedTuple):
    """The parts of a message by name."""

    outputs: tuple[Output, ...]
    tokens: tuple[NextTokens, ...]


def packing(box: Outbox, clock: Clock) -> Callable[[list[Output]], Sent]:
    return lambda outputs: Sent(*box.pack(outputs, clock.expected_step_s))


NAMES = [f"r{number}" for number in range(32)]


def step(token: int, names: list[str] = NAMES, **fields: Any) -> list[Output]:
    return [Output(name, (token,), **fields) for name in names]


def read(message: StepOutputs) -> dict[str, list[int]]:
    """Return what the other end gets, by request, in its order."""
    got: dict[str, list[int]] = {}
    outputs, further = message
    for name, tokens, *_ in further:
        got.setdefault(name, []).extend(tokens)
    for output in outputs:
        got.setdefault(output.request_id, []).extend(output.token_ids)
    return got


def test_first_tokens_go_out_at_once(pack: Any) -> None:
    assert read(pack(step(1))) == {name: [1] for name in NAMES}


def test_many_tokens_in_little_time_go_out_together(pack: Any, clock: Clock) -> None:
    pack(step(0))
    sent = []
    for number in range(1, 117):
        clock.now += clock.expected_step_s
        sent.append(read(pack(step(number))))
    full = [each for each in sent if each]
    assert len(full) == 4  # so that none waits for more than 30 ms
    assert [token for each in full for token in each["r7"]] == list(range(1, 117))


def test_no_token_waits_longer_than_it_may(pack: Any, clock: Clock) -> None:
    pack(step(0))
    clock.now += 0.001
    assert not read(pack(step(1)))
    clock.expected_step_s = 0.05  # a prompt is read next
    clock.now += 0.001
    assert read(pack(step(2)))["r0"] == [1, 2]


def test_short_steps_of_a_stream_share_messages_on_the_servers_cores(
    pack_on_cpu: Any, clock: Clock
) -> None:
    """Each message wakes the server, and the client."""
    name = NAMES[:1]
    pack_on_cpu(step(0, name))
    sent, at, waited = [], {}, []
    for number in range(1, 1001):  # a second
        clock.now += clock.expected_step_s
        at[number] = clock.now
        sent.append(read(pack_on_cpu(step(number, name))).get("r0", []))
        waited += [clock.now - at[token] for token in sent[-1]]
    assert len([each for each in sent if each]) <= 150
    assert max(waited) < FRAME_S
    got = [token for each in sent for token in each]
    assert got == list(range(1, len(got) + 1))
    assert len(got) > 990  # the last ones wait for the next


def test_a_first_token_that_comes_soon_says_that_its_request_is_accepted(
    pack_on_cpu: Any, clock: Clock
) -> None:
    accepted = [Output(name, read=0) for name in NAMES[:2]]
    assert not pack_on_cpu(accepted).outputs
    clock.now += 0.002
    assert [each.read for each in pack_on_cpu(step(1, NAMES[:1])).outputs] == [None]
    clock.now += 0.004
    assert not pack_on_cpu([]).outputs
    clock.now += 0.001
    assert pack_on_cpu([]).outputs == (accepted[1],)


@pytest.mark.parametrize("step_s", [2 * FRAME_S, math.inf])
def test_an_accepted_request_whose_prompt_takes_longer_is_told_at_once(
    pack_on_cpu: Any, clock: Clock, step_s: float
) -> None:
    clock.expected_step_s = step_s
    accepted = [Output(name, read=0) for name in NAMES]
    assert pack_on_cpu(accepted).outputs == tuple(accepted)


@pytest.mark.parametrize("step_s", [0.004, 0.02, math.inf])
def test_longer_steps_are_sent_one_by_one_there(
    pack_on_cpu: Any, clock: Clock, step_s: float
) -> None:
    clock.expected_step_s = step_s
    for number in range(4):
        clock.now += min(step_s, 1.0)
        assert read(pack_on_cpu(step(number, NAMES[:8]))) == {name: [number] for name in NAMES[:8]}


@pytest.mark.parametrize(("rows", "step_s"), [(1, 0.001), (8, 0.02), (32, 0.02), (32, math.inf)])
def test_few_tokens_or_long_steps_do_not_wait(
    pack: Any, clock: Clock, rows: int, step_s: float
) -> None:
    clock.expected_step_s = step_s
    names = NAMES[:rows]
    for number in range(4):
        clock.now += min(step_s, 1.0)
        assert read(pack(step(number, names))) == {name: [number] for name in names}


def test_an_end_brings_what_waited_before_it(pack: Any, clock: Clock) -> None:
    pack(step(0))
    clock.now += 0.001
    assert not read(pack(step(1)))
    clock.now += 0.001
    ended = pack([*step(2, NAMES[1:]), *step(2, NAMES[:1], finish=FinishReason.STOP)])
    assert read(ended) == {"r0": [1, 2]}
    assert ended.outputs[0].finish == FinishReason.STOP
    clock.expected_step_s = math.inf
    assert read(pack(step(3, NAMES[1:]))) == {name: [1, 2, 3] for name in NAMES[1:]}


def test_tokens_with_logprobs_keep_their_order(pack: Any, clock: Clock) -> None:
    pack(step(0))
    clock.now += 0.001
    logprobs = (TokenLogprobs(1, -0.5),)
    got = pack([*step(1, NAMES[:1], logprobs=logprobs), *step(1, NAMES[1:])])
    assert read(got) == {"r0": [1]}


def test_more_streams_get_their_tokens_in_larger_pieces(pack: Any, clock: Clock) -> None:
    """The server's processor has to keep up with all messages."""
    names = [f"s{number}" for number in range(256)]
    clock.expected_step_s = 0.0125
    pack(step(0, names))
    messages, got = 0, []
    for number in range(1, 81):  # a second
        clock.now += clock.expected_step_s
        own = read(pack(step(number, names)))
        messages += len(own)
        got += own.get("s7", [])
    assert messages <= outbox._MESSAGES + len(names)
    assert got == list(range(1, len(got) + 1))
    assert len(got) > 76


def test_an_answer_that_nobody_streams_is_one_output(clock: Clock) -> None:
    box = Outbox()
    box.expect([Request("whole", (1, 2), hold=4), Request("streamed", (1, 2))])
    pack, names = packing(box, clock), ["whole", "streamed"]
    clock.expected_step_s = 1.0  # so that nothing else lets tokens wait
    sent = [pack([Output(name, read=0) for name in names])]
    sent += [pack(step(number, names)) for number in range(6)]
    sent.append(pack([*step(6, names, finish=FinishReason.STOP, prompt_tokens=2)]))
    assert [read(each).get("streamed") for each in sent] == [[], *([n] for n in range(7))]
    whole = [each for message in sent for each in message.outputs if each.request_id == "whole"]
    assert whole == [
        Output("whole", (0, 1, 2, 3)),
        Output("whole", (4, 5, 6), finish=FinishReason.STOP, prompt_tokens=2),
    ]
    assert not any(tokens[0] == "whole" for message in sent for tokens in message.tokens)
    assert read(pack(step(7, ["whole"]))) == {"whole": [7]}, "its name is forgotten"


def test_log_probabilities_wait_with_their_tokens(clock: Clock) -> None:
    box = Outbox()
    box.expect([Request("whole", (1, 2), hold=256)])
    entries = [TokenLogprobs(number, -0.5) for number in range(3)]
    for entry in entries[:2]:
        assert not any(box.pack([Output("whole", (entry.token_id,), (entry,))], 1.0))
    end = Output("whole", (2,), (entries[2],), finish=FinishReason.LENGTH)
    (output,), _ = box.pack([end], 1.0)
    assert (output.token_ids, output.logprobs) == ((0, 1, 2), tuple(entries))


class FewSteps(Clock):
    """An engine with work for so many steps, each slow enough that no token waits. The other end
    hangs up after the last.
    """

    expected_step_s = 0.05

    def __init__(self, steps: int, other: socket.socket) -> None:
        self.left, self.other = steps, other

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def step(self) -> list[Output]:
        self.left -= 1
        if self.left == 0:
            self.other.shutdown(socket.SHUT_WR)
        return step(self.left)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_a_step_is_one_frame_whatever_its_streams() -> None:
    ours, theirs = socket.socketpair()
    engine = FewSteps(5, theirs)
    assert worker._Worker(ours, Frames(ours), cast(Engine, engine), Outbox()).run() == 0
    frames = Frames(theirs).read()
    assert frames is not None
    assert [len(read(frame)) for frame in frames] == [len(NAMES)] * 5
