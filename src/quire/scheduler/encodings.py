"""Plans which media items a step encodes, and which features stay cached. Pure Python.

Encoding is scheduled like prompts: a step computes as many pieces as its time allows, and at least
one. Rows that need an item's features are planned after its last piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from quire.core.media import MediaItem, MediaKey, Pieces
from quire.core.turns import Shares
from quire.scheduler.encoding_cost import EncodingCost
from quire.scheduler.plan import EncoderWork
from quire.scheduler.sequence import Sequence

KEPT_BYTES = 64 << 20
"""Bytes of features cached for later requests: about 45 images of Gemma 4 26B."""


@dataclass(slots=True, eq=False)
class _Encoding:
    """An item with some pieces planned.

    Attributes:
        done: number of pieces planned.
        bytes: bytes of the features; 0 until they are complete.
        group: see `EncoderWork`; 0 before the first piece is planned.
    """

    item: MediaItem
    pieces: Pieces
    done: int = 0
    bytes: int = 0
    group: int = 0

    @property
    def complete(self) -> bool:
        return self.done == self.pieces.count


class Encodings:
    """Owner of the encoder cache's contents: the executor's cache follows the plans made here.

    Args:
        ahead: how many tokens ahead of a prompt's next token items are encoded, at most those of
            one step. Bounds the memory held.
        has_keys: returns whether an item's cross-attention keys are computed already, by its index
            in `Sequence.cross_media`. Its features are not needed then.
        kept_bytes: the most bytes of features, including those that running requests need.
    """

    def __init__(
        self,
        ahead: int,
        has_keys: Callable[[Sequence, int], bool] = lambda sequence, number: False,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.cost = EncodingCost()
        self._ahead = ahead
        self._has_keys = has_keys
        self._kept_bytes = kept_bytes
        self._encodings: dict[MediaKey, _Encoding] = {}
        """Encodings by item, least recently needed first."""
        self._users: Counter[MediaKey] = Counter()
        """Number of unfinished requests that have an item."""
        self._unused: set[MediaKey] = set()
        """Items without a request, until they are taken."""
        self._needed: dict[int, dict[MediaKey, int]] = {}
        """By sequence number, the items that its next rows need, and the first row that
        needs one.
        """
        self._groups = 0
        """Number of groups of items so far."""
        self._oldest_first = False
        self._shares: Shares[str] = Shares()
        """Number of rows encoded so far, by API key."""

    def start(self, sequence: Sequence) -> None:
        """Take note of the items of a new sequence."""
        if sequence.request.media:
            self._users.update(_items(sequence))

    def end(self, sequence: Sequence) -> None:
        """Forget an ended sequence. Features that a waiting sequence needs stay."""
        self._needed.pop(sequence.number, None)
        for key in _items(sequence) if sequence.request.media else ():
            self._users[key] -= 1
            if self._users[key] <= 0:
                del self._users[key]
                self._unused.add(key)

    def take_unused(self) -> set[MediaKey]:
        """Return the items that no request has had since the last call."""
        if not self._unused:
            return self._unused
        unused, self._unused = self._unused, set()
        return {key for key in unused if key not in self._users}

    # -- a step --------------------------------------------------------------------------------

    @property
    def needed(self) -> bool:
        """Whether a running sequence needs encoder work; as of the last `update_needs`."""
        return any(self._needed.values())

    def update_needs(self, running: Iterable[Sequence]) -> bool:
        """Update which items running sequences need; return whether any must be encoded."""
        missing = False
        for sequence in running:
            if not sequence.request.media:
                continue
            needed: dict[MediaKey, int] = {}
            for key, first in self._needs(sequence):
                needed.setdefault(key, first)
            self._needed[sequence.number] = needed
            for key in needed:
                encoding = self._encodings.pop(key, None)
                if encoding is not None:
                    self._encodings[key] = encoding
                missing = missing or encoding is None or not encoding.complete
        return missing

    def plan(self, running: Iterable[Sequence], seconds: float) -> tuple[list[EncoderWork], float]:
        """Choose pieces for about `seconds`; return them with their expected time.

        API keys take turns by rows encoded so far. Within a key, steps alternate between the oldest
        request and the one with the least left to encode, and items of one shape that begin
        together go on together.
        """
        queues = [(each.request.caller, self._queue(each)) for each in running]
        queues = [(caller, queue) for caller, queue in queues if queue]
        self._oldest_first = not self._oldest_first
        if not self._oldest_first:
            queues.sort(key=lambda each: _rows_left(each[1]))
        turns = self._shares.ordered(caller for caller, _ in queues)
        queues.sort(key=lambda each: turns.index(each[0]))
        waiting = [(caller, each) for caller, queue in queues for each in queue]
        planned: list[EncoderWork] = []
        left = seconds
        seen: set[MediaKey] = set()
        for caller, encoding in waiting:
            if encoding.complete or encoding.item.key in seen:
                continue  # two requests bring it, or it goes on with another
            own = (each for name, each in waiting if name == caller and each.item.key not in seen)
            group = _group(encoding, own)
            piece_s = self.cost.seconds(encoding.item.kind, encoding.pieces.rows)
            most = encoding.pieces.count - encoding.done
            count = 0 if piece_s is None else min(most, int(left / (piece_s * len(group))))
            if count == 0 and planned:
                break
            count = max(count, 1)
            planned += self._next_pieces(group, count)
            seen |= {each.item.key for each in group}
            self._shares.charge(caller, count * encoding.pieces.rows * len(group))
            left -= seconds if piece_s is None else count * piece_s * len(group)
        return planned, min(seconds, seconds - left)

    def ready(self, sequence: Sequence) -> int:
        """Return the position before which the sequence's rows can be planned."""
        for key, first in self._needed.get(sequence.number, {}).items():
            encoding = self._encodings.get(key)
            if encoding is None or not encoding.complete:
                return max(first, sequence.progress.computed)
        return len(sequence.progress.tokens) + sequence.progress.pending

    # -- what is kept --------------------------------------------------------------------------

    def forget(self) -> tuple[MediaKey, ...]:
        """Evict features that no live request needs: incomplete ones, and the least recently needed
        beyond the limit.
        """
        if not self._encodings:
            return ()
        needed = {key for keys in self._needed.values() for key in keys}
        kept = sum(each.bytes for each in self._encodings.values())
        forgotten = []
        for key, encoding in list(self._encodings.items()):
            if key in needed or (encoding.complete and kept <= self._kept_bytes):
                continue
            kept -= encoding.bytes
            del self._encodings[key]
            forgotten.append(key)
        return tuple(forgotten)

    def made(self, features: Mapping[MediaKey, int]) -> None:
        """Record features that a step completed, with their bytes."""
        for key, size in features.items():
            if key in self._encodings:
                self._encodings[key].bytes = size

    def clear(self) -> None:
        """Forget all features, after a failed step."""
        self._encodings.clear()
        self._needed.clear()

    # -- within --------------------------------------------------------------------------------

    def _needs(self, sequence: Sequence) -> Iterator[tuple[MediaKey, int]]:
        """Return the items that the next rows need, nearest first, and the first row that needs
        one.
        """
        computed = sequence.progress.computed
        ahead = computed + self._ahead
        for number, media in enumerate(sequence.cross_media):
            rows = media.within(computed, ahead)
            if rows and not self._has_keys(sequence, number):
                yield from ((item.key, rows.start) for item in media.items)
        if not sequence.cross_media:
            for placed in sequence.request.media:
                if placed.end > computed and placed.start < ahead:
                    yield placed.item.key, placed.start

    def _queue(self, sequence: Sequence) -> list[_Encoding]:
        """Return the incomplete encodings that the sequence needs, in order."""
        queue = []
        needed = self._needed.get(sequence.number)
        if not needed:
            return []
        items = {placed.item.key: placed.item for placed in sequence.request.media}
        for key in needed:
            encoding = self._encodings.get(key)
            if encoding is None:
                item = items[key]
                pieces = sequence.pieces.get(key) or Pieces(1, item.tokens)
                encoding = _Encoding(item, pieces)
            if not encoding.complete:
                queue.append(encoding)
        return queue

    def _next_pieces(self, group: Iterable[_Encoding], count: int) -> Iterator[EncoderWork]:
        """Plan the next pieces of a group."""
        self._groups += 1
        for encoding in group:
            first = encoding.done
            encoding.done += count
            encoding.group = encoding.group or self._groups
            self._encodings[encoding.item.key] = encoding
            yield EncoderWork(
                encoding.item,
                first,
                count=count,
                rows=encoding.pieces.rows,
                completes=encoding.complete,
                group=encoding.group,
            )


def _group(encoding: _Encoding, others: Iterable[_Encoding]) -> list[_Encoding]:
    """Return the encodings that are computed together with `encoding`, itself first: its group. If
    none of its pieces is planned yet, items of the same shape for which that holds, too, join it.
    """
    own = encoding.group, encoding.item.kind, encoding.item.shape, encoding.pieces
    found = {
        each.item.key: each
        for each in others
        if (each.group, each.item.kind, each.item.shape, each.pieces) == own
    }
    found.pop(encoding.item.key, None)
    return [encoding, *found.values()][: encoding.pieces.together]


def _items(sequence: Sequence) -> set[MediaKey]:
    """Return the keys of the items that a sequence's request has."""
    return {placed.item.key for placed in sequence.request.media}


def _rows_left(queue: list[_Encoding]) -> int:
    """Return the rows of hidden states left to encode."""
    return sum((each.pieces.count - each.done) * each.pieces.rows for each in queue)
