"""Requests are routed by cached prefixes, by sessions, and by load."""

from __future__ import annotations

from quire.core.block_keys import SHORT, BlockNames, chains, content_of
from quire.core.kv_format import KVFormat
from quire.core.request import Request
from quire.scale.routing import TRUST_S, PrefixTable, Route, short_keys

NAMES = BlockNames("weights", 4)
IDLE: dict[str, int] = {}


def route(*tokens: int, session: str = "") -> Route:
    return Route.of(Request("r", tokens, session=session), NAMES)


def joined(*tokens: int, salt: str = "") -> bytes:
    """Return what a replica reports that has cached this prompt."""
    keys = chains(NAMES.root(NAMES.format(None), salt), content_of(tokens, ()), NAMES.block_size)
    return b"".join(key[:SHORT] for key in keys)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def table(*names: str, clock: Clock | None = None) -> PrefixTable:
    made = PrefixTable(clock or Clock())
    made.keep(names)
    return made


LONG = tuple(range(40))


def test_a_routes_keys_are_those_that_engines_report() -> None:
    assert route(*LONG).blocks == joined(*LONG)
    assert short_keys(route(*LONG[:11]).blocks) == short_keys(joined(*LONG))[:2]


def test_keys_differ_by_salt_and_format() -> None:
    plain = Request("r", LONG)
    others = [
        Request("r", LONG, cache_salt="other"),
        Request("r", LONG, kv_format=KVFormat("page", 4, 4)),
    ]
    for other in others:
        assert Route.of(other, NAMES).blocks != Route.of(plain, NAMES).blocks


def test_a_prompt_goes_where_its_start_is_cached() -> None:
    found = table("a", "b")
    found.report("b", joined(*LONG))
    for _ in range(10):
        assert found.ranked(route(*LONG, 1, 2, 3, 4), IDLE)[0] == "b"


def test_a_loaded_replica_loses_a_prompt() -> None:
    found = table("a", "b")
    found.report("b", joined(*LONG))
    assert found.ranked(route(*LONG), {"b": 4})[0] == "b"
    assert found.ranked(route(*LONG), {"b": 5})[0] == "a"
    assert found.ranked(route(*LONG), {"a": 1, "b": 5})[0] == "b"


def test_what_was_sent_counts_as_cached_for_a_while() -> None:
    clock = Clock()
    found = table("a", "b", clock=clock)
    first = found.ranked(route(*LONG), IDLE)[0]
    found.routed(route(*LONG), first)
    found.report(first, b"")  # the report was made before the prompt was read
    assert all(found.ranked(route(*LONG), IDLE)[0] == first for _ in range(10))
    clock.now = TRUST_S + 1
    assert {found.ranked(route(*LONG), IDLE)[0] for _ in range(50)} == {"a", "b"} - {first}


def test_a_session_sticks_to_its_replica_until_that_one_is_loaded_or_gone() -> None:
    found = table("a", "b")
    ask = route(*LONG, session="s")
    found.routed(ask, "a")
    other = route(*(90 + each for each in LONG), session="s")  # nothing of it is cached
    assert all(found.ranked(other, IDLE)[0] == "a" for _ in range(10))
    assert found.ranked(other, {"a": 50})[0] == "b"
    found.keep(["b", "c"])
    assert found.ranked(other, {"b": 1})[0] == "c"


def test_sessions_with_one_system_prompt_spread_over_the_replicas() -> None:
    found = table("a", "b")
    counts = {"a": 0, "b": 0}
    for number in range(16):
        ask = route(*LONG, 100 + number, 1, 2, 3, session=f"s{number}")
        name = found.ranked(ask, IDLE)[0]
        found.routed(ask, name)
        counts[name] += 1
    assert counts == {"a": 8, "b": 8}


def test_conversations_without_a_session_spread_and_stay() -> None:
    found = table("a", "b")
    places = []
    for number in range(8):
        ask = route(*(1000 * number + each for each in LONG))
        places.append(found.ranked(ask, IDLE)[0])
        found.routed(ask, places[-1])
    assert sorted(places) == ["a"] * 4 + ["b"] * 4
    for number, place in enumerate(places):
        grown = route(*(1000 * number + each for each in LONG), 1, 2, 3, 4, 5)
        assert found.ranked(grown, IDLE)[0] == place


def test_a_report_of_a_replica_that_has_lost_its_blocks_is_believed() -> None:
    found = table("a", "b")
    found.report("a", joined(*LONG))
    found.report("a", joined(*LONG[:4]))
    found.report("b", joined(*LONG[:32]))
    assert found.ranked(route(*LONG), IDLE)[0] == "b"
