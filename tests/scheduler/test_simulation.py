"""Random arrivals, lengths, cancels and memory pressure: nothing leaks, nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.request import FinishReason, Request
from tests.scheduler.simulation import GROUPS, PLAIN, SEALED, Simulation

prompts = st.tuples(
    st.integers(0, 2),  # which of a few common beginnings
    st.integers(0, 13),  # how much of it
    st.lists(st.integers(0, 3), max_size=14),  # what follows
)
arrivals = st.tuples(
    st.integers(0, 6),  # steps since the one before
    prompts,
    st.integers(1, 12),  # max_tokens
    st.sampled_from((PLAIN, PLAIN, SEALED)),
    st.one_of(st.none(), st.none(), st.integers(0, 15)),  # cancelled so many steps later
)


def beginning(which: int) -> list[int]:
    return [10 + which * 7 + i % 5 for i in range(13)]


@pytest.mark.parametrize("kind", GROUPS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(arrivals, min_size=1, max_size=12),
    room=st.integers(0, 120),
    chunk=st.integers(1, 20),
    rows=st.integers(1, 5),
)
def test_every_request_ends_once_and_no_page_is_lost(
    kind: str,
    requests: list[tuple[int, tuple[int, int, list[int]], int, object, int | None]],
    room: int,
    chunk: int,
    rows: int,
) -> None:
    groups = GROUPS[kind]
    probe = Simulation(groups, 1 << 20)
    least = max(probe.scheduler.limits.worst_case_bytes(format, 40) for format in (PLAIN, SEALED))
    simulation = Simulation(groups, least + room, rows, max(chunk, rows + 1), max_context=40)
    cancels: dict[int, list[str]] = {}
    now = 0
    accepted = []
    for number, (wait, (which, shared, rest), max_tokens, format, cancel) in enumerate(requests):
        for _ in range(wait):
            for name in cancels.pop(now, []):
                simulation.scheduler.abort(name)
            simulation.step()
            now += 1
        name = f"r{number}"
        prompt = (*beginning(which)[:shared], *rest)
        request = Request(name, prompt, max_tokens=max_tokens, snapshots=(shared,))
        if not prompt:
            with pytest.raises(RequestError):
                simulation.add(request)
            continue
        simulation.add(request, PLAIN if format is PLAIN else SEALED)
        accepted.append((name, len(prompt), max_tokens))
        if cancel is not None:
            cancels.setdefault(now + cancel, []).append(name)
    for names in cancels.values():
        for name in names:
            simulation.scheduler.abort(name)
    simulation.run()
    for name, length, max_tokens in accepted:
        end = simulation.ended[name]
        assert end.finish in (FinishReason.LENGTH, FinishReason.ABORT)
        if end.finish is FinishReason.LENGTH:
            wanted = min(max_tokens, 40 - length)
            tokens = simulation.answers[name]
            assert len(tokens) == wanted
            assert tokens == [simulation._token(name, length + i) for i in range(wanted)]
    simulation.check_nothing_leaks()
