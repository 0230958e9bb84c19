"""The plan of one step: a frozen snapshot of all decisions, without references to live state.

A plan can be pickled. A process with another shard of the model gets the same plan, and a test can
write one by hand.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.cache.blocks import Change, PoolKey
from quire.core.kv_format import KVFormat
from quire.core.media import CrossMedia, MediaItem, MediaKey, PlacedMedia
from quire.core.request import Generate, Task, TokenLogprobs
from quire.sampling.rows import RowSampling

Positions = range | npt.NDArray[np.float32]
"""Positions of a sequence's rows: float32 `[axes, count]` for multimodal RoPE, where video times
may be fractions. A range if all axes are equal and whole, or if there is one axis."""


class GraphRows(NamedTuple):
    """The steps over a KV format that are likely to run as CUDA graphs.

    Attributes:
        most: rows of the largest; 0 if none is.
        across_blocks: whether the rows of a sequence may lie in several blocks.
    """

    most: int = 0
    across_blocks: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class BlockIds:
    """The block table of one sequence in one group, as it was when the step was planned.

    Attributes:
        ids: array shared with the sequence, which may append to it later; any other change makes a
            new array. 0 stands for a block that the sequence has released.
        length: how many of `ids` belong to the snapshot.
    """

    ids: array[int]
    length: int

    def __reduce__(self) -> tuple[type[BlockIds], tuple[array[int], int]]:
        return BlockIds, (self.ids[: self.length], self.length)


@dataclass(frozen=True, slots=True, eq=False)
class KVPlacement:
    """Block ids of a sequence's keys, values and states. One object is reused until a table
    changes.

    Attributes:
        tables: block ids by group; for a recurrent group, the slot of the state.
        tails: by group, the tail block in formats that have one.
    """

    tables: tuple[BlockIds, ...]
    tails: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class CrossKeys:
    """Keys and values of media that some of a sequence's rows attend to.

    Attributes:
        rows: token indices of these rows.
        tables: by group, the ids of the blocks that hold the keys, in order.
        writes: whether the step computes the keys and values.
    """

    rows: range
    media: CrossMedia
    tables: Mapping[int, Seq[int]]
    writes: bool


class ScheduledSequence(NamedTuple):
    """Tokens `[start, start + count)` of one sequence: the rows that a step computes for it.

    Implements `attention.metadata.AttentionRows`. It is a tuple for the same reason as `Output`.

    Attributes:
        id: the request's id.
        number: the sequence's number, unique within the engine.
        tokens: the rows' tokens that the host knows. If one fewer than `count`, the last row's
            token is on the device: the previous step samples it. If there are none of several, the
            first row's is that token, and the others are what the previous step guesses after it,
            or if there is a `run`, the part of it behind that token.
        pooled: how many of the last rows give their hidden states to the task's result.
        completes: whether the task needs no rows after these.
        sampling: the sampler's input for each sampled row. If there are several, the tokens of all
            but the first of these rows are drafts.
        awaits_mask: whether the mask of its sampled row depends on the token that is on the device.
            The sampler gets the mask once the host has read that token (`Scheduler.masks`).
        media: items whose placeholders are among the rows.
        snapshots: (group, slot) that also gets the recurrent state after the last row.
        drafted_states: (group, slot) that gets the state after the rows if some are drafts. The
            sequence's own slot then keeps the state before the rows.
        next_token: the token after the rows, if they sample nothing and the host knows it.
        adapter: the LoRA adapter of its rows; empty for none.
        crossed: the media that some of the rows attend to through cross-attention layers, in order.
        verified: drafts that the previous step verifies, which are not read yet. The rows begin
            earlier than `start` by one for each that is wrong or comes after a wrong one. Positions
            and samplers' inputs are those at `start`, too.
        run: tokens that are expected from the first one on that the previous step samples.
    """

    id: str
    number: int
    format: KVFormat
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    tokens: array[int]
    positions: Positions
    placement: KVPlacement
    pooled: int = 0
    completes: bool = False
    sampling: tuple[RowSampling, ...] = ()
    awaits_mask: bool = False
    task: Task = Generate()
    media: tuple[PlacedMedia, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()
    drafted_states: tuple[tuple[int, int], ...] = ()
    crossed: tuple[CrossKeys, ...] = ()
    next_token: int | None = None
    adapter: str = ""
    verified: tuple[int, ...] = ()
    run: tuple[int, ...] = ()

    @property
    def behind(self) -> int:
        """The most rows by which these begin earlier than `start`."""
        return len(self.verified)

    @property
    def follows(self) -> bool:
        """Whether its rows depend on which drafts of the previous step are right, or on guesses."""
        return self.behind > 0 or self.count - len(self.tokens) > 1

    @property
    def end(self) -> int:
        """One past the last row's token."""
        return self.start + self.count

    @property
    def sampled(self) -> int:
        """Number of last rows that are sampled."""
        return len(self.sampling)

    @property
    def wanted(self) -> int:
        """Number of last rows whose hidden states the step's last stage takes."""
        return len(self.sampling) or self.pooled

    def block_ids(self, group: int) -> array[int]:
        """Return the ids of the sequence's block table, which may have more blocks than the rows
        need.
        """
        return self.placement.tables[group].ids

    def tail_block(self, group: int) -> int | None:
        """Return the tail block, which holds the last, partly filled block's tokens uncoded."""
        return self.placement.tails.get(group)

    @property
    def bidirectional(self) -> tuple[tuple[int, int], ...]:
        """Token ranges `[start, end)` whose rows may see each other."""
        return tuple((each.start, each.end) for each in self.media if each.item.bidirectional)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of block `source` of a pool to block `target`."""

    pool: PoolKey
    source: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class EncoderWork:
    """Pieces `[first, first + count)` of an item's encoding.

    Attributes:
        rows: hidden states of one piece.
        completes: whether these include the last piece, so that the item's features are complete.
        group: number of the items that one call encodes. They have one shape, and their pieces are
            in the same steps.
    """

    item: MediaItem
    first: int
    count: int
    rows: int
    completes: bool
    group: int = 0


@dataclass(frozen=True)
class StepPlan:
    """One step, in the order in which it is carried out.

    Attributes:
        changes: resizes of pools, and moves of blocks to or from the disk tier, in order.
        copies: block copies, made before anything is written.
        sequences: the rows to compute; sequences that generate come first.
        ended: numbers of sequences that ended since the previous plan.
        forgotten: items whose features, complete or not, are dropped.
        encoding: the encoders' work, done before the rows that may need it.
        guess: number of tokens that the draft head guesses after each sampled one.
        least_chance: least probability of a guess that is worth a row, all guesses before it
            included. If the executor leaves rows out, less likely ones come as `~token`: they are
            not verified. 0 if all are worth it.
        follows: whether `ScheduledSequence.follows` is true of a sequence.
    """

    sequences: tuple[ScheduledSequence, ...] = ()
    changes: tuple[Change, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    ended: tuple[int, ...] = ()
    forgotten: tuple[MediaKey, ...] = ()
    encoding: tuple[EncoderWork, ...] = ()
    guess: int = 0
    least_chance: float = 0.0
    follows: bool = False

    @cached_property
    def awaits_masks(self) -> bool:
        """Whether its tokens can be sampled only after the previous step's tokens were read."""
        return bool([each for each in self.sequences if each.awaits_mask])

    @cached_property
    def _counts(self) -> tuple[list[int], list[int]]:
        """Numbers of rows of sequences that generate, and of sequences that read their prompt."""
        counts = [(each.count, each.count == len(each.sampling)) for each in self.sequences]
        return [n for n, last in counts if last], [n for n, last in counts if not last]

    @property
    def only_generates(self) -> bool:
        """Whether it reads no prompt and encodes nothing."""
        return not self._counts[1] and not self.encoding

    @property
    def decode_rows(self) -> int:
        """Rows of sequences that generate."""
        return sum(self._counts[0])

    @property
    def generating(self) -> int:
        """Number of sequences that generate."""
        return len(self._counts[0])

    @property
    def prompt_chunks(self) -> int:
        """Number of sequences that read a part of their prompt."""
        return len(self._counts[1])

    @property
    def prompt_rows(self) -> int:
        """Number of rows that read prompts."""
        return sum(self._counts[1])

    @property
    def prompt_keys(self) -> int:
        """Sum over the rows that read prompts of the keys before their chunk."""
        if not self._counts[1]:
            return 0
        read = [each for each in self.sequences if each.count > len(each.sampling)]
        return sum([each.count * each.start for each in read])


class SampledTokens(NamedTuple):
    """The tokens read on the host for the sampled rows of one sequence, in row order.

    Attributes:
        logprobs: one for each token if the request asked for them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, on the host, by sequence number.

    Attributes:
        vectors: results of sequences whose task is a vector.
        features: bytes of the completed features, by item.
        guesses: the tokens that the draft head guessed to follow the last kept one; `~token` for
            guesses that are not worth a row.
        seconds: how long the step ran.
        graphed: whether its layers ran as a CUDA graph.
        recorded: whether a graph was recorded or verified for it first, which takes long.
    """

    tokens: Mapping[int, SampledTokens] = field(default_factory=dict)
    vectors: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    features: Mapping[MediaKey, int] = field(default_factory=dict)
    guesses: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    graphed: bool = field(default=False, compare=False)
    recorded: bool = field(default=False, compare=False)
