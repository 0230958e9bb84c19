"""A device made of dictionaries: it carries out plans and checks that every row sees its own past.

A page's content is the list of tokens written into it, those of different images differing. So a
page that is leaked, shared wrongly, moved without its content or reused too early shows as a wrong
token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.cache.block_manager import Block, BlockManager, Change, PoolKey, Restore, Spill
from quire.cache.disk_prefetch import DiskPrefetch
from quire.cache.specs import FullKV, KVGroup, RecurrentState, WindowKV, group_layers
from quire.core.kv_format import KVFormat
from quire.request import Output, Request
from quire.scheduler.plan import StepPlan, Work
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.scheduler import Drawn, Scheduler, SchedulerConfig
from quire.scheduler.sequence import Sequence
from tests.support.scripted_disk import ScriptedDisk, as_host_page, from_host_page

PAGE = 4
GROUPS: dict[str, tuple[KVGroup, ...]] = {
    "full": group_layers((FullKV(1, 1),)),
    "window": group_layers((WindowKV(1, 1, 6), FullKV(1, 2))),
    "images": group_layers((WindowKV(1, 1, 6, sees_whole_images=True), FullKV(1, 2))),
    "only windows": group_layers((WindowKV(1, 1, 5),)),
    "recurrent": group_layers((RecurrentState((("s", (1,), ""),)), FullKV(1, 1))),
}
PLAIN = KVFormat()
SEALED = KVFormat("page", 4, 4)

Place = tuple[PoolKey, int]


def page_bytes(key: PoolKey) -> int:
    """Pages of different groups and formats differ in size."""
    return 3 + 2 * key.group + 2 * key.open + key.format.has_tail


@dataclass
class Simulation:
    """A scheduler, and a device that follows it one step behind.

    Attributes:
        pages: what each page holds; tokens by offset, or a state's whole past.
    """

    groups: tuple[KVGroup, ...]
    budget: int
    max_sequences: int = 4
    chunk: int = 7
    max_context: int = 60
    pages: dict[Place, dict[int, int]] = field(default_factory=dict)
    ended: dict[str, Output] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    time: float = 0.0
    disk: ScriptedDisk | None = None

    def __post_init__(self) -> None:
        self.manager = BlockManager(self.budget, page_bytes)
        self.scheduler = Scheduler(
            SchedulerConfig(PAGE, self.max_sequences, self.max_context, snapshot_every=8),
            self.groups,
            self.manager,
            PrefillBudget(1.0, 2.0, self.chunk),
            lambda format, salt: f"{format.name}|{salt}".encode(),
            clock=lambda: self.time,
        )
        if self.disk is not None:
            self.manager.wants = self.disk.wants
            self.scheduler.sharing.prefetch = DiskPrefetch(
                self.scheduler.sharing.index,
                self.manager,
                self.disk,
                lambda pool, page: True,
                lambda tokens: float(tokens),
                clock=lambda: self.time,
            )
        self._before: tuple[StepPlan, dict[str, Drawn]] | None = None
        self._drawn: dict[tuple[str, int], int] = {}
        self._steps = 0

    # -- driving -------------------------------------------------------------------------------

    def add(self, request: Request, format: KVFormat = PLAIN) -> None:
        self.scheduler.add(request, format)
        self.answers[request.id] = []

    def sequence(self, name: str) -> Sequence:
        """A request that has not ended."""
        return next(s for s in (*self.scheduler.running, *self.scheduler.waiting) if s.id == name)

    def step(self) -> None:
        """As `Engine.step`: plan, launch, then read the step before."""
        self.time += 0.01
        if self.disk is not None:
            self.disk.tick()
        plan = self.scheduler.schedule()
        following = None
        if plan is not None:
            following = plan, self._execute(plan)
            self.scheduler.launched(plan)
        if self._before is None:
            outputs = self.scheduler.take_outputs()
        else:
            outputs = self.scheduler.update(*self._before)
        self._before = following
        for output in outputs:
            assert output.request_id not in self.ended, "an output after the end"
            self.answers[output.request_id] += output.token_ids
            if output.finish is not None:
                self.ended[output.request_id] = output
        assert self.manager.claimed <= self.budget, "the budget is exceeded"

    def run(self, limit: int = 3000) -> None:
        """Steps until nothing is left to do; `limit` stands for starvation."""
        steps = 0
        while self.scheduler.has_work or self._before is not None:
            self.step()
            steps += 1
            assert steps < limit, "somebody starves"

    def check_nothing_leaks(self) -> None:
        """When all is done, every page is free or kept, and everything kept can be let go of."""
        assert self.manager.live_blocks() == 0
        self.scheduler.sharing.index.clear()
        assert self.manager.kept_blocks() == 0

    # -- the device ----------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> dict[str, Drawn]:
        self._execute_changes(plan.changes)
        contents = [dict(self.pages.get(_place(source), {})) for source, _ in plan.copies]
        for (_, target), content in zip(plan.copies, contents, strict=True):
            self.pages[_place(target)] = content
        written: dict[Place, str] = {}
        self._copied = [source for source, _ in plan.copies]
        self._blocks: dict[tuple[str, int], dict[int, int]] = {}
        for work in plan.work:
            self._write(work, written)
        for work in plan.work:
            self._check_sight(work)
        for source, target in plan.saves:
            self.pages[_place(target)] = dict(self.pages[_place(source)])
        return {w.seq.id: Drawn(self.token(w.seq.id, w.end)) for w in plan.work if w.sample}

    def _execute_changes(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if isinstance(change, Spill | Restore):
                self._to_or_from_disk(change)
                continue
            moved = {(change.pool, b): self.pages.get((change.pool, a)) for a, b in change.moves}
            for place, content in moved.items():
                self.pages[place] = dict(content or {})
            for place in [p for p in self.pages if p[0] == change.pool]:
                if place[1] >= change.capacity:
                    del self.pages[place]

    def _to_or_from_disk(self, change: Spill | Restore) -> None:
        assert self.disk is not None
        if isinstance(change, Restore):
            self.pages[change.pool, change.id] = from_host_page(change.contents)
            return
        content = self.pages[change.pool, change.id]
        recurrent = isinstance(self.groups[change.pool.group].spec, RecurrentState)
        assert recurrent or len(content) == PAGE, "a page goes to disk that is not full"
        self.disk.spill(change.name, as_host_page(content))

    def token(self, name: str, position: int) -> int:
        """What the 'model' draws for a position: fixed, so that resuming must repeat it."""
        return self._drawn.setdefault((name, position), (hash((name, position)) % 50) + 100)

    def _truth(self, work: Work, position: int) -> int:
        if position < len(work.seq.content):
            return work.seq.content[position]
        return self._drawn[work.seq.id, position]

    def _write(self, work: Work, written: dict[Place, str]) -> None:
        for group in self.groups:
            table = work.seq.tables[group.index]
            if isinstance(group.spec, RecurrentState):
                self._advance_state(work, table[0])
                continue
            if work.seq.format.has_tail:
                self._write_sealing(work, group.index)
                continue
            for position in range(work.start, work.end):
                page = table[position // PAGE]
                assert page is not None, "a row's own page left the window"
                # Whoever copies from the page in this step has done so before it is written.
                others = page.refs - 1 - self._copied.count(page)
                assert others == 0, "a page that others read is written"
                place = _place(page)
                assert written.setdefault(place, work.seq.id) == work.seq.id, "two write one page"
                content = self.pages.setdefault(place, {})
                if position % PAGE == 0:
                    content.clear()
                content[position % PAGE] = self._truth(work, position)

    def _write_sealing(self, work: Work, group: int) -> None:
        """Rows see their own pages as written (`_blocks`); full ones go to the table as codes."""
        open_page = work.seq.opens[group]
        assert open_page.refs == 1
        first = work.start // PAGE * PAGE
        block = {}
        if work.start % PAGE:
            block = {first + i: t for i, t in self.pages[_place(open_page)].items()}
        block |= {p: self._truth(work, p) for p in range(work.start, work.end)}
        self._blocks[work.seq.id, group] = block
        for start in range(first, work.end, PAGE):
            content = {p - start: t for p, t in block.items() if start <= p < start + PAGE}
            page = work.seq.tables[group][start // PAGE]
            assert page is not None
            target = page if start + PAGE <= work.end else open_page
            self.pages[_place(target)] = content

    def _advance_state(self, work: Work, slot: Block | None) -> None:
        assert slot is not None
        state = {} if work.start == 0 else self.pages[_place(slot)]
        past = {p: self._truth(work, p) for p in range(work.start)}
        assert state == past, f"{work.seq.id}: the state is not that of {work.start} tokens"
        for position in range(work.start, work.end):
            state[position] = self._truth(work, position)
        self.pages[_place(slot)] = state

    def _check_sight(self, work: Work) -> None:
        """Each key that a row may see is there and is the sequence's own token."""
        for group in self.groups:
            spec = group.spec.attention
            if spec is None:
                continue
            for row in range(work.start, work.end):
                for key in range(spec.first_visible(row), last_visible(group, work, row) + 1):
                    assert self._seen(work, group, key) == self._truth(work, key)

    def _seen(self, work: Work, group: KVGroup, key: int) -> int:
        if work.seq.format.has_tail and key >= work.start // PAGE * PAGE:
            return self._blocks[work.seq.id, group.index][key]
        page = work.seq.tables[group.index][key // PAGE]
        assert page is not None, "a visible key's page left the window"
        return self.pages[_place(page)][key % PAGE]


def last_visible(group: KVGroup, work: Work, row: int) -> int:
    """The row's own key, or the last of its image where its rows see each other."""
    if group.spec.sees_whole_images:
        for placed in work.seq.request.images:
            if placed.start <= row < placed.end:
                assert placed.end <= work.end, "a chunk ends within an image"
                return placed.end - 1
    return row


def _place(page: Block) -> Place:
    return page.pool, page.id
