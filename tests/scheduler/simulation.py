"""A device made of dictionaries: it carries out plans and checks that every row sees its own past.

A block's content is the list of tokens written into it, those of different images differing. So a
block that is leaked, shared wrongly, moved without its content or reused too early shows as a wrong
token.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256

import mlx.core as mx

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block, Change, PoolKey, Restore, Spill
from quire.cache.disk_prefetch import DiskPrefetch
from quire.cache.host_block import HostBlock
from quire.cache.specs import FullKV, KVGroup, RecurrentState, WindowKV, group_layers
from quire.core.kv_format import KVFormat
from quire.core.request import Output, Request
from quire.device.host_copy import HostCopy
from quire.executor.following import Kept, resolved
from quire.scheduler.admission import SchedulerConfig
from quire.scheduler.draft_lengths import EveryDraft
from quire.scheduler.drafting import Drafting
from quire.scheduler.drafts import Drafter
from quire.scheduler.plan import (
    GraphRows,
    SampledTokens,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.prefix_sharing import ReadAhead
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence, SequenceParts
from quire.speculation.heads import HeadDrafter
from tests.support.blocks import kept_blocks, live_blocks
from tests.support.scripted_disk import ScriptedDisk, as_host_block, from_host_block

BLOCK = 4
GROUPS: dict[str, tuple[KVGroup, ...]] = {
    "full": group_layers((FullKV(1, 1),)),
    "window": group_layers((WindowKV(1, 1, 6), FullKV(1, 2))),
    "images": group_layers((WindowKV(1, 1, 6, bidirectional_media=True), FullKV(1, 2))),
    "only windows": group_layers((WindowKV(1, 1, 5),)),
    "recurrent": group_layers((RecurrentState((("s", (1,), ""),)), FullKV(1, 1))),
}
ONLY_RECURRENT = group_layers((RecurrentState((("s", (1,), ""),)),))
PLAIN = KVFormat()
SEALED = KVFormat("page", 4, 4)

Place = tuple[PoolKey, int]
Tables = dict[tuple[int, int], list[Block | None]]
"""Block tables by sequence and group."""


def block_bytes(key: PoolKey) -> int:
    """Return a block's size: groups and formats differ in it, and layers kept plain have no
    tails.
    """
    if key.tail and key.group in key.format.skip_layers:
        return 0
    return 3 + 2 * key.group + 2 * key.tail + key.format.has_tail


@dataclass
class Simulation:
    """A scheduler, and a device that follows it one step behind.

    Attributes:
        held: what each block holds; tokens by offset, or a state's whole past.
    """

    groups: tuple[KVGroup, ...]
    budget: int
    max_sequences: int = 4
    chunk: int = 7
    max_context: int = 60
    held: dict[Place, dict[int, int]] = field(default_factory=dict)
    ended: dict[str, Output] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    time: float = 0.0
    disk: ScriptedDisk | None = None
    max_graph_rows: int = 0
    across_blocks: bool = False  # whether graphs read rows across blocks of formats with tails
    drafters: tuple[Drafter, ...] = ()
    head: HeadDrafter | None = None  # one of them
    dice: random.Random = field(default_factory=lambda: random.Random(7))
    followed: int = 0  # steps whose rows followed drafts or guesses that were not read

    def __post_init__(self) -> None:
        self._held: dict[bytes, HostBlock] = {}
        accepts = None if self.disk is None else self.disk.accepts
        self.manager = BlockManager(self.budget, block_bytes, accepts)
        self.scheduler = Scheduler(
            SchedulerConfig(BLOCK, self.max_sequences, self.max_context, snapshot_every=8),
            self.groups,
            self.manager,
            PrefillBudget(1.0, 2.0, self.chunk),
            lambda format, salt: sha256(f"{format}|{salt}".encode()).digest(),
            clock=lambda: self.time,
            graph_rows=lambda format, media: GraphRows(
                self.max_graph_rows, self.across_blocks or not format.has_tail
            ),
            drafting=Drafting(
                self.drafters, EveryDraft(), 1 << 20, head=self.head, most_following=1 << 20
            ),
            read_ahead=None if self.disk is None else self._reading_ahead(self.disk),
        )
        self._before: tuple[StepPlan, StepResult] | None = None
        self._steps = 0

    def _reading_ahead(self, disk: ScriptedDisk) -> ReadAhead:
        return partial(
            DiskPrefetch,
            manager=self.manager,
            tier=disk,
            matches_pool=lambda pool, page: True,
            hold_block=self._held.__setitem__,
            compute_seconds=lambda tokens: float(tokens),
            clock=lambda: self.time,
        )

    # -- driving -------------------------------------------------------------------------------

    def add(
        self, request: Request, format: KVFormat = PLAIN, parts: SequenceParts | None = None
    ) -> None:
        self.scheduler.add(request, format, parts)
        self.answers[request.id] = []

    def sequence(self, name: str) -> Sequence:
        """Return a request that has not ended."""
        return next(s for s in (*self.scheduler.running, *self.scheduler.waiting) if s.id == name)

    def step(self) -> None:
        """Step as `Engine.step` does: plan, launch, then read the step before, or read it first."""
        self.time += 0.01
        outputs: list[Output] = []
        scheduler = self.scheduler
        if self._before is not None and scheduler.drafting.wants_tokens(scheduler.running):
            self._read(*self._before)
            outputs = self.scheduler.take_outputs()
            self._before = None
        if self.disk is not None:
            self.disk.tick()
        before = {
            (sequence.number, group): list(table.blocks)
            for sequence in self.scheduler.running
            for group, table in enumerate(sequence.blocks.tables)
        }
        preemptions = self.scheduler.counters.preemptions
        plan = self.scheduler.schedule()
        if self.scheduler.counters.preemptions != preemptions:
            before = {}  # some have tables of their own again
        following = None
        if plan is not None:
            guess = scheduler.drafting.worth_guessing(scheduler.running)
            plan = replace(plan, guess=guess)
            following = plan, self._execute(self._resolved(plan), before)
        if self._before is None:
            outputs += self.scheduler.take_outputs()
        else:
            self._read(*self._before)
            outputs += self.scheduler.take_outputs()
        if plan is not None:
            self._check_masks(plan)
        self._before = following
        for output in outputs:
            assert output.request_id not in self.ended, "an output after the end"
            self.answers[output.request_id] += output.token_ids
            if output.finish is not None:
                self.ended[output.request_id] = output
        assert self.manager.capacity.claimed <= self.budget, "the budget is exceeded"

    def _read(self, plan: StepPlan, result: StepResult) -> None:
        self.scheduler.update(plan, result)
        if self.head is not None:
            self.head.take(result.guesses)

    def _resolved(self, plan: StepPlan) -> StepPlan:
        """Return a plan with the places and tokens of rows that follow the step before."""
        if not plan.follows:
            return plan
        assert self._before is not None, "rows follow a step"
        self.followed += 1
        result, tokens, lasts = self._before[1], list[int](), list[int]()
        for sampled in result.tokens.values():
            tokens += sampled.tokens
            lasts.append(len(tokens) - 1)
        places = {number: place for place, number in enumerate(result.tokens)}
        guesses = [result.guesses[number] for number in result.tokens] if result.guesses else None
        before = Kept(
            HostCopy(mx.array(tokens)),
            None if guesses is None else HostCopy(mx.array(guesses)),
            None,
            lasts=lasts,
            places=places,
        )
        return resolved(plan, before)

    def run(self, limit: int = 3000) -> None:
        """Steps until nothing is left to do; `limit` stands for starvation."""
        steps = 0
        while self.scheduler.has_work or self._before is not None:
            self.step()
            steps += 1
            assert steps < limit, "somebody starves"

    def check_nothing_leaks(self) -> None:
        """Assert that every block is free or cached at the end, and that cached ones can be
        evicted.
        """
        assert live_blocks(self.manager) == 0
        self.scheduler.sharing.index.clear()
        assert kept_blocks(self.manager) == 0

    # -- the device ----------------------------------------------------------------------------

    def _execute(self, plan: StepPlan, before: Tables) -> StepResult:
        self._execute_changes(plan.changes)
        contents = [dict(self.held.get((c.pool, c.source), {})) for c in plan.copies]
        for copy, content in zip(plan.copies, contents, strict=True):
            self.held[copy.pool, copy.target] = content
        written: dict[Place, str] = {}
        self._written: dict[tuple[str, int], dict[int, int]] = {}
        self._contents = {
            rows.number: self.scheduler._by_number[rows.number].progress.content
            for rows in plan.sequences
        }
        for rows in plan.sequences:
            self._write(rows, written)
        for rows in plan.sequences:
            self._check_sight(rows)
        self._check_nobody_else_reads(plan, before)
        sampled = {
            rows.number: SampledTokens(self._sample(rows))
            for rows in plan.sequences
            if rows.sampled
        }
        self._kept = {
            number: sum(token >= 0 for token in each.tokens) for number, each in sampled.items()
        }
        ends = {rows.number: rows for rows in plan.sequences if rows.sampled}
        return StepResult(sampled, guesses=self._guesses(ends, plan.guess))

    def _guesses(
        self, ends: dict[int, ScheduledSequence], count: int
    ) -> dict[int, tuple[int, ...]]:
        """Return guesses of the tokens behind each sequence's last kept one, some of them right."""
        found = {}
        for number, rows in ends.items() if count else ():
            first = rows.end - rows.sampled + 1 + self._kept[number]
            found[number] = tuple(
                self.token(rows.id, position) if self.dice.random() < 0.7 else 7
                for position in range(first, first + count)
            )
        return found

    def _sample(self, rows: ScheduledSequence) -> tuple[int, ...]:
        """Return one token for each sampled row; behind a wrong draft, one that must not be
        taken.
        """
        tokens = []
        right = True
        for position in range(rows.end - rows.sampled + 1, rows.end + 1):
            tokens.append(self.token(rows.id, position) if right else -1)
            following = position - rows.start
            if following < len(rows.tokens):
                right = right and rows.tokens[following] == tokens[-1]
        return tuple(tokens)

    def _check_masks(self, plan: StepPlan) -> None:
        """Assert that a `Counting` constraint allowed only the number of tokens before."""
        masks = self.scheduler.masks(plan)
        for rows in plan.sequences:
            sequence = self.scheduler._by_number.get(rows.number)
            if sequence is None:
                assert rows.number not in masks, "one that has ended needs no mask"
            elif sequence.constraint is not None and rows.sampled:
                own = [masks[rows.number]] if rows.awaits_mask else [r.mask for r in rows.sampling]
                first = rows.end - rows.sampled + 1 - sequence.progress.prompt_length
                for number, mask in enumerate(own):
                    assert mask is not None
                    assert mask[0] == first + number, "the mask is another"

    def _execute_changes(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if isinstance(change, Spill | Restore):
                self._to_or_from_disk(change)
                continue
            moved = {(change.pool, b): self.held.get((change.pool, a)) for a, b in change.moves}
            for place, content in moved.items():
                self.held[place] = dict(content or {})
            for place in [p for p in self.held if p[0] == change.pool]:
                if place[1] >= change.capacity:
                    del self.held[place]

    def _to_or_from_disk(self, change: Spill | Restore) -> None:
        assert self.disk is not None
        if isinstance(change, Restore):
            self.held[change.pool, change.id] = from_host_block(self._held[change.name])
            return
        content = self.held[change.pool, change.id]
        recurrent = isinstance(self.groups[change.pool.group].spec, RecurrentState)
        assert recurrent or len(content) == BLOCK, "a block goes to disk that is not full"
        self.disk.spill(change.name, as_host_block(content))

    def token(self, name: str, position: int) -> int:
        """Return what the 'model' draws for a position: fixed, so that resuming must repeat it."""
        return hash((name, position)) % 50 + 100

    def _truth(self, rows: ScheduledSequence, position: int) -> int:
        """Return a sequence's own token, as it was known when the step was planned, or a draft."""
        if rows.sampled > 1 and position > rows.end - rows.sampled:
            return rows.tokens[position - rows.start]
        content = self._contents[rows.number]
        if position < len(content):
            return content[position]
        return self.token(rows.id, position)

    def _write(self, rows: ScheduledSequence, written: dict[Place, str]) -> None:
        for group in self.groups:
            key = PoolKey(group.index, rows.format)
            table = rows.block_ids(group.index)
            if group.spec.recurrent is not None:
                self._advance_state(rows, key, table[0])
                continue
            if rows.format.has_tail:
                self._write_tail(rows, key)
                continue
            for position in range(rows.start, rows.end):
                place = key, table[position // BLOCK]
                assert written.setdefault(place, rows.id) == rows.id, "two write one block"
                content = self.held.setdefault(place, {})
                if position % BLOCK == 0:
                    content.clear()
                content[position % BLOCK] = self._truth(rows, position)

    def _write_tail(self, rows: ScheduledSequence, key: PoolKey) -> None:
        """Rows see their own blocks as written (`_written`); full ones go to the table as codes."""
        tail = rows.tail_block(key.group)
        assert tail is not None
        place = PoolKey(key.group, rows.format, tail=True), tail
        first = rows.start // BLOCK * BLOCK
        block = {}
        if rows.start % BLOCK:
            kept = {first + i: t for i, t in self.held[place].items()}
            block = {p: t for p, t in kept.items() if p < rows.start}
        block |= {p: self._truth(rows, p) for p in range(rows.start, rows.end)}
        self._written[rows.id, key.group] = block
        for start in range(first, rows.end, BLOCK):
            content = {p - start: t for p, t in block.items() if start <= p < start + BLOCK}
            self.held[place] = content
            if start + BLOCK <= rows.end:
                self.held[key, rows.block_ids(key.group)[start // BLOCK]] = content

    def _advance_state(self, rows: ScheduledSequence, key: PoolKey, slot: int) -> None:
        state = {} if rows.start == 0 else dict(self.held[key, slot])
        past = {p: self._truth(rows, p) for p in range(rows.start)}
        assert state == past, f"{rows.id}: the state is not that of {rows.start} tokens"
        for position in range(rows.start, rows.end):
            state[position] = self._truth(rows, position)
        slots = [s for group, s in rows.drafted_states if group == key.group] or [slot]
        slots += [s for group, s in rows.snapshots if group == key.group]
        for target in slots:
            self.held[key, target] = dict(state)

    def _check_nobody_else_reads(self, plan: StepPlan, before: Tables) -> None:
        """Blocks that were written belong to one sequence, and rows look at none that is gone."""
        for rows in plan.sequences:
            sequence = self.scheduler._by_number[rows.number]
            for group in self.groups:
                spec = group.spec.attention
                if spec is None:
                    continue
                table = sequence.blocks.table(group.index)
                for number in range(rows.start // BLOCK, (rows.end - 1) // BLOCK + 1):
                    block = table[number]
                    assert block is None or block.refs == 1, "a block that others read is written"
                first = spec.first_visible(rows.start) // BLOCK
                held = before.get((rows.number, group.index), [])[first:]
                assert None not in held, "a visible key's block left the window"

    def _check_sight(self, rows: ScheduledSequence) -> None:
        """Each key that a row may see is there and is the sequence's own token."""
        for group in self.groups:
            spec = group.spec.attention
            if spec is None:
                continue
            for row in range(rows.start, rows.end):
                for key in range(spec.first_visible(row), last_visible(group, rows, row) + 1):
                    assert self._seen(rows, group, key) == self._truth(rows, key)

    def _seen(self, rows: ScheduledSequence, group: KVGroup, key: int) -> int:
        if rows.format.has_tail and key >= rows.start // BLOCK * BLOCK:
            return self._written[rows.id, group.index][key]
        block = rows.block_ids(group.index)[key // BLOCK]
        return self.held[PoolKey(group.index, rows.format), block][key % BLOCK]


def last_visible(group: KVGroup, rows: ScheduledSequence, row: int) -> int:
    """Return the row's own key, or the last of its image where its rows see each other."""
    if group.spec.bidirectional_media:
        for start, end in rows.bidirectional:
            if start <= row < end:
                assert end <= rows.end, "a chunk ends within an image"
                return end - 1
    return row
