"""Chooses the rows of a step: those that generate, and chunks of prompts."""

from __future__ import annotations

from collections.abc import Callable

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block
from quire.cache.specs import KVGroup
from quire.constraints.masks import TokenMask
from quire.core.kv_format import KVFormat
from quire.core.request import Failure
from quire.scheduler.admission import Admission, SchedulerConfig
from quire.scheduler.block_tables import BlockTables
from quire.scheduler.counters import Counters
from quire.scheduler.drafting import Drafting
from quire.scheduler.drafts import NO_DRAFT, UNREAD, Draft
from quire.scheduler.encodings import Encodings
from quire.scheduler.plan import CrossKeys, EncoderWork, GraphRows, ScheduledSequence, StepPlan
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.prefill_split import PrefillSplit, whole_shares
from quire.scheduler.prefix_sharing import PrefixSharing, ReadAhead
from quire.scheduler.rows import PlannedRows, block_copies
from quire.scheduler.sequence import Sequence, Status

_CATCH_UP = 17
"""Most rows that count as generating when a sequence with drafters is behind: after rejected
drafts, its recurrent state lacks a few tokens.
"""


class Planner:
    """Plans the rows of the sequences that `admission` lets run.

    Args:
        fail, clock: see `Admission`.
        graph_rows: returns which steps run as CUDA graphs, by the format of their sequences and
            whether they read media.
        drafting: drafts tokens for sequences that have drafters.
        read_ahead: see `PrefixSharing`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        groups: tuple[KVGroup, ...],
        manager: BlockManager,
        prefill_budget: PrefillBudget,
        fail: Callable[[Sequence, Failure], None],
        clock: Callable[[], float],
        graph_rows: Callable[[KVFormat, bool], GraphRows],
        drafting: Drafting,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self.counters = Counters()
        self.sharing = PrefixSharing(
            groups,
            manager,
            block_size=config.block_size,
            snapshot_every=config.snapshot_every,
            enabled=config.prefix_cache,
            read_ahead=read_ahead,
        )
        self.tables = BlockTables(groups, manager, config.block_size)
        self.encodings = Encodings(prefill_budget.room(0), self.tables.cross.written)
        self.admission = Admission(
            config,
            manager,
            sharing=self.sharing,
            tables=self.tables,
            counters=self.counters,
            fail=fail,
            clock=clock,
        )
        self._manager = manager
        self._block_size = config.block_size
        self._whole_prompts = config.whole_prompts
        self._prefill_budget = prefill_budget
        self._prefill_split = PrefillSplit()
        self._graph_rows = graph_rows
        self.drafting = drafting
        self._drafts_any = False
        """Whether the plan has sequences that may be drafted."""
        self._bidirectional = any(group.spec.bidirectional_media for group in groups)

    def plan(self, ended: tuple[int, ...]) -> StepPlan | None:
        """Return the next step, or None when no sequence can move before the host reads tokens.

        Args:
            ended: numbers of sequences that ended since the previous plan.
        """
        plan: list[PlannedRows] = []
        self.admission.start_plan()
        self._plan_generation(plan)
        encoding = self._plan_prompts(plan)
        copies = [pair for sequence in self.admission.admitted for pair in sequence.blocks.copies]
        if not plan and not copies and not encoding:
            return None
        self.counters.steps += 1
        return self._freeze(plan, copies, ended=ended, encoding=encoding)

    # -- rows ----------------------------------------------------------------------------------

    def _plan_generation(self, plan: list[PlannedRows]) -> None:
        self.encodings.update_needs(self.admission.running)
        generating = list(filter(self._generates, self.admission.running))
        if self.encodings.needed:
            ready = self.encodings.ready
            generating = [each for each in generating if ready(each) >= each.progress.known]
        drafts = self._drafts(generating)
        for sequence in generating:
            if sequence.status is not Status.RUNNING:
                continue  # it gave its room to an older one
            progress = sequence.progress
            start, end = progress.computed, progress.known + progress.unsettled
            if end - start > 1 and not self.tables.extend(sequence, end):
                continue  # in chunks, like a prompt
            draft, masks = NO_DRAFT, tuple[TokenMask | None, ...]()
            if (found := drafts.get(sequence.number)) is not None:
                draft, masks = _allowed(sequence, found)
            count = len(draft.tokens)
            if count and not self.tables.extend_for_drafts(sequence, end + count):
                draft, count, masks = NO_DRAFT, 0, ()
            rows = PlannedRows(
                sequence,
                start,
                count=end - start + count,
                last=True,
                draft=draft,
                draft_masks=masks,
                awaits_mask=sequence.constraint is not None and progress.pending > 0,
                verified=progress.drafts[-1].tokens if progress.unsettled else (),
            )
            if self.tables.extend(sequence, rows.end) or self.admission.make_room(rows, plan):
                plan.append(rows)

    def _drafts(self, generating: list[Sequence]) -> dict[int, Draft]:
        """Return drafts by sequence number, as many as fit without preempting others."""
        drafting, drafted = self.drafting, [each for each in generating if each.drafting]
        self._drafts_any = bool(drafted)
        if not drafted:
            return {}
        read = [each for each in drafted if not each.progress.pending]
        follow = [each for each in drafted if drafting.follows(each)] if drafting.foresees else []
        if not read and not follow:
            return {}
        rows = sum([each.progress.known - each.progress.certain for each in generating])
        room = self._prefill_budget.room(rows)
        limits = [(each, min(each.tokens_left - 1, self.tables.max_drafts(each))) for each in read]
        drafts = drafting.drafts(limits, rows, room)
        if not follow:
            return drafts
        return drafts | drafting.following(follow, rows, room - _count(drafts))

    def may_follow(self, sequence: Sequence) -> bool:
        """Return whether rows of a sequence may ever be planned before it is known which of the
        drafts in front of them are right.

        False if these drafts decide on a mask, on penalties, or on what is written to states.
        """
        state = sequence.drafting
        if state is None or not self.drafting.need_no_tokens(state.drafters):
            return False
        free = sequence.constraint is None and not sequence.request.sampling.needs_history
        return free and not sequence.cross_media and self.tables.cuts_anywhere(sequence)

    def _generates(self, sequence: Sequence) -> bool:
        """Return whether the next rows end with the last known token."""
        progress = sequence.progress
        if progress.unsettled and not self.drafting.follows(sequence):
            return False  # it waits for its last tokens
        known = progress.known
        behind = known - progress.computed + progress.unsettled
        if behind != 1:
            catches_up = sequence.drafting is not None and known > progress.prompt_length
            if not (catches_up and 0 < behind <= _CATCH_UP):
                return False  # it reads its prompt, or waits for its last token
        return sequence.request.task.samples and sequence.tokens_left > 0

    def _plan_prompts(self, plan: list[PlannedRows]) -> list[EncoderWork]:
        """Plan prompt chunks, and encoder work for them and for later chunks."""
        # A sequence that resumes after preemption reads its own answer like a prompt. One with
        # a single token to go was planned as a generating row.
        planned = {rows.sequence for rows in plan}
        others = [each for each in self.admission.running if each not in planned]
        prompts = list(filter(_reads, others))
        generating = sum([rows.count for rows in plan])
        if not prompts and not self.admission.waiting and not self.encodings.needed:
            self._prefill_budget.charge(generating, 0, 0, prompt_rows=0, graphed=True)
            return []
        count = len(prompts) + len(self.admission.waiting)
        context = prompts[0].progress.computed if prompts else 0
        budget = self._prefill_budget.prompt_budget(generating, count, context=context)
        self.admission.admit(prompts, plan, budget)
        prompts = self.admission.fairness.ordered(prompts)
        generating = sum([rows.count for rows in plan])  # some may have given up their places
        encoding, spent_s = self._plan_encoding(prompts, generating, count)
        prompts = [sequence for sequence in prompts if self._readable(sequence)]
        budget = self._prefill_budget.beside_encoders(budget, spent_s)
        format = _one_format([*prompts, *[rows.sequence for rows in plan]]) if prompts else None
        graphs = GraphRows()
        if format is not None:
            graphs = self._graph_rows(format, any(map(_reads_media, prompts)))
        read = list[PlannedRows]()
        while prompts and not read:
            shares = self._shares(prompts, generating, budget=budget, graphs=graphs, count=count)
            if not any(shares):
                break
            self._plan_chunks(prompts, shares, plan, room=graphs.most - generating)
            reading = {sequence.number for sequence in prompts}
            read = [rows for rows in plan if rows.sequence.number in reading]
            # Where all that got a share lost their places, the others read in this step.
            prompts = [sequence for sequence in prompts if sequence.status is Status.RUNNING]
        prompt_rows = sum([rows.count for rows in read])
        self._prefill_budget.charge(
            generating,
            count,
            len(read),
            prompt_rows=prompt_rows,
            keys=sum([rows.count * rows.start for rows in read]),
            graphed=not read or generating + prompt_rows <= graphs.most,
        )
        return encoding

    def _shares(
        self, prompts: list[Sequence], generating: int, budget: int, graphs: GraphRows, count: int
    ) -> list[int]:
        """Return how many tokens each prompt may read in this step.

        Args:
            generating: rows of the step that generate.
            budget: tokens for all prompts if the step runs eagerly.
            graphs: the steps that can be graphed.
            count: number of waiting prompts, started or not.
        """
        remaining = [self._readable(sequence) for sequence in prompts]
        if self._whole_prompts:
            return whole_shares(budget, remaining)
        room = self._prefill_budget.room(generating)
        budget = self._prefill_budget.graph_budget(
            budget, generating, sum(remaining), max_graph_rows=graphs.most, prompts=count
        )
        if generating + budget <= graphs.most:
            room = min(room, graphs.most - generating)
            if not graphs.across_blocks:
                remaining = list(map(min, remaining, map(self.tables.until_block_end, prompts)))
        levels = [sequence.level for sequence in prompts]
        return self._prefill_split.split(budget, remaining, room, levels=levels)

    def _plan_chunks(
        self, prompts: list[Sequence], shares: list[int], plan: list[PlannedRows], room: int
    ) -> None:
        """Plan a chunk of each prompt that has a share.

        Args:
            room: rows that a graph has left for prompts. If the shares fit, a chunk that is longer
                than its share, because a media item is not split, is planned if it fits, too.
        """
        graphed, read = sum(shares) <= room, 0
        for sequence, share in zip(prompts, shares, strict=True):
            if share and sequence.status is Status.RUNNING:
                left = room - read if graphed and read else None
                read += self._plan_chunk(sequence, share, plan, room=left)

    def _plan_chunk(
        self, sequence: Sequence, share: int, plan: list[PlannedRows], room: int | None
    ) -> int:
        """Plan the next `share` tokens of a prompt, or fewer if blocks are short.

        Args:
            room: the most rows; a longer chunk waits. None for no limit.

        Returns:
            The number of rows planned.
        """
        count = min(share, self.sharing.until_snapshot(sequence))
        if count < len(sequence.progress.tokens) - sequence.progress.computed:
            count = self.tables.to_block_end(sequence, count)
        rows = self._chunk(sequence, count)
        if room is not None and rows.count > room:
            return 0
        fits = self.tables.extend(sequence, rows.end)
        while not fits and rows.count > self._block_size:
            smaller = self._chunk(sequence, rows.count // 2)
            if smaller.count == rows.count:
                break  # a single item
            rows, fits = smaller, self.tables.extend(sequence, smaller.end)
        if not fits and not self.admission.make_room(rows, plan):
            return 0
        plan.append(rows)
        return rows.count

    def _plan_encoding(
        self, prompts: list[Sequence], generating: int, count: int
    ) -> tuple[list[EncoderWork], float]:
        """Plan encoder work for a step's prompts; return it with its expected time.

        Half of the step's time for prompts is reserved for those that can be read meanwhile.

        Args:
            generating: rows of the step that generate.
            count: number of waiting prompts, started or not.
        """
        if not self.encodings.update_needs(self.admission.running):
            return [], 0.0
        seconds = self._prefill_budget.seconds(generating, count)
        if any(self._readable(sequence) for sequence in prompts):
            seconds /= 2
        return self.encodings.plan(self.admission.running, seconds)

    def _readable(self, sequence: Sequence) -> int:
        """Return how many tokens of a prompt can be read now, before the next unencoded item."""
        progress = sequence.progress
        end = min(len(progress.tokens), self.encodings.ready(sequence))
        return end - progress.computed

    def _chunk(self, sequence: Sequence, count: int) -> PlannedRows:
        """Return a chunk of about `count` tokens of a prompt; media items are not split."""
        start = sequence.progress.computed
        end = start + count
        read = [p for p in sequence.request.media if p.start < end and p.end > start]
        cut = read[-1] if read and read[-1].start < end < read[-1].end else None
        if cut is not None and cut.item.bidirectional and self._bidirectional:
            end = cut.start if cut.start > start else cut.end
        return PlannedRows(
            sequence, start, count=end - start, last=end == len(sequence.progress.tokens)
        )

    def _scheduled(self, rows: PlannedRows) -> ScheduledSequence:
        """Return the snapshot of rows that are planned."""
        sequence, crossed = rows.sequence, tuple[CrossKeys, ...]()
        if sequence.blocks.cross:
            crossed = self.tables.cross.placed(sequence, rows.start, rows.end)
        return rows.scheduled(self.tables.place(sequence), crossed)

    # -- after a plan --------------------------------------------------------------------------

    def _advance(self, plan: list[PlannedRows]) -> None:
        """Mark the rows of a plan as computed."""
        has_states, sharing = self.tables.has_states, self.sharing
        for rows in plan:
            sequence, progress = rows.sequence, rows.sequence.progress
            progress.computed = rows.end
            if rows.samples:
                progress.start(rows.draft)
            if has_states:
                self.tables.advance(sequence)
        sharing.register([rows.sequence for rows in plan])
        for rows in plan:
            if sharing.saves_states:
                rows.snapshots = sharing.save_states(rows.sequence)
            if rows.last and rows.sequence.prefix.computing:
                sharing.prompt_done(rows.sequence)

    def _freeze(
        self,
        plan: list[PlannedRows],
        copies: list[tuple[Block, Block]],
        ended: tuple[int, ...],
        encoding: list[EncoderWork],
    ) -> StepPlan:
        """Return the plan as a snapshot.

        Block ids are read last, because making room may have changed them.
        """
        self.admission.fairness.charge(plan)
        self._advance(plan)
        changes = self._manager.take_changes()
        frozen = StepPlan(
            tuple(map(self._scheduled, plan)),
            changes,
            copies=block_copies(copies),
            ended=ended,
            forgotten=self.encodings.forget(),
            encoding=tuple(encoding),
            follows=self._drafts_any and _follows(plan),
        )
        # A block that goes now is not written before the next plan hands it out again.
        self.tables.release_passed([rows.sequence for rows in plan])
        for rows in plan:
            if rows.snapshots:
                self._manager.release_all(rows.snapshots)
        for sequence in self.admission.admitted:
            self.tables.drop_copies(sequence)
        return frozen


def _one_format(sequences: list[Sequence]) -> KVFormat | None:
    """Return the sequences' common format; None if formats differ, or one does not sample."""
    format = sequences[0].format
    others = [each for each in sequences if each.format is not format]
    pooled = [each for each in sequences if not each.request.task.samples]
    return None if others or pooled else format


def _reads_media(sequence: Sequence) -> bool:
    """Return whether a prompt has media that are not read yet."""
    computed = sequence.progress.computed
    return any(placed.end > computed for placed in sequence.request.media)


def _allowed(sequence: Sequence, draft: Draft) -> tuple[Draft, tuple[TokenMask | None, ...]]:
    """Return the leading drafts that the sequence's constraint allows, and the masks after them."""
    if sequence.constraint is None:
        return draft, ()
    masks = tuple(sequence.constraint.follow(draft.tokens))
    return draft.first(len(masks)), masks


def _count(drafts: dict[int, Draft]) -> int:
    return sum([len(each.tokens) for each in drafts.values()])


def _reads(sequence: Sequence) -> bool:
    """Return whether a part of the prompt, or of an answer to resume, is still to be planned, for a
    sequence that is not in the plan yet.
    """
    behind = sequence.progress.known - sequence.progress.computed
    return behind > 1 or (behind == 1 and not sequence.request.task.samples)


def _follows(plan: list[PlannedRows]) -> bool:
    """Whether rows depend on which drafts of the previous step are right, or on guesses."""
    for rows in plan:  # noqa: SIM110 - a generator is resumed for each
        if rows.verified or UNREAD in rows.draft.tokens:
            return True
    return False
