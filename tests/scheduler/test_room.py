"""Requests that have just enough room finish; one that has too little fails and blocks nobody."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import RequestError
from quire.core.figures import size
from quire.core.kv_format import KVFormat
from quire.core.request import FinishReason, Request
from tests.scheduler.simulation import GROUPS, ONLY_RECURRENT, PLAIN, SEALED, Simulation

CONTEXT = 40
KINDS = GROUPS | {"only recurrent": ONLY_RECURRENT}
SKIPPING = tuple(KVFormat("page", 4, 4, skip_layers=layers) for layers in ((0,), (1,), (0, 1)))


@dataclass(frozen=True)
class Arrival:
    """A request: its prompt, how long the answer is, and how blocks are stored."""

    prompt: tuple[int, ...]
    max_tokens: int
    format: KVFormat


arrivals = st.builds(
    Arrival,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=CONTEXT - 10).map(tuple),
    max_tokens=st.integers(1, 9),
    format=st.sampled_from((PLAIN, SEALED, *SKIPPING)),
)


@settings(max_examples=60)
@given(kind=st.sampled_from(sorted(KINDS)), arrivals=st.lists(arrivals, min_size=1, max_size=5))
def test_each_request_finishes_within_its_exact_worst_case(
    kind: str, arrivals: list[Arrival]
) -> None:
    limits = Simulation(KINDS[kind], 1 << 20).scheduler.limits
    for exact in arrivals:
        length = len(exact.prompt) + exact.max_tokens
        budget = limits.worst_case_bytes(exact.format, length)
        simulation = Simulation(KINDS[kind], budget, max_context=CONTEXT)
        accepted = set()
        for number, each in enumerate(arrivals):
            request = Request(str(number), each.prompt, max_tokens=each.max_tokens)
            try:
                simulation.add(request, each.format)
            except RequestError:
                assert each != exact
            else:
                accepted.add(request.id)
        simulation.run()
        assert simulation.ended.keys() == accepted
        for name, output in simulation.ended.items():
            assert output.finish is FinishReason.LENGTH
            if arrivals[int(name)] == exact:
                assert len(simulation.answers[name]) == exact.max_tokens
        simulation.check_nothing_leaks()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [30, 3])
def test_a_request_that_can_never_run_fails_and_blocks_nobody(
    kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request's worst case is made to be underestimated."""
    limits = Simulation(KINDS[kind], 1 << 20).scheduler.limits
    least = limits.worst_case_bytes(PLAIN, 8)
    simulation = Simulation(KINDS[kind], least, max_context=CONTEXT)
    larger = KVFormat("page", 8, 8)
    worst = limits.worst_case_bytes(larger, length)
    monkeypatch.setattr(type(limits), "context", lambda *args: CONTEXT)
    simulation.add(Request("first", (1, 2), max_tokens=6))
    simulation.add(Request("never", (1,) * length, max_tokens=9), larger)
    simulation.add(Request("behind it", (1, 2), max_tokens=6))
    simulation.run()
    assert simulation.ended["first"].finish is FinishReason.LENGTH
    assert simulation.ended["behind it"].finish is FinishReason.LENGTH
    failed = simulation.ended["never"]
    if worst > least:
        assert failed.finish is FinishReason.ERROR
        assert failed.error is not None
        assert f"KV cache, {size(least)}, cannot hold this request" in failed.error.message
    simulation.check_nothing_leaks()
