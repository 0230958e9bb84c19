"""One request's tokens and how far they are computed. All of a request's state lives here."""

from __future__ import annotations

from array import array
from typing import Protocol

from quire.cache.block_manager import Block
from quire.cache.disk_prefetch import Reading
from quire.cache.index import Node, chains, media_tokens
from quire.core.kv_format import KVFormat
from quire.request import Request
from quire.sampling.masks import TokenMask


class Guide(Protocol):
    """Says on the host which tokens may come next: a grammar, a thinking budget."""

    def mask(self) -> TokenMask | None:
        """The tokens that may come next, or None while all may."""
        ...

    def accept(self, token: int) -> None:
        """The row drew this token."""
        ...


class LoopDetector(Protocol):
    """Watches for an answer that repeats itself."""

    def push(self, token: int) -> int | None:
        """Takes the next token; the cycle's length when the answer is stuck in one."""
        ...


class PageIds:
    """The ids of a block table as an array, kept up as the table grows."""

    def __init__(self) -> None:
        self._ids = array("i")
        self._epoch = -1

    def read(self, table: list[Block | None], epoch: int) -> array[int]:
        """The ids; 0 where a block has left the window. Built anew when ids changed (`epoch`)."""
        if epoch != self._epoch:
            self._ids = array("i")
            self._epoch = epoch
        for block in table[len(self._ids) :]:
            self._ids.append(0 if block is None else block.id)
        return self._ids


class Sequence:
    """A request while it is served.

    A sequence's *computed* tokens catch up with its *known* ones: those that the host has read
    (`tokens`) and those that were drawn but not yet read (`pending`, at most one when a step is
    planned).

    Attributes:
        computed: tokens whose keys and values are written, or will be by a step already planned.
        content: the tokens as the prefix index knows them, in which images differ.
        tables: by group, blocks by block number; None where a block left the window.
        opens: by group, in formats that seal, the plain block for tokens of the block that fills.
        cached: prompt tokens that were reused when the sequence first ran.
        trail: the index node of the last registered block; None once the trail is lost.
        registered: blocks (not tokens) that the index knows.
    """

    def __init__(self, request: Request, format: KVFormat, identity: bytes, order: int) -> None:
        self.request = request
        self.format = format
        self.identity = identity
        self.order = order
        self.prompt_length = len(request.prompt)
        # Not a list: the garbage collector would walk all tokens of all requests, again and again.
        self.tokens = array("i", request.prompt)
        self.content = self.tokens
        if request.images:
            self.content = array("q", request.prompt)
            for placed in request.images:
                named = media_tokens(placed.image.digest, placed.image.tokens)
                self.content[placed.start : placed.end] = named
        self.pending = 0
        self.computed = 0
        self.max_context = 0
        """Tokens that it may have, by the model and by what the budget holds in its format."""
        self.tables: list[list[Block | None]] = []
        self.opens: dict[int, Block] = {}
        self.guide: Guide | None = None
        self.mask: TokenMask | None = None
        """What the guide allows next; None allows all."""
        self.loops: LoopDetector | None = None
        self.deadline: float | None = None
        self.cached = 0
        self.reuse = ""
        self.started = False
        self.afresh = False
        """Whether it reuses nothing, since it had no room beside what it would have reused."""
        self.running = False
        self.finished = False
        self.trail: Node | None = None
        self.registered = 0
        self.waits_on: bytes | None = None
        """The key of the last block of this prompt that another running sequence will compute."""
        self.promised: list[bytes] = []
        """Keys of the prompt's blocks that this sequence is about to compute."""
        self.reading: Reading | None = None
        """The part of its beginning that is, or was last, read from disk."""
        self.page_ids: dict[int, PageIds] = {}
        """By group, the ids of `tables`; the runner's."""
        self.sampling_row: object = None
        """What the sampler is told in each step and never changes; the runner's."""
        self._keys: list[bytes] = []

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def waits_for_disk(self) -> bool:
        """Whether a part of its beginning is on its way from disk."""
        return self.reading is not None and not self.reading.settled

    @property
    def known(self) -> int:
        """Tokens that exist, read by the host or not."""
        return len(self.tokens) + self.pending

    @property
    def generated(self) -> int:
        """Tokens drawn so far."""
        return self.known - self.prompt_length

    @property
    def confirmed(self) -> int:
        """Computed tokens that the host has read: what the index may register."""
        return min(self.computed, len(self.tokens))

    def append(self, token: int) -> None:
        """The host has read the next token."""
        self.tokens.append(token)
        if self.content is not self.tokens:
            self.content.append(token)

    def keys(self, blocks: int, page_tokens: int) -> list[bytes]:
        """Chained hashes of the first `blocks` full blocks."""
        have = len(self._keys)
        if have < blocks:
            parent = self._keys[-1] if have else self.identity
            tokens = self.content[have * page_tokens : blocks * page_tokens]
            self._keys.extend(chains(parent, tokens, page_tokens))
        return self._keys[:blocks]
