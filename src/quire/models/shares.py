"""How layers are divided among ranks: each kind of layer returns its share and its weights' cuts.

A rank has some of the heads of a layer, or some of the values between two products. The same
modules compute a share as the whole; the ranks' results are summed where a layer ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

from quire.core.errors import ModelError
from quire.device.ranks import Part

_SMALL = 1 << 20
"""Bytes of an array below which `mx.contiguous` may still return a view."""

Range = tuple[int, int]
"""Along an axis, from the first to before the last."""
Take = Callable[[mx.array, Sequence[Range], int], mx.array]
"""Returns ranges along an axis of an array, joined, as an array of its own."""
Run = tuple[int, int]
"""Number of pieces that stand side by side along an axis, and the size of each."""


@dataclass(frozen=True)
class Cut:
    """The cut of a module's parameters.

    Attributes:
        runs: what stands along the axis, in order. A rank gets its pieces of each run.
        axis: counted from the first, for weights and biases alike. Unused if `summed`.
        summed: the module's inputs are cut, the last axis of its weight. The ranks' products are
            summed, and the first rank alone adds the bias.
    """

    runs: tuple[Run, ...]
    axis: int = 0
    summed: bool = False

    def of(self, name: str, array: mx.array, part: Part, take: Take) -> mx.array:
        """Return a rank's piece of a parameter, which stays lazy. Packed inputs may be cut between
        groups only.

        Args:
            take: returns ranges of an array, such as `joined_pieces`.

        Raises:
            ModelError: a cut would go through a group.
        """
        if self.summed and name.endswith(".bias"):
            return array if part.rank == 0 else mx.zeros_like(array)
        if not self.runs:
            return array
        axis = array.ndim - 1 if self.summed else self.axis
        whole, found = sum(count * size for count, size in self.runs), array.shape[axis]
        pieces: list[Range] = []
        before = 0
        for count, size in self.runs:
            own = part.within(count)
            ends = [before + own.start * size, before + own.stop * size]
            if any(end * found % whole for end in ends):
                raise ModelError(
                    f"{name} cannot be cut into {part.size} parts between groups of packed weights",
                    setting="tensor_parallel",
                )
            first, last = (end * found // whole for end in ends)
            pieces.append((first, last))
            before += count * size
        return take(array, pieces, axis)


def own_piece(array: mx.array, first: int, last: int, axis: int = 0) -> mx.array:
    """Return `[first, last)` along an axis as an array of its own: a view would keep all of
    `array` in memory.
    """
    if array.nbytes < _SMALL:
        return mx.contiguous(mx.take(array, mx.arange(first, last), axis=axis))
    return mx.contiguous(array[(slice(None),) * axis + (slice(first, last),)])


def joined_pieces(array: mx.array, ranges: Sequence[Range], axis: int) -> mx.array:
    """Return ranges along an axis, joined, as an array of its own."""
    pieces = [own_piece(array, *each, axis=axis) for each in ranges]
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=axis)


Cuts = Mapping[str, Cut]
"""Cuts by module, or parameter, within a layer. All ranks have the other parameters whole."""


def rows(*runs: Run) -> Cut:
    """Cut what a module computes."""
    return Cut(runs)


def inputs(*runs: Run) -> Cut:
    """Cut what a module reads; the ranks' products are summed. Without runs, each rank's inputs are
    such products already, and only the bias is the first rank's.
    """
    return Cut(runs, summed=True)


def within(prefix: str, cuts: Cuts) -> dict[str, Cut]:
    """Return the cuts of a module's parts, named from outside of it."""
    return {f"{prefix}.{name}": each for name, each in cuts.items()}


def head_rows(vocab_size: int, part: Part) -> int:
    """Return the rows of the head that each rank has; rows of zeros fill up the last one's."""
    return -(-vocab_size // part.size)


@dataclass(frozen=True)
class Split:
    """A rank's part of a model.

    Attributes:
        group: most inputs that a group of packed weights has; 1 if no weights are packed.
    """

    part: Part
    group: int = 1

    def heads(self, count: int, what: str = "attention heads") -> int:
        """Return the number of heads of each rank.

        Raises:
            ModelError: there are not as many on each rank.
        """
        if count % self.part.size:
            raise ModelError(
                f"the model has {count} {what}, not a multiple of {self.part.size}",
                setting="tensor_parallel",
            )
        return count // self.part.size

    def few(self, count: int, what: str) -> int:
        """Return the number of heads of each rank, of which several ranks may have the same one."""
        if count < self.part.size and self.part.size % count == 0:
            return 1
        return self.heads(count, what)

    def divides(self, count: int) -> bool:
        """Return whether `width` can divide `count` values."""
        size, group = self.part.size, self.group
        whole = count % size == 0 and count // size % group == 0
        return whole or (count % group == 0 and count // group >= size)

    def width(self, count: int) -> tuple[int, Run]:
        """Return this rank's number of values between two products, and the run that they stand in.

        Ranks have as many each if packed weights can be cut so, else as many groups as possible.
        """
        size, group = self.part.size, self.group
        if not self.divides(count):
            raise ModelError(
                f"{count} values between two products, packed in groups of {group}, cannot be "
                f"divided by {size}",
                setting="tensor_parallel",
            )
        piece = group if count % size or count // size % group else count // size
        run = count // piece, piece
        return len(self.part.within(run[0])) * piece, run


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank of those that have consecutive layers each.

    Attributes:
        weights: of each rank; layers are divided in these proportions.
    """

    part: Part
    weights: tuple[int, ...]

    def parts(self, count: int, joined: Collection[int] = ()) -> list[range]:
        """Return each rank's part of `count` layers.

        Args:
            joined: layers that stay with the one before them.

        Raises:
            ModelError: the layers cannot be divided into so many parts.
        """
        ranks, total = self.part.size, sum(self.weights)
        cuts = [layer for layer in range(1, count) if layer not in joined]
        if len(cuts) + 1 < ranks:
            why = ", of which some share keys" if joined else ""
            raise ModelError(
                f"the model has {count} layers{why}: they can be divided among at most "
                f"{len(cuts) + 1} processes, not {ranks}",
                setting="pipeline",
            )
        ends = [0]
        for rank in range(ranks - 1):
            wanted = round(count * sum(self.weights[: rank + 1]) / total)
            later = ranks - 2 - rank
            possible = [cut for cut in cuts[: len(cuts) - later] if cut > ends[-1]]
            ends.append(min(possible, key=lambda cut: abs(cut - wanted)))
        return [range(*each) for each in pairwise([*ends, count])]
