"""From the names and layouts of checkpoints to those of this package's modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from quire.models.layers.moe import stack_experts

_SUFFIXES = ("weight", "bias", "scales", "biases")

Weights = dict[str, mx.array]


def without_wrapper(name: str) -> str:
    """Return the name in a text-only checkpoint of a tensor of the language model.

    A multimodal checkpoint holds it under `model.language_model.` (Hugging Face) or
    `language_model.model.` (mlx-vlm, which writes models of text so, too); the head has no `model.`
    in front.
    """
    inner = name.removeprefix("model.").removeprefix("language_model.")
    return inner if inner.startswith("lm_head.") else "model." + inner.removeprefix("model.")


@dataclass(frozen=True)
class HeadNames:
    """How checkpoints name a head that predicts the token after the next.

    Attributes:
        layer: the beginning of the names of its layer, without `model.`.
        parts: its other modules, without `model.`, and what they are here.
        copies: beginnings of names of copies of the model's own tensors, which nothing reads.
    """

    layer: str
    parts: Mapping[str, str]
    copies: tuple[str, ...] = ()

    def own(self, name: str) -> str | None:
        """Return the name here of a tensor, which is given without `model.`; None if not its."""
        module, _, kind = name.rpartition(".")
        if module in self.parts:
            return f"head.{self.parts[module]}.{kind}"
        if name.startswith(self.layer) and not name.startswith(self.copies):
            return "head.layer." + name.removeprefix(self.layer)
        return None


@dataclass(frozen=True)
class Names:
    """How a family's checkpoints differ from this package's modules.

    Attributes:
        renamed: parts of names, such as `self_attn.dense`, and what they are here. All are looked
            for at once: what one puts in is not renamed by another.
        fused: last parts of modules whose rows are those of several here, in order, and how many
            rows each has; the last takes what is left.
        unused: beginnings of names, without `model.`, of what nothing here reads.
        less_one: ends of names of what is stored less one.
        zero_if_absent: ends of names of what conversions leave out where it may be zero.
        prepare: changes what no other rule describes. It gets the checkpoint's own names.
        head: a head that predicts the token after the next, in checkpoints that have one.
        reads_head: whether its tensors are read; else they are among `unused`.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    less_one: tuple[str, ...] = ()
    zero_if_absent: tuple[str, ...] = ()
    prepare: Callable[[Weights], Weights] | None = None
    head: HeadNames | None = None
    reads_head: bool = False

    def has_head(self, tensors: Iterable[str]) -> bool:
        """Return whether a head is among a checkpoint's tensors."""
        head = self.head
        return head is not None and any(
            without_wrapper(name).removeprefix("model.").startswith(head.layer) for name in tensors
        )

    def place(self, name: str) -> str | None:
        """Return the name in a text-only checkpoint of a tensor; None if nothing reads it."""
        inner = without_wrapper(name)
        plain = inner.removeprefix("model.")
        own = self.head.own(plain) if self.reads_head and self.head is not None else None
        if own is not None:
            return own
        return None if plain.startswith(self.unused) else inner


def translate(weights: Weights, names: Names) -> Weights:
    """Return the tensors of a checkpoint by the names, and in the layouts, of a `DecoderModel`."""
    if names.prepare is not None:
        weights = names.prepare(weights)
    kept = {
        place: array
        for name, array in weights.items()
        # Rotations are constants that old files carry along.
        if not name.endswith("rotary_emb.inv_freq") and (place := names.place(name)) is not None
    }
    named = {renamed(name, names.renamed): array for name, array in kept.items()}
    ready = stack_experts(_split(named, names.fused))
    for name, array in ready.items():
        if name.endswith(names.less_one):
            ready[name] = array + 1.0
    return ready


def float_type(weights: Weights) -> mx.Dtype:
    """Return the type of a checkpoint's floats, for tensors that a family adds."""
    floats = (each.dtype for each in weights.values() if mx.issubdtype(each.dtype, mx.floating))
    return next(floats, mx.float32)


def renamed(name: str, parts: Mapping[str, str]) -> str:
    """Return the name with its parts named as here, see `Names.renamed`."""
    if not parts:
        return name
    longest_first = sorted(parts, key=len, reverse=True)
    found = "|".join(re.escape(part) for part in longest_first)
    return re.sub(rf"(?<![^.])(?:{found})(?![^.])", lambda match: parts[match[0]], name)


def _split(weights: Weights, fused: Mapping[str, tuple[tuple[str, int], ...]]) -> Weights:
    split: Weights = {}
    for name, array in weights.items():
        *path, module, kind = name.split(".")
        if module not in fused or kind not in _SUFFIXES:
            split[name] = array
            continue
        start = 0
        for part, rows in fused[module]:
            split[".".join([*path, part, kind])] = array[start : start + rows or None]
            start += rows
    return split
