"""Random arrivals, lengths, cancels and memory pressure: nothing leaks, nobody starves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.constraints.masks import TokenMask
from quire.core.errors import RequestError
from quire.core.kv_format import KVFormat
from quire.core.media import MediaItem, PlacedMedia
from quire.core.request import FinishReason, Request
from quire.scheduler.drafts import Draft, DraftQuery, LookupDrafter
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.sequence import SequenceParts
from quire.speculation.heads import HeadDrafter
from tests.scheduler.simulation import BLOCK, GROUPS, PLAIN, SEALED, Simulation, Tables
from tests.support.scripted_disk import ScriptedDisk

CONTEXT = 40
FORMATS = (PLAIN, SEALED, KVFormat("uniform", 8, 8), KVFormat("page", 8, 8))


@dataclass(frozen=True)
class Arrival:
    """A request of a random run.

    Attributes:
        wait: steps since the one before.
        again: goes on from so many tokens of an earlier prompt, by number; None starts anew.
        cancel: aborted so many steps later.
        guided: may say only after each token what the next may be.
        images: tokens to leave out before each image, its length, and what it shows.
        drafts: seed of what guesses its tokens, now right, now wrong; None guesses nothing.
    """

    wait: int
    again: tuple[int, int] | None
    rest: list[int]
    max_tokens: int
    format: KVFormat
    cancel: int | None
    deadline: float | None
    salt: str
    guided: bool
    images: list[tuple[int, int, bytes]]
    drafts: int | None
    caller: str
    priority: int


arrivals = st.builds(
    Arrival,
    wait=st.integers(0, 6),
    again=st.one_of(st.none(), st.tuples(st.integers(0, 12), st.integers(1, CONTEXT))),
    rest=st.lists(st.integers(0, 3), max_size=38),
    max_tokens=st.integers(1, CONTEXT),
    format=st.sampled_from(FORMATS),
    cancel=st.one_of(st.none(), st.none(), st.integers(0, 15)),
    deadline=st.sampled_from((None, None, None, 0.05)),
    salt=st.sampled_from(("", "", "a")),
    guided=st.booleans(),
    images=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 11), st.sampled_from((b"cat", b"dog"))),
        max_size=3,
    ),
    drafts=st.one_of(st.none(), st.integers(0, 99)),
    caller=st.sampled_from(("", "", "other")),
    priority=st.sampled_from((0, 0, 1, -1)),
)


class Counting:
    """A token constraint whose mask says how many tokens it has seen."""

    def __init__(self) -> None:
        self._seen = 0

    def mask(self) -> TokenMask:
        return np.array([self._seen], dtype=np.uint32)

    def accept(self, token: int) -> None:
        self._seen += 1

    def follow(self, drafts: Sequence[int]) -> list[TokenMask | None]:
        """Allows no drafts of 7."""
        allowed = list(takewhile(lambda token: token != 7, drafts))
        return [np.array([self._seen + n], dtype=np.uint32) for n in range(1, len(allowed) + 1)]


class Guessing(LookupDrafter):
    """A drafter whose guesses are right as long as its dice say so, by the ids of requests."""

    name = "guessing"

    def __init__(self, most: int = 30, *, looks_ahead: bool = False) -> None:
        self.looks_ahead = looks_ahead
        self.simulation: Simulation | None = None
        self._most = most
        self.dice: dict[str, random.Random] = {}
        self.right = self.wrong = 0

    def draft(self, query: DraftQuery) -> Draft | None:
        name, known = query.request.id, len(query.tokens)
        assert self.simulation is not None
        dice = self.dice[name]
        drafts = []
        for position in range(known, known + dice.randint(0, min(query.limit, self._most))):
            right = dice.random() < 0.7
            drafts.append(self.simulation.token(name, position) if right else 7)
            self.right += right
            self.wrong += not right
        return Draft(tuple(drafts), self.name)


def drafted(guessing: Guessing, *args: Any, **named: Any) -> Simulation:
    """Return a simulation whose requests may be drafted."""
    named.setdefault("drafters", (guessing,))
    guessing.simulation = Simulation(*args, **named)
    return guessing.simulation


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...] = ()
    images: tuple[PlacedMedia, ...] = ()

    def until(self, length: int) -> Prompt:
        """Return the tokens before a cut; an image's marks in them are tokens like others."""
        images = tuple(placed for placed in self.images if placed.end <= length)
        return Prompt(self.tokens[:length], images)


MARK = 4


def prompt_of(arrival: Arrival, earlier: list[Prompt]) -> Prompt:
    beginning = Prompt()
    if arrival.again is not None and earlier:
        number, length = arrival.again
        beginning = earlier[number % len(earlier)].until(length)
    tokens, images = list(beginning.tokens), list(beginning.images)
    rest = iter(arrival.rest)
    for gap, length, shown in arrival.images:
        tokens += islice(rest, gap)
        images.append(PlacedMedia(len(tokens), MediaItem("image", b"", (1, length), length, shown)))
        tokens += [MARK] * length
    return Prompt((*tokens, *rest), tuple(images)).until(CONTEXT - 1)


def least_budget(kind: str) -> int:
    """Return what the most wasteful format needs for one sequence."""
    limits = Simulation(GROUPS[kind], 1 << 20).scheduler.limits
    return max(limits.worst_case_bytes(format, CONTEXT, 11) for format in FORMATS)


def submit(
    simulation: Simulation, arrivals: list[Arrival], guessing: Guessing
) -> dict[str, Arrival]:
    """Lets requests arrive and be cancelled in time; those that were accepted, by id."""
    cancels: dict[int, list[str]] = {}
    now = 0
    accepted: dict[str, Arrival] = {}
    prompts: list[Prompt] = []
    for number, arrival in enumerate(arrivals):
        for _ in range(arrival.wait):
            for name in cancels.pop(now, []):
                simulation.scheduler.abort(name)
            simulation.step()
            now += 1
        name, prompt = f"r{number}", prompt_of(arrival, prompts)
        request = Request(
            name,
            prompt.tokens,
            media=prompt.images,
            max_tokens=arrival.max_tokens,
            snapshots=(len(prompt.tokens) // 2,),
            cache_salt=arrival.salt,
            deadline_s=arrival.deadline,
            caller=arrival.caller,
            priority=arrival.priority,
        )
        if not prompt.tokens:
            with pytest.raises(RequestError):
                simulation.add(request)
            continue
        prompts.append(prompt)
        guide = Counting() if arrival.guided else None
        parts = SequenceParts(constraint=guide)
        if arrival.drafts is not None:
            guessing.dice[name] = random.Random(arrival.drafts)
            parts = replace(parts, drafters=frozenset({guessing.name}))
        simulation.add(request, arrival.format, parts)
        accepted[name] = arrival
        if arrival.cancel is not None:
            cancels.setdefault(now + arrival.cancel, []).append(name)
    for names in cancels.values():
        for name in names:
            simulation.scheduler.abort(name)
    return accepted


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("kind", GROUPS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(arrivals, min_size=1, max_size=12),
    room=st.integers(0, 120),
    chunk=st.integers(1, 20),
    rows=st.integers(1, 5),
    guesser=st.sampled_from(("reads first", "looks ahead", "head")),
)
def test_every_request_ends_once_and_no_block_is_lost(
    kind: str, disk: bool, requests: list[Arrival], room: int, chunk: int, rows: int, guesser: str
) -> None:
    guessing = Guessing(0 if guesser == "head" else 30, looks_ahead=guesser == "looks ahead")
    head = HeadDrafter(name=guessing.name) if guesser == "head" else None
    simulation = drafted(
        guessing,
        GROUPS[kind],
        least_budget(kind) + room,
        rows,
        max(chunk, rows + 1),
        max_context=CONTEXT,
        disk=ScriptedDisk(room, loses=0.1, hangs=0.05) if disk else None,
        drafters=(guessing,) if head is None else (head,),
        head=head,
    )
    accepted = submit(simulation, requests, guessing)
    simulation.run()
    for name, arrival in accepted.items():
        end = simulation.ended[name]
        if end.finish is FinishReason.ERROR:
            assert end.error is not None
            assert end.error.type == "timeout_error"
            assert arrival.deadline is not None
        elif end.finish is FinishReason.ABORT:
            assert arrival.cancel is not None
        else:
            assert end.finish is FinishReason.LENGTH
            wanted = min(arrival.max_tokens, CONTEXT - end.prompt_tokens)
            places = range(end.prompt_tokens, end.prompt_tokens + wanted)
            assert simulation.answers[name] == [simulation.token(name, p) for p in places]
    simulation.check_nothing_leaks()


@pytest.mark.parametrize("format", [PLAIN, SEALED], ids=["plain", "tail"])
@pytest.mark.parametrize("kind", GROUPS)
def test_drafts_save_steps_and_change_nothing(kind: str, format: KVFormat) -> None:
    steps = []
    for drafting in (False, True):
        guessing = Guessing()
        guessing.dice["r"] = random.Random(5)
        simulation = drafted(guessing, GROUPS[kind], 4000, chunk=20, max_context=200)
        parts = SequenceParts(drafters=frozenset({guessing.name} if drafting else ()))
        simulation.add(Request("r", (1, 2, 3, 4, 5), max_tokens=150), format, parts)
        simulation.run()
        assert simulation.answers["r"] == [simulation.token("r", p) for p in range(5, 155)]
        assert (guessing.right > 10 and guessing.wrong > 5) is drafting
        steps.append(simulation.scheduler.counters.steps)
    assert steps[1] < 0.9 * steps[0]


@pytest.mark.parametrize("kind", ["full", "window", "images", "only windows"])
def test_steps_follow_drafts_of_a_head_that_are_not_read(kind: str) -> None:
    """As many tokens a step as if they were read first, and none is waited for."""
    head = HeadDrafter()
    simulation = Simulation(
        GROUPS[kind], 4000, chunk=20, max_context=200, drafters=(head,), head=head
    )
    parts = SequenceParts(drafters=frozenset({head.name}))
    for number in range(3):
        simulation.add(Request(f"r{number}", (number, 2, 3, 4, 5), max_tokens=150), parts=parts)
    simulation.run()
    for name, answer in simulation.answers.items():
        assert answer == [simulation.token(name, p) for p in range(5, 155)]
    steps = simulation.scheduler.counters.steps
    assert steps < 90
    assert simulation.followed > 0.8 * steps


@pytest.mark.parametrize("kind", ["full", "window", "images", "only windows"])
def test_steps_follow_drafts_that_were_expected_behind_tokens_not_read(kind: str) -> None:
    guessing = Guessing(5, looks_ahead=True)
    simulation = drafted(guessing, GROUPS[kind], 4000, chunk=20, max_context=200)
    parts = SequenceParts(drafters=frozenset({guessing.name}))
    for number in range(3):
        guessing.dice[f"r{number}"] = random.Random(number)
        simulation.add(Request(f"r{number}", (number, 2, 3, 4, 5), max_tokens=150), parts=parts)
    simulation.run()
    for name, answer in simulation.answers.items():
        assert answer == [simulation.token(name, p) for p in range(5, 155)]
    drafting, steps = simulation.scheduler.drafting, simulation.scheduler.counters.steps
    assert steps < 130
    assert simulation.followed > 0.8 * steps
    assert drafting.accepted["guessing"] > 0.5 * drafting.drafted["guessing"]


@pytest.mark.parametrize("place", range(20, 24))
def test_an_answer_that_ends_while_its_next_step_runs_is_reused(place: int) -> None:
    head = HeadDrafter()
    simulation = Simulation(
        GROUPS["full"], 4000, chunk=20, max_context=200, drafters=(head,), head=head
    )
    parts = SequenceParts(drafters=frozenset({head.name}))
    prompt, end = (1, 2, 3, 4, 5), frozenset({simulation.token("first", place)})
    simulation.add(Request("first", prompt, max_tokens=150, stop_token_ids=end), parts=parts)
    simulation.run()
    longer = (*prompt, *simulation.answers["first"], 9, 9)
    simulation.add(Request("second", longer, max_tokens=2), parts=parts)
    simulation.run()
    assert simulation.ended["second"].cached_tokens >= len(longer) - 3


@pytest.mark.parametrize("most", [0, 3], ids=["without drafts", "with drafts"])
def test_a_sequence_with_a_drafter_sits_no_step_out(most: int) -> None:
    """Nor does its neighbour, whether the drafter finds drafts or not."""
    guessing = Guessing(most)
    guessing.dice["drafted"] = random.Random(1)
    simulation = drafted(guessing, GROUPS["full"], 4000)
    parts = SequenceParts(drafters=frozenset({guessing.name}))
    simulation.add(Request("drafted", (1, 2, 3), max_tokens=30), parts=parts)
    simulation.add(Request("plain", (1, 2, 3, 4), max_tokens=30))
    simulation.run()
    assert len(simulation.answers["drafted"]) == len(simulation.answers["plain"]) == 30
    assert simulation.scheduler.counters.steps <= 31
    assert (guessing.right > 0) is (most > 0)


def test_short_prompts_beside_streams_are_read_in_steps_that_can_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[tuple[int, int, bool]] = []  # rows that generate, rows that read, recorded
    charge = PrefillBudget.charge

    def charges(
        self: PrefillBudget, decode_rows: int, prompts: int, chunks: int, **named: int
    ) -> None:
        steps.append((decode_rows, named["prompt_rows"], bool(named["graphed"])))
        charge(self, decode_rows, prompts, chunks, **named)

    monkeypatch.setattr(PrefillBudget, "charge", charges)
    simulation = Simulation(GROUPS["full"], 1 << 20, chunk=100, max_context=200, max_graph_rows=16)
    for name in "ab":
        simulation.add(Request(name, (1, 2, 3), max_tokens=60))
    while any(simulation.answers[name] == [] for name in "ab"):
        simulation.step()
    steps.clear()
    simulation.add(Request("short", tuple(range(50)), max_tokens=1))
    while "short" not in simulation.ended:
        simulation.step()
    assert [rows for _, rows, _ in steps if rows] == [14, 14, 14, 8]
    assert all(recorded for *_, recorded in steps)
    assert all(generating == 2 for generating, *_ in steps)
    steps.clear()
    simulation.add(Request("long", tuple(range(100, 180)), max_tokens=1))
    simulation.run()
    first = next(step for step in steps if step[1])
    assert first[1] > 16
    assert not first[2]


def test_recorded_rows_of_a_sequence_lie_in_one_block_where_it_has_a_tail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Full blocks become codes when the step ends, and rows of the next step read the codes."""
    spans: list[tuple[str, int, int]] = []
    recorded: list[bool] = []
    charge, execute = PrefillBudget.charge, Simulation._execute

    def charges(self: PrefillBudget, *counts: int, **named: int) -> None:
        recorded.append(bool(named["graphed"]))
        charge(self, *counts, **named)

    def executes(self: Simulation, plan: StepPlan, before: Tables) -> StepResult:
        spans.extend((rows.id, rows.start, rows.count) for rows in plan.sequences)
        return execute(self, plan, before)

    monkeypatch.setattr(PrefillBudget, "charge", charges)
    monkeypatch.setattr(Simulation, "_execute", executes)
    simulation = Simulation(
        GROUPS["window"], 1 << 20, chunk=100, max_context=200, max_graph_rows=16
    )
    simulation.add(Request("stream", (1, 2, 3), max_tokens=60), SEALED)
    while not simulation.answers["stream"]:
        simulation.step()
    for name, length in (("a", 18), ("b", 20)):
        simulation.add(
            Request(name, tuple(range(ord(name), ord(name) + length)), max_tokens=1), SEALED
        )
    spans.clear()
    recorded.clear()
    while len(simulation.ended) < 2:
        simulation.step()
    assert all(recorded)
    assert [span for span in spans if span[0] == "a"] == [
        ("a", start, min(BLOCK, 18 - start)) for start in range(0, 18, BLOCK)
    ]
    # What one leaves the other may take.
    assert [span for span in spans if span[0] == "b"] == [
        ("b", start, BLOCK) for start in range(0, 20, BLOCK)
    ]
    assert len(recorded) < 10
    simulation.run()


def test_recorded_rows_cross_blocks_where_graphs_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    execute = Simulation._execute

    def executes(self: Simulation, plan: StepPlan, before: Tables) -> StepResult:
        counts.extend(rows.count for rows in plan.sequences)
        return execute(self, plan, before)

    monkeypatch.setattr(Simulation, "_execute", executes)
    simulation = Simulation(
        GROUPS["window"],
        1 << 20,
        chunk=100,
        max_context=200,
        max_graph_rows=64,
        across_blocks=True,
    )
    simulation.add(Request("prompt", tuple(range(50)), max_tokens=1), SEALED)
    simulation.run()
    assert max(counts) > BLOCK


@pytest.mark.parametrize("kind", ["full", "window", "recurrent"])
@pytest.mark.parametrize("format", [PLAIN, SEALED])
def test_chunks_end_with_a_block_where_there_is_a_tail(
    kind: str, format: KVFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []
    execute = Simulation._execute

    def executes(self: Simulation, plan: StepPlan, before: Tables) -> StepResult:
        ends.extend(rows.end for rows in plan.sequences)
        return execute(self, plan, before)

    monkeypatch.setattr(Simulation, "_execute", executes)
    simulation = Simulation(GROUPS[kind], 1 << 20, chunk=7)
    simulation.add(Request("reads", tuple(range(30)), max_tokens=1), format)
    simulation.run()
    assert ends[-1] == 30
    assert all(end % BLOCK == 0 for end in ends[:-1]) == format.has_tail
    # Chunks of less than a block go on as they are.
    simulation = Simulation(GROUPS[kind], 1 << 20, chunk=3)
    ends.clear()
    simulation.add(Request("reads", tuple(range(30)), max_tokens=1), format)
    simulation.run()
    assert ends[-1] == 30


@pytest.mark.parametrize("kind", ["full", "window", "recurrent"])
def test_a_prompt_that_needs_all_memory_gives_up_what_it_would_have_copied(kind: str) -> None:
    """The block to copy from and its copy would be more than the budget, for ever."""
    groups = GROUPS[kind]
    limits = Simulation(groups, 1 << 20).scheduler.limits
    simulation = Simulation(groups, limits.worst_case_bytes(PLAIN, CONTEXT), max_context=CONTEXT)
    simulation.add(Request("before", (1, 2, 3, 1, 2, 3), max_tokens=30, snapshots=(2,)))
    simulation.run()
    simulation.add(Request("long", (1, 2, *[3] * 37), max_tokens=9))
    simulation.add(Request("behind it", (2,), max_tokens=9))
    simulation.run()
    assert simulation.ended["long"].finish is FinishReason.LENGTH
    assert simulation.ended["behind it"].finish is FinishReason.LENGTH


def test_an_answer_ends_where_its_own_format_fills_the_budget() -> None:
    limits = Simulation(GROUPS["full"], 1 << 20).scheduler.limits
    budget = limits.worst_case_bytes(PLAIN, CONTEXT)
    simulation = Simulation(GROUPS["full"], budget, max_context=CONTEXT)
    context = simulation.scheduler.limits.context(SEALED)
    assert 0 < context < CONTEXT
    simulation.add(Request("coded", (1, 2, 3), max_tokens=99), SEALED)
    simulation.add(Request("plain", (1, 2, 3), max_tokens=99), PLAIN)
    simulation.run()
    assert simulation.ended["coded"].finish is FinishReason.LENGTH
    assert len(simulation.answers["coded"]) == context - 3
    assert len(simulation.answers["plain"]) == CONTEXT - 3


def test_outputs_say_how_long_the_request_waited() -> None:
    simulation = Simulation(GROUPS["full"], 1 << 20, max_sequences=1)
    for name in ("first", "second"):
        simulation.add(Request(name, (1, 2, 3), max_tokens=8))
    simulation.run()
    first, second = (simulation.ended[name].queued_s for name in ("first", "second"))
    assert first == pytest.approx(0.01)  # a step of the simulation
    assert second is not None
    assert second >= 8 * 0.01


def test_a_prompt_that_could_never_fit_is_refused_with_both_numbers() -> None:
    simulation = Simulation(GROUPS["full"], 30, max_context=CONTEXT)
    with pytest.raises(RequestError, match=r"length is 24 tokens.* 38 tokens.* 30 B"):
        simulation.add(Request("coded", (1,) * 38), SEALED)
    with pytest.raises(RequestError, match="maximum context length is 40 tokens"):
        simulation.add(Request("long", (1,) * 40))


def test_after_hundreds_of_prompts_the_first_one_is_served_as_before() -> None:
    simulation = Simulation(GROUPS["window"], 400, max_context=CONTEXT)
    prompts = [tuple(number >> bit & 1 for bit in range(12)) * 2 for number in range(250)]
    for number, prompt in enumerate(prompts):
        simulation.add(Request(f"r{number}", prompt, max_tokens=2))
        simulation.run()
    kept = len(simulation.held)
    simulation.add(Request("again", prompts[0], max_tokens=2))
    simulation.run()
    assert simulation.ended["again"].finish is FinishReason.LENGTH
    assert simulation.ended["again"].cached_tokens < len(prompts[0]) - 1  # most of it was evicted
    simulation.add(Request("once more", prompts[0], max_tokens=2))
    simulation.run()
    assert simulation.ended["once more"].cached_tokens == len(prompts[0]) - 1
    assert len(simulation.held) <= kept
    simulation.check_nothing_leaks()
