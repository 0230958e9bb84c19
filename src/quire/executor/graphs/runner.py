"""Runs steps as CUDA graphs: generation, drafts and prompts.

The program of a step is traced from the model once. Its kernels are recorded for 1, 2, 4 and so on
rows, on fixed addresses: those of weights, pools and intermediate buffers. For each step Python
then writes only small arrays: the number of rows, positions, slots, visible ranges and block
tables.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx

from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.core.errors import EngineFailure
from quire.core.kv_format import KVFormat
from quire.device.cuda.driver import DriverError
from quire.device.cuda.extension import Extension
from quire.device.cuda.inboxes import Inboxes
from quire.device.ranks import WHOLE, agreed
from quire.device.verified import Check, Verification
from quire.executor.computed import Computed
from quire.executor.following import Kept
from quire.executor.graphs.attention.formats import all_served, attention_cases, reads_prompts
from quire.executor.graphs.attention.indexers import most_keys
from quire.executor.graphs.compiling import Compiling, KernelCompiling
from quire.executor.graphs.graph_cache import MAX_ROWS, WIDE_ROWS, GraphCache
from quire.executor.graphs.launching import StepLaunching
from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.sizes import GraphSizes
from quire.executor.graphs.step_check import NodeGraphs, StepCheck
from quire.executor.graphs.verifications import LongContexts, Verifications
from quire.executor.inputs import FlatRows
from quire.program.folding import simplified
from quire.program.low_rank import LowRankFactors, arrays_of, shapes_of, with_low_rank
from quire.program.passes import prepared, recordable, split_experts
from quire.program.side_by_side import Joined, with_matrices_joined
from quire.program.trace import StepPrograms
from quire.program.wanted_rows import FIELD, with_wanted_rows
from quire.scheduler.plan import GraphRows, ScheduledSequence

log = logging.getLogger("quire.engine")

NO_FACTORS: LowRankFactors = {}


class CUDAGraphs:
    """Runs the steps of one model as CUDA graphs.

    A sequence may have several rows: a prompt chunk, or drafts. In formats with tails these rows
    must lie in one block, or in a graph of more than `MAX_ROWS` rows: rows of the next block read
    codes that smaller graphs make only behind all layers.

    Each number of rows is verified against the model once, and is not used if it differs.

    Args:
        programs: as traced.
        logits: computes logits from hidden states as the model does.
        identity: identity of the weights.
        batch_invariant: every step, prompts included, runs as graphs whose rows do not depend on
            each other's bits.
        inboxes: memory by which the ranks of a split model exchange rows. All ranks run each step
            as a graph, or none does.
        joined: matrices that lie side by side in memory.
        factors: of adapters, which the programs add; see `program.low_rank`.
        behind: graphs of what drafters run behind steps, in order; empty if that runs eagerly.
        compiling: when kernels are compiled. Steps of ranks and batch-invariant steps cannot run
            eagerly meanwhile: they wait.
    """

    def __init__(
        self,
        programs: StepPrograms,
        logits: Callable[[mx.array], mx.array],
        layout: KVLayout,
        pools: Pools,
        identity: str,
        extension: Extension,
        *,
        batch_invariant: bool = False,
        inboxes: Inboxes | None = None,
        joined: Joined | None = None,
        factors: LowRankFactors = NO_FACTORS,
        behind: Sequence[CUDAGraphs] = (),
        compiling: Compiling = Compiling.AT_USE,
    ) -> None:
        self.behind = tuple(behind)
        self._programs, self._adapters = programs, shapes_of(factors)
        self._logits_of = logits
        self._part = WHOLE if inboxes is None else inboxes.part
        self._layout, self._pools = layout, pools
        self._extension = extension
        self._cache = GraphCache(
            _recordable(programs, joined),
            layout,
            pools,
            extension=extension,
            batch_invariant=batch_invariant,
            inboxes=inboxes,
            factors=arrays_of(factors),
        )
        self._launching = StepLaunching(self._cache, layout, pools, extension=extension)
        self.placing = self._cache.placing
        """Places rows that follow a running step; None if the host has to."""
        self._kernels = KernelCompiling(
            self._cache, compiling if self._part.size == 1 else Compiling.AT_USE
        )
        self._sizes = GraphSizes(layout, pools.block_size)
        self._formats: dict[KVFormat, int] = {}
        """Rows of the largest graph for a KV format, of the formats seen so far; 0 for none."""
        self._known = Verifications(self.serves_format, self._verification, self._part)
        self._long_contexts = LongContexts()
        self._identity = identity
        self._batch_invariant = batch_invariant

    def use(self, pools: Pools, compiling: Compiling) -> None:
        """Run steps over other pools of the same model from now on."""
        self._pools = pools
        self._kernels = KernelCompiling(self._cache, compiling)
        self._cache.use(pools)
        self._launching.use(pools)
        for each in self.behind:
            each.use(pools, compiling)

    def with_low_rank(
        self, factors: LowRankFactors, before: CUDAGraphs | None
    ) -> CUDAGraphs | None:
        """Return the graphs of steps with adapters; None if the model must compute these.

        Args:
            factors: see `program.low_rank`.
            before: graphs of other factors. They are bound to these, without being recorded again,
                if the shapes are equal.
        """
        body = with_low_rank(self._programs.body, factors)
        if body is None:
            log.info("CUDA graphs: an adapter changes experts. Steps with adapters run eagerly.")
            return None
        programs = StepPrograms(body, self._programs.head)
        if (
            before is not None
            and before._adapters == shapes_of(factors)
            and before._cache.bind(_recordable(programs), arrays_of(factors))
        ):
            return before
        graphs = CUDAGraphs(
            programs,
            self._logits_of,
            self._layout,
            pools=self._pools,
            identity=self._identity,
            extension=self._extension,
            factors=factors,
            compiling=self._kernels.when,
        )
        try:
            graphs.check()
        except UnsupportedNode as error:
            log.info("CUDA graphs: %s. Steps with adapters run eagerly.", error)
            return None
        return graphs

    @property
    def verified(self) -> Mapping[tuple[KVFormat, int], bool]:
        """Whether graphs of a format and row count compute the same as the model."""
        return self._known.found

    @property
    def made(self) -> int:
        """Number of graphs made so far, those behind steps included."""
        return self._cache.made + sum(each.made for each in self.behind)

    def check(self) -> None:
        """Record a step without compiling it; see `GraphCache.check`."""
        self._cache.check()

    def compute(
        self, inputs: FlatRows, run_eagerly: Callable[[], mx.array], *, every_row: bool = False
    ) -> Computed | None:
        """Run the step as one CUDA graph. Return None if no graph supports it.

        Args:
            run_eagerly: runs the model, which writes to the pools; returns hidden states.
            every_row: whether hidden states of rows that are not wanted are read, too.

        Raises:
            EngineFailure: batch invariance is required, and no graph supports the step.
        """
        if self._batch_invariant:
            return self._invariant_rows(inputs, run_eagerly)
        if not self._serves(inputs):
            return None
        format = inputs.sequences[0].format
        max_rows = self._graph_rows(inputs.sequences, self._known.of_all)
        if max_rows is None or not self._kernels.has(max_rows, format):
            return None
        longest = max(each.end for each in inputs.sequences)
        verified = self._known.of_all(format, max_rows)
        if verified is None or self._long_contexts.first(format, max_rows, longest):
            hidden = self._verified(inputs, max_rows, run_eagerly)
            return Computed(hidden, recorded=True)
        return self._computed(inputs, max_rows, every_row=every_row)

    def _computed(
        self, inputs: FlatRows, max_rows: int, *, every_row: bool = False
    ) -> Computed | None:
        narrows = FIELD in self._cache.body(max_rows).fields and not every_row
        wanted = inputs.wanted_rows if narrows else None
        rows = self._launching.launched(inputs, max_rows, wanted)
        if rows is None:
            return None
        inputs.narrowed = wanted is not None
        if not self._cache.output(max_rows)[1]:
            return Computed(rows, graphed=True)
        # The graph of the logits writes the hidden states that they are made from, too.
        hidden = mx.depends(self._cache.hidden[: len(rows)], rows)
        return Computed(hidden, rows, graphed=True)

    def _invariant_rows(self, inputs: FlatRows, run_eagerly: Callable[[], mx.array]) -> Computed:
        format, rows = inputs.sequences[0].format, inputs.sequences
        max_rows = self._graph_rows(rows, self._known.own)
        # A prompt's rows are not verified: the model may go on with the last of them alone.
        computed, verified = None, False
        if max_rows is not None:
            if inputs.wanted is None and self._known.own(format, max_rows) is None:
                self._verified(inputs, max_rows, run_eagerly)
                verified = True
            if self._known.own(format, max_rows) is not False:
                computed = self._computed(inputs, max_rows)
        if computed is None:
            count = sum(each.count for each in rows)
            raise EngineFailure(f"batch-invariant: a step of {count} rows cannot be graphed")
        return computed._replace(recorded=verified)

    def _serves(self, inputs: FlatRows) -> bool:
        if inputs.cross is not None or (inputs.media is not None and not self._cache.takes_media):
            return False
        return _may_share(inputs.sequences)

    def follows(self, rows: Sequence[ScheduledSequence], before: Kept) -> bool:
        """Return whether a graph that is verified and compiled computes rows that follow a running
        step.

        Args:
            rows: of one step, without adapters.
        """
        placing, format = self.placing, rows[0].format
        if placing is None or not placing.serves(rows, before) or not _may_share(rows):
            return False
        known = self._known.own if self._batch_invariant else self._known.of_all
        size = self._graph_rows(rows, known)
        if size is None or size > MAX_ROWS or not self._kernels.has(size, format):
            return False
        return known(format, size) is True

    def _graph_rows(
        self,
        rows: Sequence[ScheduledSequence],
        known: Callable[[KVFormat, int], bool | None],
    ) -> int | None:
        """Return the row count of the best graph that holds a step and is not known to differ,
        which has enough tiles and in which indexers can score all keys; None without one.
        """
        format, longest = rows[0].format, max(each.end for each in rows)
        tokens = self._pools.block_size
        for size in self._sizes.of(rows, self._most_rows(format)):
            in_reach = not self._cache.indexed or longest <= most_keys(size)
            fits = in_reach and self._cache.inputs(size).has_tiles(rows, size, tokens)
            if fits and known(format, size) is not False:
                return size
        return None

    def graph_rows(self, format: KVFormat, media: bool) -> GraphRows:
        """Return which steps are likely to be graphed: up to the largest graph that agrees, since
        a larger graph serves the steps of one that differs.

        Args:
            media: whether rows of the step are media.
        """
        if not self.serves_format(format) or (media and not self._cache.takes_media):
            return GraphRows()
        rows = self._most_rows(format)
        while rows > 1 and self._known.own(format, rows) is False:
            rows //= 2
        return GraphRows(rows if rows > 1 else 0, not format.has_tail or rows > MAX_ROWS)

    def _most_rows(self, format: KVFormat) -> int:
        """Return the row count of the largest graph for a format; 0 without any. It is cached."""
        if format not in self._formats:
            heads, tokens = self._cache.heads, self._pools.block_size
            cases = attention_cases(format, heads, self._layout, block_size=tokens)
            few = self._batch_invariant or self._cache.indexed or self._adapters
            rows = WIDE_ROWS if not few and all(map(reads_prompts, cases)) else MAX_ROWS
            self._formats[format] = rows if all_served(cases, self._extension) else 0
        return self._formats[format]

    def serves_format(self, format: KVFormat) -> bool:
        """Whether the kernels support a format."""
        return self._most_rows(format) > 0

    def _verified(
        self, inputs: FlatRows, max_rows: int, run_eagerly: Callable[[], mx.array]
    ) -> mx.array:
        """Run the model and check the graph. Return the model's result.

        Steps whose inputs have no room are not checked.
        """
        format = inputs.sequences[0].format
        self._kernels.start_all(self._most_rows(format), format)
        check = StepCheck(
            self._layout,
            self._pools,
            inputs,
            program=self._programs.body,
            logits=self._logits_of if self._cache.output(max_rows)[1] else None,
            part=self._part,
            run_eagerly=run_eagerly,
        )
        difference = _problem_of(partial(self._cache.graph, max_rows, format))
        compiled = bool(agreed(int(difference is None), self._part))
        if compiled:
            if (launch := self._launching.prepared(inputs, max_rows)) is None:
                return check.expected
            piece = partial(self._cache.piece, max_rows, format)

            def run_graph() -> mx.array:
                graphs = self._launching.graphs(max_rows, format)  # where the states are now
                assert graphs is not None, "the check has computed the pools"
                return launch.run(graphs)

            difference = check.difference(
                run_graph, lambda: NodeGraphs(self._cache.recorded(max_rows, format), piece, launch)
            )
        fine = bool(agreed(int(difference is None), self._part))
        if self._batch_invariant:
            check.before.restore()  # the graph computes the step again
        elif compiled and not fine:
            check.run_again()
        self._known.add(format, max_rows, agrees=fine)
        if not fine:
            why = difference or "another rank's differ"
            log.warning("CUDA graphs of %d rows disabled: %s", max_rows, why)
        return check.expected

    def _verification(self, format: KVFormat, max_rows: int) -> Verification:
        """Return the verification of graphs of `max_rows` rows against the model."""
        width = self._cache.hidden.shape[-1]  # more if states of layers are captured
        subject: tuple[object, ...] = self._identity, width, format, max_rows, self._batch_invariant
        if self._adapters:
            subject = *subject, self._adapters
        if self._part.size > 1:
            subject = *subject, self._part
        library = self._cache.library
        if library is not None and library.serves(max_rows):
            subject = *subject, library
        return Verification(Check.DECODE_STEPS_AGREE, subject)


def _may_share(rows: Sequence[ScheduledSequence]) -> bool:
    """Return whether a graph may compute such rows: some, of one format, none of them pooled."""
    if not sum(each.count for each in rows):
        return False
    format = rows[0].format
    if any(each.pooled and not each.sampling for each in rows):
        return False
    return all(each.format is format or each.format == format for each in rows)


def _problem_of(prepare: Callable[[], object]) -> str | None:
    """Compile a graph. Return why that fails; None if it does not."""
    try:
        prepare()
    except (DriverError, RuntimeError, UnsupportedNode) as problem:
        return str(problem)
    return None


def _recordable(programs: StepPrograms, joined: Joined | None = None) -> StepPrograms:
    body = simplified(split_experts(programs.body))
    ending = with_wanted_rows(body)
    found = StepPrograms(prepared(body), recordable(programs.head))
    if joined:
        found = replace(found, joined=prepared(with_matrices_joined(body, joined)))
        ending = with_matrices_joined(ending, joined)
    return replace(found, ending=prepared(ending)) if FIELD in ending.fields else found
