"""Tests of how drafters are asked, and of how many drafts a step gets from them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from quire.core.kv_format import KVFormat
from quire.core.request import Request
from quire.scheduler.draft_lengths import Candidate, EveryDraft, WorthwhileDrafts
from quire.scheduler.drafting import Drafting
from quire.scheduler.drafts import NO_DRAFT, Draft, DraftQuery, Foreseen, LookupDrafter
from quire.scheduler.sequence import Sequence, SequenceParts
from quire.speculation.heads import HeadDrafter


class _Zeros(LookupDrafter):
    """Drafts as many zeros as it is asked for, and notes how many that were."""

    name = "zeros"
    looks_ahead = True

    def __init__(self) -> None:
        self.limits: list[int] = []

    def propose(self, queries: Seq[DraftQuery]) -> Seq[Draft | None]:
        self.limits = [each.limit for each in queries]
        return super().propose(queries)

    def draft(self, query: DraftQuery) -> Draft:
        return Draft((0,) * query.limit, self.name)


def _drafted(sequences: int, room: int) -> tuple[_Zeros, list[int]]:
    drafter = _Zeros()
    drafting = Drafting((drafter,), EveryDraft(), 100)
    parts = SequenceParts(drafters=frozenset({drafter.name}))
    limits = [
        (Sequence(Request(str(each), (1, 2)), KVFormat(), b"", each, parts), 50)
        for each in range(sequences)
    ]
    drafts = drafting.drafts(limits, sequences, room)
    return drafter, [len(each.tokens) for each in drafts.values()]


def test_drafts_of_all_sequences_share_the_rows_that_a_step_has_left() -> None:
    assert sum(_drafted(sequences=4, room=1000)[1]) > 4 * 8
    assert sum(_drafted(sequences=4, room=21)[1]) == 21
    assert _drafted(sequences=4, room=0)[1] == []


def test_many_sequences_are_asked_for_no_more_tokens_than_are_considered() -> None:
    assert _drafted(sequences=1, room=1000)[0].limits == [17]
    assert set(_drafted(sequences=256, room=1000)[0].limits) == {2}


def test_a_head_that_would_guess_in_vain_is_seldom_considered() -> None:
    """Considering takes time of the host, as asking does."""
    considered, now = 0, 0.0

    class Dear(WorthwhileDrafts):
        def choose(self, candidates: Seq[Candidate], *args: Any, **named: Any) -> list[int]:
            nonlocal considered, now
            considered, now = considered + 1, now + 0.2
            return [0] * len(candidates)

    drafter = HeadDrafter()
    lengths = Dear(lambda first, last: None)
    drafting = Drafting((drafter,), lengths, 100, clock=lambda: now, head=drafter)
    parts = SequenceParts(drafters=frozenset({drafter.name}))
    sequence, later = (
        Sequence(Request(str(number), (1, 2)), KVFormat(), b"", number, parts) for number in (0, 1)
    )
    for _ in range(100):
        assert not drafting.wants_tokens([sequence])
        assert drafting.worth_guessing([sequence]) == 0
        now += 1.0
    assert considered < 10
    before = considered
    drafting.begin(later)
    assert not drafting.wants_tokens([sequence, later])
    assert drafting.worth_guessing([sequence, later]) == 0
    assert considered == before + 1, "another sequence begins to generate"
    assert not drafting.wants_tokens([sequence, later])
    assert drafting.worth_guessing([sequence, later]) == 0
    assert considered == before + 1


def test_later_sequences_try_a_head_that_was_wrong_before() -> None:
    """Each sequence is short: no rate of its own could rise far enough."""

    class Likely(WorthwhileDrafts):
        def choose(self, candidates: Seq[Candidate], *args: Any, **named: Any) -> list[int]:
            return [int(each.rate > 0.5) for each in candidates]

        def steps_to_skip(self, asking_s: float, step_s: float) -> int:
            return 0

    drafter = HeadDrafter()
    drafting = Drafting((drafter,), Likely(lambda first, last: None), 100, head=drafter)
    parts = SequenceParts(drafters=frozenset({drafter.name}))

    def guesses(sequences: int, right: bool) -> int:
        guessed = 0
        for number in range(sequences):
            sequence = Sequence(Request(str(number), (1, 2)), KVFormat(), b"", number, parts)
            for _ in range(20):
                drafting.wants_tokens([sequence])
                count = drafting.worth_guessing([sequence])
                guessed += count
                if count:
                    guess = Foreseen(1, (2 if right else 3,), (drafter.name, 0))
                    drafting.observe(sequence, [guess], NO_DRAFT, accepted=0)
        return guessed

    assert 0 < guesses(100, right=False) < 2000 / 50
    assert guesses(100, right=True) > 2000 / 2
    assert 0 < guesses(100, right=False) < 2000 / 10


def test_drafts_that_would_make_a_step_wait_must_be_worth_the_wait() -> None:
    def step_s(first: int, last: int) -> list[float]:
        return [1e-3 + 1e-5 * rows for rows in range(first, last + 1)]

    lengths = WorthwhileDrafts(step_s)
    lengths.observe_wait(1e-3, 8, read=True)
    lengths.observe_wait(0.0, 8, read=False)
    good = [Candidate(0.7, 7)] * 8
    assert sum(lengths.choose(good, 8)) > 24, "more rows are better where steps wait anyway"
    assert sum(lengths.choose(good, 8, ahead=32)) == 24
    assert sum(lengths.choose([Candidate(0.99, 15)] * 8, 8, ahead=32)) > 24
