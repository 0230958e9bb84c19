"""Frozen specs of the state that layers keep between steps, and everything derived from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.core.arrays import Ints

NO_GROUP = -1
"""Group of a layer that keeps nothing."""


class LayerSpec(ABC):
    """The state that one layer keeps between steps."""

    __slots__ = ()

    @property
    @abstractmethod
    def kept(self) -> GroupSpec | None:
        """The spec of the layer's own state; None if it reads another layer's, or keeps nothing."""

    @property
    @abstractmethod
    def lacks_kv(self) -> str:
        """Why no KV format applies to the layer; empty if one does."""

    @property
    def sees_all(self) -> bool:
        """Whether a sequence needs the layer's blocks of all its tokens to continue."""
        return False

    @property
    def uncached(self) -> Bidirectional | None:
        """The spec itself if the layer attends in both directions and keeps nothing; else None."""
        return None

    def owner(self, layer: int) -> int:
        """Return the layer whose blocks layer number `layer` reads: itself, unless it shares."""
        return layer


class GroupSpec(LayerSpec):
    """The state of the layers of one KV group, in the blocks of a sequence's block table."""

    __slots__ = ()

    @property
    def kept(self) -> GroupSpec | None:
        return self

    @property
    def stored(self) -> KVSpec | None:
        """The spec itself if it keeps keys and values, of tokens or of media; else None."""
        return None

    @property
    def attention(self) -> AttentionSpec | None:
        """The spec itself if it keeps keys and values of the sequence's tokens; else None."""
        return None

    @property
    def cross(self) -> CrossKV | None:
        """The spec itself if it keeps keys and values of media; else None."""
        return None

    @property
    def recurrent(self) -> RecurrentState | None:
        """The spec itself if it keeps recurrent state; else None."""
        return None

    @property
    def bidirectional_media(self) -> bool:
        """Whether a query within an image also sees the rest of it, up to its last token."""
        return False

    @abstractmethod
    def first_needed(self, length: int) -> int:
        """Return the first token whose block a sequence needs to continue after `length` tokens."""

    @abstractmethod
    def blocks_at_start(self, missing: int) -> int:
        """Return the number of blocks to allocate on admission.

        Args:
            missing: blocks that the prompt's tokens fill or start, less those that are reused.
        """

    @abstractmethod
    def max_blocks(self, tokens: int, block_size: int, image: int) -> int:
        """Return the most blocks that a sequence of so many tokens ever holds.

        Args:
            image: tokens of its largest image, which is computed in one step.
        """


@dataclass(frozen=True, slots=True)
class KVSpec(GroupSpec):
    """Keys and values, `[kv_heads, head_dim]` and `[kv_heads, value_dim]` each.

    Attributes:
        value_dim: size of a value; 0 means `head_dim`.
        value_in_key: a value is the start of its key. Blocks hold it once, packed ones with the
            greater number of bits that the format has for keys and for values.
        index_dim: size of one more key that a token has, by which an indexer chooses the keys that
            a query attends to; 0 without. Stored as computed, in any format. Only where keys have
            one head.
    """

    kv_heads: int
    head_dim: int
    value_dim: int = field(default=0, kw_only=True)
    value_in_key: bool = field(default=False, kw_only=True)
    index_dim: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        assert not self.index_dim or self.kv_heads == 1, "an indexer chooses for one head of keys"
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)

    @property
    def stored(self) -> KVSpec | None:
        return self

    @property
    def lacks_kv(self) -> str:
        return ""

    @property
    @abstractmethod
    def visible(self) -> str:
        """The keys that a query sees, as text: "all" or "512 tokens"."""

    @abstractmethod
    def blocks_between_steps(self, tokens: int, block_size: int) -> int:
        """Return the blocks that a sequence of so many tokens holds between steps, without
        media.
        """


@dataclass(frozen=True, slots=True)
class AttentionSpec(KVSpec):
    """Keys and values of a sequence's tokens."""

    @property
    def attention(self) -> AttentionSpec | None:
        return self

    @property
    def moves(self) -> bool:
        """Whether `first_visible` grows as the position does, but for being at least 0."""
        return True

    @abstractmethod
    def first_visible(self, position: int) -> int:
        """Return the first key that a query at `position` sees."""

    def first_visible_of(self, positions: Sequence[int]) -> list[int]:
        """Return `first_visible` of few queries."""
        return [self.first_visible(position) for position in positions]

    @abstractmethod
    def first_visible_each(self, positions: Ints) -> Ints:
        """Return `first_visible` of many queries."""

    def first_needed(self, length: int) -> int:
        return self.first_visible(length)


@dataclass(frozen=True, slots=True)
class FullKV(AttentionSpec):
    """Keys and values of every token.

    Attributes:
        bidirectional_media: a query within an image also sees the rest of it, up to its last token.
    """

    bidirectional_media: bool = False

    @property
    def sees_all(self) -> bool:
        return True

    @property
    def visible(self) -> str:
        return "all"

    def first_visible(self, position: int) -> int:
        return 0

    def first_visible_of(self, positions: Sequence[int]) -> list[int]:
        return [0] * len(positions)

    def first_visible_each(self, positions: Ints) -> Ints:
        return np.zeros_like(positions)

    def blocks_at_start(self, missing: int) -> int:
        return missing

    def blocks_between_steps(self, tokens: int, block_size: int) -> int:
        return -(-tokens // block_size)

    def max_blocks(self, tokens: int, block_size: int, image: int) -> int:
        return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class WindowKV(AttentionSpec):
    """Keys and values of which a query at p sees only the last `window`: (p - window, p].

    Attributes:
        bidirectional_media: a query within an image also sees the rest of it, up to its last token.
    """

    window: int
    bidirectional_media: bool = False

    @property
    def visible(self) -> str:
        return f"{self.window} tokens"

    def first_visible(self, position: int) -> int:
        return max(0, position - self.window + 1)

    def first_visible_each(self, positions: Ints) -> Ints:
        return np.maximum(positions - self.window + 1, 0)

    def blocks_at_start(self, missing: int) -> int:
        return 1  # the others as its chunks come to them

    def blocks_between_steps(self, tokens: int, block_size: int) -> int:
        return min(-(-tokens // block_size), -(-self.window // block_size) + 1)

    def max_blocks(self, tokens: int, block_size: int, image: int) -> int:
        whole = -(-image // block_size) if self.bidirectional_media else 0
        return min(-(-tokens // block_size), self.window // block_size + 3 + whole)


@dataclass(frozen=True, slots=True)
class ChunkedKV(AttentionSpec):
    """Keys and values of which a query sees those of its chunk. Positions are divided into chunks
    of `chunk`.
    """

    chunk: int

    @property
    def visible(self) -> str:
        return f"its chunk of {self.chunk} tokens"

    @property
    def moves(self) -> bool:
        return False

    def first_visible(self, position: int) -> int:
        return position // self.chunk * self.chunk

    def first_visible_each(self, positions: Ints) -> Ints:
        return positions // self.chunk * self.chunk

    def blocks_at_start(self, missing: int) -> int:
        return 1  # the others as its chunks come to them

    def blocks_between_steps(self, tokens: int, block_size: int) -> int:
        return min(-(-tokens // block_size), -(-self.chunk // block_size) + 1)

    def max_blocks(self, tokens: int, block_size: int, image: int) -> int:
        return min(-(-tokens // block_size), self.chunk // block_size + 3)


@dataclass(frozen=True, slots=True)
class CrossKV(KVSpec):
    """Keys and values computed from an encoder's rows, which tokens see through cross-attention.

    They belong to the media, not to tokens, so sequences with the same media share blocks.
    """

    @property
    def cross(self) -> CrossKV | None:
        return self

    @property
    def visible(self) -> str:
        return "its media"

    def first_needed(self, length: int) -> int:
        return length

    def blocks_at_start(self, missing: int) -> int:
        return 0

    def blocks_between_steps(self, tokens: int, block_size: int) -> int:
        return 0

    def max_blocks(self, tokens: int, block_size: int, image: int) -> int:
        return 0  # those of media are counted with the media


@dataclass(frozen=True, slots=True)
class RecurrentState(GroupSpec):
    """A state of fixed size that each token updates: one block for each sequence or snapshot.

    Attributes:
        arrays: (name, shape a sequence, dtype name; "" is the model's) of each part.
    """

    arrays: tuple[tuple[str, tuple[int, ...], str], ...]

    @property
    def recurrent(self) -> RecurrentState | None:
        return self

    @property
    def lacks_kv(self) -> str:
        return "keeps no keys and values"

    def first_needed(self, length: int) -> int:
        return max(0, length - 1)  # the state after the last token

    def blocks_at_start(self, missing: int) -> int:
        return 1

    def max_blocks(self, tokens: int, block_size: int, image: int) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class SharedKV(LayerSpec):
    """A layer that reads the keys and values which an earlier layer wrote, and writes none."""

    layer: int

    @property
    def kept(self) -> GroupSpec | None:
        return None

    @property
    def lacks_kv(self) -> str:
        return f"reads the cache of {self.layer}"

    def owner(self, layer: int) -> int:
        return self.layer


@dataclass(frozen=True, slots=True)
class Bidirectional(LayerSpec):
    """Attention in both directions among a sequence's tokens, as encoders have it.

    Nothing is kept: a step computes whole sequences.

    Attributes:
        reach: the most tokens between a query and a key that it sees; None means all keys.
    """

    reach: int | None = None

    @property
    def kept(self) -> GroupSpec | None:
        return None

    @property
    def uncached(self) -> Bidirectional | None:
        return self

    @property
    def lacks_kv(self) -> str:
        return "keeps no keys and values"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with equal specs: one block table a sequence serves them all.

    Attributes:
        layers: indices into the model's layers, in order.
    """

    index: int
    spec: GroupSpec
    layers: tuple[int, ...]


def group_layers(layout: tuple[LayerSpec, ...]) -> tuple[KVGroup, ...]:
    """Group layers with equal specs, in order of first appearance."""
    members: dict[GroupSpec, list[int]] = {}
    for index, spec in enumerate(layout):
        if spec.kept is not None:
            members.setdefault(spec.kept, []).append(index)
    return tuple(
        KVGroup(index, spec, tuple(layers)) for index, (spec, layers) in enumerate(members.items())
    )


def attention_groups(groups: tuple[KVGroup, ...]) -> dict[int, AttentionSpec]:
    """Return the specs of the groups that keep keys and values, by the group's index."""
    return {g.index: g.spec.attention for g in groups if g.spec.attention is not None}


def stored_groups(groups: tuple[KVGroup, ...]) -> dict[int, KVSpec]:
    """Return specs of the groups that keep keys and values of any kind, by the group's index."""
    return {g.index: g.spec.stored for g in groups if g.spec.stored is not None}


def cross_groups(groups: tuple[KVGroup, ...]) -> tuple[int, ...]:
    """Return the groups that keep keys and values of media."""
    return tuple(g.index for g in groups if g.spec.cross is not None)


def recurrent_groups(groups: tuple[KVGroup, ...]) -> dict[int, RecurrentState]:
    """Return the specs of the groups that keep recurrent state, by the group's index."""
    return {g.index: g.spec.recurrent for g in groups if g.spec.recurrent is not None}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV group and the index within it of each layer of a model.

    Attributes:
        group: by layer, the index of the group that serves it; a sharing layer has its owner's, an
            uncached layer `NO_GROUP`.
        owner: by layer, the layer whose blocks it reads.
        uncached: specs of the layers that keep nothing, by layer.
    """

    groups: tuple[KVGroup, ...]
    group: tuple[int, ...]
    owner: tuple[int, ...]
    uncached: Mapping[int, Bidirectional] = field(default_factory=dict)

    @property
    def has_indexers(self) -> bool:
        """Whether indexers choose the keys that rows of any layer see."""
        specs = (group.spec.attention for group in self.groups)
        return any(spec is not None and spec.index_dim for spec in specs)

    @staticmethod
    def of(layout: tuple[LayerSpec, ...]) -> KVLayout:
        """Group the layers, and resolve those that share another layer's keys and values."""
        groups = group_layers(layout)
        home = {layer: group.index for group in groups for layer in group.layers}
        owner = tuple(spec.owner(layer) for layer, spec in enumerate(layout))
        uncached = {n: spec.uncached for n, spec in enumerate(layout) if spec.uncached is not None}
        group = tuple(home.get(layer, NO_GROUP) for layer in owner)
        return KVLayout(groups, group, owner, uncached=uncached)
