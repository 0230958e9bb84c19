"""What a layer keeps between steps, declared. Frozen, hashable, free of arrays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullKV:
    """Keys and values of every token. Shapes a token: `[kv_heads, head_dim]` each."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class WindowKV:
    """Keys and values of which a query at p sees only the last `window`: (p - window, p].

    Attributes:
        sees_whole_images: a query within an image also sees the rest of it, up to its last token.
    """

    kv_heads: int
    head_dim: int
    window: int
    sees_whole_images: bool = False


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """State of fixed size that each token replaces.

    Attributes:
        arrays: (name, shape a sequence, dtype name; "" is the model's) of each part.
    """

    arrays: tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(frozen=True, slots=True)
class SharedKV:
    """A layer that reads the keys and values which an earlier layer wrote, and writes none."""

    layer: int


LayerSpec = FullKV | WindowKV | RecurrentState | SharedKV


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How pages are stored.

    Attributes:
        scheme: "plain", "page", "uniform" or "turbo".
        key_bits, value_bits: bits a code (3.5 is turbo's K3 V4); 0 for plain.
        group_size: elements that share a scale, for uniform.
        dtype: plain: "" (the model's), "float32", "float16" or "bfloat16".
        skip_layers: layers kept plain in a packed format, by index; part of a page's identity.
    """

    scheme: str = "plain"
    key_bits: float = 0
    value_bits: float = 0
    group_size: int = 64
    dtype: str = ""
    skip_layers: tuple[int, ...] = ()

    @property
    def seals(self) -> bool:
        """Whether a page is kept as written until it is full, and only then coded."""
        return self.scheme == "page"

    @property
    def name(self) -> str:
        """A short stable name, e.g. `plain`, `page-4`, `page-8/4`, `uniform-8-g64`."""
        if self.scheme == "plain":
            return f"plain-{self.dtype}" if self.dtype else "plain"
        bits = f"{self.key_bits:g}"
        if self.value_bits != self.key_bits:
            bits += f"/{self.value_bits:g}"
        group = f"-g{self.group_size}" if self.scheme == "uniform" else ""
        return f"{self.scheme}-{bits}{group}"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with equal specs: one page table a sequence serves them all.

    Attributes:
        layers: indices into the model's layers, in order.
    """

    index: int
    spec: FullKV | WindowKV | RecurrentState
    layers: tuple[int, ...]


def group_layers(layout: tuple[LayerSpec, ...]) -> tuple[KVGroup, ...]:
    """Gathers layers with equal specs into groups, in order of first appearance."""
    members: dict[FullKV | WindowKV | RecurrentState, list[int]] = {}
    for index, spec in enumerate(layout):
        if not isinstance(spec, SharedKV):
            members.setdefault(spec, []).append(index)
    return tuple(
        KVGroup(index, spec, tuple(layers)) for index, (spec, layers) in enumerate(members.items())
    )


def first_visible(spec: FullKV | WindowKV, position: int) -> int:
    """The first key position that a query at `position` sees."""
    if isinstance(spec, WindowKV):
        return max(0, position - spec.window + 1)
    return 0
