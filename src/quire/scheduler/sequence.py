"""A request while it is served. Each of its parts has one writer."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from quire.cache.disk_prefetch import PrefetchedPart
from quire.cache.index import Node
from quire.cache.reuse import ReuseMiss
from quire.constraints.masks import TokenMask
from quire.core.block_keys import chains, content_of
from quire.core.kv_format import KVFormat
from quire.core.media import CrossMedia, MediaKey, Pieces
from quire.core.request import Request
from quire.sampling.history import RowState
from quire.scheduler.drafts import NO_DRAFT, Draft, DraftState
from quire.scheduler.positions import TokenPositions
from quire.scheduler.sequence_blocks import SequenceBlocks


class TokenConstraint(Protocol):
    """A constraint on the next token, evaluated on the host: a grammar or a thinking budget."""

    def mask(self) -> TokenMask | None:
        """Return the mask of tokens that may come next, or None if all may."""
        ...

    def accept(self, token: int) -> None:
        """Advance by the sequence's next token."""
        ...

    def follow(self, drafts: Seq[int]) -> list[TokenMask | None]:
        """Return the mask after each leading draft that is allowed, without changing the state.

        The list ends before the first draft that is not allowed, or after which no token is.
        """
        ...


class LoopDetector(Protocol):
    """A detector of answers that repeat themselves."""

    def push(self, token: int) -> int | None:
        """Take the next token; return the cycle's length if the answer loops."""
        ...


class Status(Enum):
    """The state of a request in the scheduler."""

    WAITING = "waiting"  # holds no blocks: new, or preempted
    RUNNING = "running"  # holds blocks
    FINISHED = "finished"


class Progress:
    """A sequence's tokens, and the number of computed ones. Written by the scheduler.

    *Computed* tokens catch up with the *known* ones: those that the host has read (`tokens`) and
    those that a step in flight samples (`pending`).

    Attributes:
        tokens: tokens that the host knows: the prompt and the accepted part of the answer.
        content: the tokens as the prefix index knows them, in which media differ.
        pending: number of tokens that steps in flight are certain to yield; at most one when a step
            is planned.
        drafts: what each step in flight that samples for it verifies, oldest first.
        unsettled: number of tokens of these drafts.
        computed: number of tokens whose keys and values are written, or will be by a planned step;
            includes drafts.
    """

    __slots__ = (
        "computed",
        "content",
        "drafts",
        "pending",
        "prompt_length",
        "tokens",
        "unsettled",
    )

    def __init__(self, request: Request) -> None:
        self.prompt_length = len(request.prompt)
        # Not a list: the garbage collector would walk all tokens of all requests, again and again.
        self.tokens = array("i", request.prompt)
        self.content = content_of(request.prompt, request.media) if request.media else self.tokens
        self.pending = 0
        self.drafts: list[Draft] = []
        self.unsettled = 0
        self.computed = 0

    @property
    def known(self) -> int:
        """Number of tokens that exist, read by the host or not."""
        return len(self.tokens) + self.pending

    @property
    def generated(self) -> int:
        """Number of answer tokens so far."""
        return self.known - self.prompt_length

    @property
    def certain(self) -> int:
        """Number of computed tokens that are not drafts."""
        return self.computed - self.unsettled

    def start(self, draft: Draft) -> None:
        """Note that a step in flight samples for the sequence."""
        self.pending += 1
        self.drafts.append(draft)
        if draft is not NO_DRAFT:
            self.unsettled += len(draft.tokens)

    def end(self) -> Draft:
        """Return what the oldest of these steps verified, when its tokens are read."""
        draft = self.drafts.pop(0)
        self.pending -= 1
        if draft is not NO_DRAFT:
            self.unsettled -= len(draft.tokens)
        return draft

    def drop_steps(self) -> None:
        """Forget the steps in flight, whose tokens are lost."""
        self.pending = self.unsettled = 0
        self.drafts.clear()

    @property
    def confirmed(self) -> int:
        """Number of computed tokens that the host has read. The index may register their blocks."""
        return min(self.computed, len(self.tokens))

    def append(self, token: int) -> None:
        """Append the next token that the host has read."""
        self.tokens.append(token)
        if self.content is not self.tokens:
            self.content.append(token)


class PrefixCursor:
    """Position of a sequence in the prefix index. Written by `PrefixSharing`.

    Attributes:
        identity: root of the keys of its blocks.
        node: index node of the last registered block; its parent is None once it was evicted.
        registered: number of blocks registered in the index.
        computing: keys of the prompt's blocks that this sequence is about to compute.
        waits_on: the key of the last block of its prompt that another sequence will compute.
        reading: the part of the prompt that is being read, or was last read, from disk.
        parting: prompt position for a recurrent snapshot, because another prompt diverges there; 0
            for none.
        ignored: why it may reuse nothing, for instance a lack of room; None if it may.
        started: whether the sequence has run.
        cached: number of prompt tokens reused when it first ran.
        miss: why no more were reused; None if all were, and before it first ran.
        reason: the value of `Output.reuse`: `miss` as text, empty if all was reused; None before
            the first run. It is made once, since every output has it.
    """

    __slots__ = (
        "_keys",
        "cached",
        "computing",
        "identity",
        "ignored",
        "miss",
        "node",
        "parting",
        "reading",
        "reason",
        "registered",
        "started",
        "waits_on",
    )

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.node: Node | None = None
        self.registered = 0
        self.computing: list[bytes] = []
        self.waits_on: bytes | None = None
        self.reading: PrefetchedPart | None = None
        self.parting = 0
        self.ignored: ReuseMiss | None = None
        self.started = False
        self.cached = 0
        self.miss: ReuseMiss | None = None
        self.reason: str | None = None
        self._keys: list[bytes] = []

    def begin(self, cached: int, miss: ReuseMiss | None) -> None:
        """Note what is reused when the sequence first runs."""
        self.started, self.cached, self.miss = True, cached, miss
        self.reason = "" if miss is None else str(miss)

    @property
    def waits_for_disk(self) -> bool:
        """Whether a part of its prompt is being read from disk."""
        return self.reading is not None and not self.reading.settled

    def keys(self, content: array[int], blocks: int, block_size: int) -> list[bytes]:
        """Return chained hashes of the first `blocks` full blocks."""
        have = len(self._keys)
        if have < blocks:
            parent = self._keys[-1] if have else self.identity
            tokens = content[have * block_size : blocks * block_size]
            self._keys.extend(chains(parent, tokens, block_size))
        return self._keys[:blocks]


@dataclass(frozen=True, slots=True)
class SequenceParts:
    """Objects made for one request before it is queued.

    Attributes:
        positions: positions of its tokens.
        cross_media: the media that its tokens attend to through cross-attention layers, in order.
        pieces: how each item's encoding is cut into pieces; a missing item is one piece.
        drafters: names of the drafters that may draft its tokens.
    """

    positions: TokenPositions = field(default_factory=TokenPositions)
    cross_media: tuple[CrossMedia, ...] = ()
    pieces: Mapping[MediaKey, Pieces] = field(default_factory=dict)
    constraint: TokenConstraint | None = None
    loops: LoopDetector | None = None
    drafters: frozenset[str] = frozenset()


class Sequence:
    """A request while it is served; `SequenceParts` describes the other attributes.

    Attributes:
        number: number by order of arrival, unique within the engine.
        max_context: the most tokens it may have, by the model and by the KV budget in its format.
        arrived: time of arrival, by the scheduler's clock.
        queued_s: seconds from its arrival until it first ran; None before that.
        level: priority level among all API keys, at least 0; higher is later.
        status: written by the scheduler.
        blocks: written by `BlockTables`.
        prefix: written by `PrefixSharing`.
        row: sampling state; the scheduler adds tokens to it.
        drafting: draft statistics, written by `Drafting`; None if no drafter may draft for it.
    """

    def __init__(
        self,
        request: Request,
        format: KVFormat,
        identity: bytes,
        number: int,
        parts: SequenceParts,
    ) -> None:
        self.request = request
        self.format = format
        self.number = number
        self.positions = parts.positions
        self.cross_media = parts.cross_media
        self.pieces = parts.pieces
        self.constraint = parts.constraint
        self.loops = parts.loops
        self.drafting = DraftState(parts.drafters) if parts.drafters else None
        self.max_context = 0
        self.arrived = 0.0
        self.queued_s: float | None = None
        self.level = max(0, request.priority)
        self.status = Status.WAITING
        self.progress = Progress(request)
        self.blocks = SequenceBlocks()
        self.prefix = PrefixCursor(identity)
        self.row = RowState(request.sampling, request.prompt)
        if self.constraint is not None:
            self.row.mask = self.constraint.mask()

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def tokens_left(self) -> int:
        """Number of tokens that it may still get, beyond those that steps in flight sample."""
        progress = self.progress
        end = min(progress.prompt_length + self.request.max_tokens, self.max_context)
        return end - len(progress.tokens) - progress.pending
