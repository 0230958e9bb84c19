"""Translates checkpoints' tensor names and layouts to those of this package's modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

import mlx.core as mx

from quire.models.layers.moe import stack_experts

_SUFFIXES = ("weight", "bias", "scales", "biases")

Weights = dict[str, mx.array]


def without_wrapper(name: str) -> str:
    """Return a language model tensor's name as in a text-only checkpoint.

    Multimodal checkpoints use the prefix `model.language_model.` (Hugging Face) or
    `language_model.model.` (mlx-vlm, also for text models); the head has no `model.`.
    """
    inner = name.removeprefix("model.").removeprefix("language_model.")
    return inner if inner.startswith("lm_head.") else "model." + inner.removeprefix("model.")


@dataclass(frozen=True)
class HeadNames:
    """Names, in checkpoints, of a head that predicts the token after the next.

    Attributes:
        layer: prefix of its layer's names, without `model.`.
        parts: its other modules, without `model.`, with their names here.
        copies: prefixes of copies of the model's own tensors, which are ignored.
    """

    layer: str
    parts: Mapping[str, str]
    copies: tuple[str, ...] = ()

    def own(self, name: str) -> str | None:
        """Return the name in a `PredictionHead` of one of its tensors, given without `model.`; None
        for others.
        """
        module, _, kind = name.rpartition(".")
        if module in self.parts:
            return f"{self.parts[module]}.{kind}"
        if name.startswith(self.layer) and not name.startswith(self.copies):
            return "layer." + name.removeprefix(self.layer)
        return None


@dataclass(frozen=True)
class Names:
    """How a family's checkpoints differ from this package's modules.

    Attributes:
        renamed: translations of parts of names, such as `self_attn.dense`. All apply at once, so a
            translated part is not translated again.
        fused: by a fused module's name, the modules that its rows are split into, in order, with
            their numbers of rows; the last one gets the rest.
        unused: prefixes, without `model.`, of tensors that are dropped.
        less_one: ends of names of tensors to which one is added.
        zero_if_absent: ends of names of tensors that are zero if the checkpoint lacks them.
        prepare: further conversion, applied first, to the checkpoint's own names.
        heads: names of the heads that checkpoints may have: the first predicts the token after
            the next, each further one the token after that.
        heads_read: number of heads whose tensors are read; those of others are among `unused`.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    less_one: tuple[str, ...] = ()
    zero_if_absent: tuple[str, ...] = ()
    prepare: Callable[[Weights], Weights] | None = None
    heads: tuple[HeadNames, ...] = ()
    heads_read: int = 0

    def count_heads(self, tensors: Iterable[str]) -> int:
        """Return how many heads, from the first one on, are among a checkpoint's tensors."""
        plain = [without_wrapper(name).removeprefix("model.") for name in tensors]
        there = (any(name.startswith(head.layer) for name in plain) for head in self.heads)
        return sum(takewhile(bool, there))

    def place(self, name: str) -> str | None:
        """Return the name in a text-only checkpoint of a tensor; None if nothing reads it."""
        inner = without_wrapper(name)
        plain = inner.removeprefix("model.")
        for number, head in enumerate(self.heads[: self.heads_read]):
            if (own := head.own(plain)) is not None:
                return f"heads.{number}.{own}"
        return None if plain.startswith(self.unused) else inner


def translate(weights: Weights, names: Names) -> Weights:
    """Convert a checkpoint's tensors to the names and layouts of a `DecoderModel`."""
    if names.prepare is not None:
        weights = names.prepare(weights)
    kept = {
        place: array
        for name, array in weights.items()
        # Old files contain rotations, which are constants.
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
    """Translate parts of a name, see `Names.renamed`."""
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
