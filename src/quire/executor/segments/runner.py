"""Runs steps by segments, and holds them against the model before they serve."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache, cached_property, partial
from typing import Any

import mlx.core as mx

from quire.attention.cpu import plain_tables
from quire.attention.rows import RowLists
from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.device.device import current_device
from quire.device.dtypes import int32
from quire.executor.computed import Computed
from quire.executor.inputs import SomeRows, StepInputs
from quire.executor.kept_states import KeptStates
from quire.executor.segments.builder import Segment
from quire.executor.segments.exact import refused_nodes
from quire.executor.segments.rows import LogitsSegment
from quire.executor.segments.stages import Stages, staged
from quire.models.base import LanguageModel
from quire.program.folding import convert_tables, simplified
from quire.program.low_rank import NUMBERS, with_low_rank
from quire.program.trace import NotLinear, trace_body
from quire.program.values import KEEPS_ORDER, Program
from quire.program.wanted_rows import FIELD, with_wanted_rows
from quire.sampling.sampler import may_move
from quire.scheduler.plan import ScheduledSequence, StepPlan

log = logging.getLogger("quire.engine")

FEW_ROWS = 16
"""Rows up to which kernels multiply by vectors, in other code than more rows."""


def open_segments(model: LanguageModel) -> StepSegments | None:
    """Trace a model's step and divide it into segments; None where no kernels are in use.

    Models are traced in a fifth of a second.
    """
    kernels = current_device().kernels
    if kernels is None or model.token_types:  # whose positions have axes
        return None
    try:
        program = convert_tables(simplified(trace_body(model)))
    except Exception as error:  # whatever a model's code does while it is traced, it can be run
        known = isinstance(error, NotLinear)
        log.warning(
            "CPU segments disabled for this model: %s. Steps run eagerly.",
            error,
            exc_info=not known,
        )
        return None
    narrows = any(spec.owner(layer) != layer for layer, spec in enumerate(model.own_layout))
    logits = LogitsSegment(model, program.values[program.outputs[0]])
    return StepSegments(
        program, KVLayout.of(model.layout), kernels.ops, narrows=narrows, logits_of=logits
    )


class Attends(Enum):
    """Whether segments compute attention and recurrences: over plain KV blocks, and states of one
    format.
    """

    INSIDE = "attention inside"
    OUTSIDE = "attention outside"

    @staticmethod
    def of(inputs: StepInputs) -> Attends:
        """Return where the attention and the recurrences of a step are computed."""
        return Attends.INSIDE if inputs.attention.is_plain else Attends.OUTSIDE


class StepSegments:
    """Computes a model's steps by segments. Steps of three sizes (one row, few, many) are held
    against the model when they first come: their bits must be equal.

    A step is left to the model if it has media or positions of several axes.

    Args:
        program: the step's program. It is divided when a kind of step first comes.
        ops: the extension of CPU kernels.
        narrows: whether the model computes its last layers for wanted rows only. Segments then do
            so, too.
        logits_of: computes logits of hidden states.
    """

    def __init__(
        self,
        program: Program,
        layout: KVLayout,
        ops: Any,
        *,
        narrows: bool,
        logits_of: Callable[[mx.array], mx.array],
    ) -> None:
        self._program, self.logits_of = program, logits_of
        self.stages = cache(partial(_divided, program, layout, ops))
        self._layout, self._ops, self._narrows = layout, ops, narrows
        self.agrees: dict[tuple[Attends, str], bool] = {}
        """By kind and size of a step, whether segments compute what the model does."""
        self.steps = 0
        """Number of steps that segments computed."""
        specs = [group.spec.attention for group in layout.groups]
        self._moves = all(spec is not None and spec.moves for spec in specs)
        """Whether the keys that a row sees move with it, in each layer."""

    def with_low_rank(
        self, factors: Mapping[str, tuple[mx.array, mx.array]]
    ) -> StepSegments | None:
        """Return the segments of steps with adapters; None if the model must compute these. See
        `program.low_rank`.
        """
        program = with_low_rank(self._program, factors)
        if program is None:
            return None
        return StepSegments(
            program, self._layout, self._ops, narrows=self._narrows, logits_of=self.logits_of
        )

    @cached_property
    def narrowed(self) -> Stages | None:
        """The stages of a step whose end computes its wanted rows only; None if these are not all
        in segments.
        """
        program = with_wanted_rows(self._program, attends=True)
        if FIELD not in program.fields:
            return None
        stages = _divided(program, self._layout, self._ops, attention=Attends.INSIDE)
        return stages if stages.in_place else None

    def compute(
        self, inputs: StepInputs, pools: Pools, run_eagerly: Callable[[], mx.array]
    ) -> Computed | None:
        """Return the step's hidden states `[T, hidden]`, or `[R, hidden]` where the model narrows
        the step; None if the model must compute them.

        Args:
            run_eagerly: runs the model, which writes to the pools; returns hidden states.
        """
        if inputs.media is not None or inputs.cross is not None or inputs.positions.ndim > 1:
            return None
        end = inputs.sampled_rows_only() if self._narrows else None
        kind = Attends.of(inputs), _size(len(inputs.tokens))
        if end is not None:
            kind = kind[0], f"{kind[1]}, some of them wanted"
            if kind[0] is Attends.OUTSIDE or self.narrowed is None:
                return None
        run = partial(self._run, inputs, end)
        if kind not in self.agrees:
            if not _repeats(inputs):
                return None
            return self._verified(inputs, pools, kind, run=run, run_eagerly=run_eagerly)
        return run() if self.agrees[kind] else None

    def follows(self, plan: StepPlan) -> bool:
        """Return whether segments compute a plan whose rows' places are on the device.

        These are few rows that only go on, over plain blocks, and are drawn by kernels.
        """
        rows = plan.sequences
        count = sum([each.count for each in rows])
        if not self._moves or not self.agrees.get((Attends.INSIDE, _size(count))):
            return False
        if count > FEW_ROWS:
            return False
        sampling = [row for each in rows for row in each.sampling]
        plain = rows[0].format.scheme == "plain" and may_move(sampling)
        return plain and all(_goes_on(each) and each.format == rows[0].format for each in rows)

    def _run(self, inputs: StepInputs, end: tuple[SomeRows, mx.array] | None = None) -> Computed:
        """Run the segments.

        Args:
            end: the wanted rows as a step of their own, and their indices; None for all rows.
        """
        stages = self.stages(Attends.of(inputs)) if end is None else self.narrowed
        assert stages is not None, "steps that are narrowed have stages of their own"
        fields = {"tokens": inputs.tokens, "positions": inputs.positions}
        if inputs.adapted is not None:
            fields[NUMBERS] = inputs.adapted.numbers
        every = _SegmentRows(self._ops, self._layout, inputs, at_once=stages.in_place)
        wanted = every
        if end is not None:
            fields[FIELD] = end[1]
            wanted = _SegmentRows(self._ops, self._layout, end[0], at_once=stages.in_place)
        (hidden,) = stages.run(
            fields,
            len(inputs.tokens),
            lambda segment, given: (wanted if segment.wanted else every).compute(segment, given),
            step=inputs,
        )
        self.steps += 1
        return Computed(hidden, in_place=stages.in_place)

    def _verified(
        self,
        inputs: StepInputs,
        pools: Pools,
        kind: tuple[Attends, str],
        run: Callable[[], Computed],
        run_eagerly: Callable[[], mx.array],
    ) -> Computed:
        """Run the model and the segments, and compare their bits."""
        mx.synchronize()

        def arrays() -> list[mx.array]:
            return pools.arrays(range(len(self._layout.group)))

        before = KeptStates(pools, self._layout, inputs.sequences)
        expected = run_eagerly()
        mx.eval(expected, *arrays())
        before.restore()
        found = run()
        mx.eval(found.hidden, *arrays())
        equal = bool(mx.array_equal(found.hidden, expected, equal_nan=True))
        self.agrees[kind] = equal
        if equal:
            return found
        log.warning(
            "CPU segments disabled for %s: they do not agree with the model. Steps run eagerly.",
            kind[1],
        )
        before.restore()
        return Computed(run_eagerly())


class _SegmentRows:
    """The rows of a step as segments read them. What they read of a group is made at first use.

    Args:
        at_once: whether segments alone touch the pools, see `Stages.in_place`.
    """

    def __init__(
        self, ops: Any, layout: KVLayout, inputs: StepInputs | SomeRows, *, at_once: bool
    ) -> None:
        self._ops, self._layout, self._inputs, self._at_once = ops, layout, inputs, at_once
        self._tables: dict[int, Any] = {}
        self._state_rows: dict[int, mx.array] = {}
        following = inputs.following
        self._move = None if following is None else following.moved
        behind = 0 if following is None else following.behind
        self._lists = RowLists(inputs.sequences, behind)

    def compute(self, segment: Segment, given: list[mx.array]) -> list[mx.array]:
        """Return the outputs of a segment, which writes to the pools.

        Args:
            given: arrays of `segment.given`.
        """
        attention = self._inputs.attention
        found: list[mx.array] = segment.native.run(
            given,
            [self._tables_of(group) for group in segment.groups],
            self._keys if segment.groups else None,
            [array for store in attention.stores(segment.layers) for array in store.arrays()],
            [attention.states(layer)[name] for layer, name in segment.states],
            [self._state_rows_of(group) for group in segment.state_groups],
            at_once=self._at_once,
        )
        return found

    @cached_property
    def _keys(self) -> mx.array:
        """Each row's own key, the same in each group, int32 `[T]`."""
        keys = int32(self._lists.keys)
        return keys if self._move is None else self._move(keys, range(len(keys)))

    def _state_rows_of(self, group: int) -> mx.array:
        """Return which rows advance which states of a recurrent group."""
        if group not in self._state_rows:
            self._state_rows[group] = self._inputs.state_rows(group)
        return self._state_rows[group]

    def _tables_of(self, group: int) -> Any:
        """Return the tables of a KV group in the extension's form."""
        if group not in self._tables:
            spec = self._layout.groups[group].spec.attention
            assert spec is not None, "segments attend in groups that attend"
            own = self._lists.of_group(group, spec, self._inputs.attention.block_size)
            self._tables[group] = plain_tables(self._ops, self._lists, own, move=self._move)
        return self._tables[group]


def _divided(program: Program, layout: KVLayout, ops: Any, attention: Attends) -> Stages:
    refused = refused_nodes(ops) | (KEEPS_ORDER if attention is Attends.OUTSIDE else set())
    return staged(program, layout, ops, refused=refused)


def _repeats(inputs: StepInputs) -> bool:
    """Whether a step may be computed twice: states can be put back, but not the tail that a chunk
    of several rows starts with.
    """
    rows = inputs.sequences
    if any(each.format != rows[0].format for each in rows):
        return False
    return not rows[0].format.has_tail or all(each.count == 1 for each in rows)


def _goes_on(each: ScheduledSequence) -> bool:
    """Return whether all rows of a sequence are sampled and read no media and no adapter."""
    plain = isinstance(each.positions, range) and not (each.media or each.crossed or each.adapter)
    return plain and each.sampled == each.count


def _size(rows: int) -> str:
    if rows == 1:
        return "one row"
    return "few rows" if rows <= FEW_ROWS else "many rows"
