"""Plans which matrices of a checkpoint are quantised, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import mlx.core as mx
import mlx.nn as nn

from quire.core.errors import ModelError
from quire.device.weights import Packing
from quire.models.base import LanguageModel, named_layers
from quire.models.layers.moe import ExpertLinear
from quire.models.weights.names import Weights

EMBEDDINGS, HEAD, ROUTERS = KINDS = ("embeddings", "head", "routers")
"""Words for kinds of layers in a `Choice`."""

_PACKABLE = (nn.Linear, nn.Embedding, ExpertLinear)
_PROBE = Packing(group_size=32, bits=4, mode="affine")
_ROUTERS = (".gate", ".router", ".router.proj", ".shared_expert_gate")
_NUMBERED = re.compile(r"(.*)\.experts\.(\d+)\.((?:gate|up|down)_proj\.\w+)")
_LANGUAGE = ("model.", "lm_head.")
"""Prefixes of modules outside media encoders, which are not quantised."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The quantisation of some layers.

    Attributes:
        pattern: one of `KINDS`, or a shell pattern of names in the checkpoint without `.weight`.
        packing: the quantisation; None for none.
    """

    pattern: str
    packing: Packing | None

    def covers(self, name: str, kind: str) -> bool:
        """Return whether the choice applies to matrix `name` of a layer of this kind."""
        if self.pattern in KINDS:
            return self.pattern == kind
        return fnmatchcase(name.removesuffix(".weight"), self.pattern)


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """The quantisation of each matrix of the language model.

    Attributes:
        weights: the checkpoint's tensors, with experts stacked as in MLX's conversions.
        packings: quantisation by tensor name.
        left: matrices that cannot be quantised as requested, with the reason.
    """

    weights: Weights
    packings: Mapping[str, Packing]
    left: Mapping[str, str]


def plan_packing(
    model: LanguageModel, read: Weights, default: Packing, choices: Sequence[Choice] = ()
) -> PackingPlan:
    """Decide how each matrix of a checkpoint is quantised.

    Args:
        read: the checkpoint's tensors under its own names; not changed.
        choices: the last one that covers a matrix applies, or else `default`.

    Raises:
        ModelError: a choice covers no matrix.
    """
    weights = _with_stacked_experts(model, read)
    packings: dict[str, Packing] = {}
    left: dict[str, str] = {}
    unused = {choice.pattern for choice in choices if choice.pattern not in KINDS}
    for names, kind in _packable(model, weights):
        for name in names:
            chosen: Packing | None = default
            for choice in choices:
                if choice.covers(name, kind):
                    unused.discard(choice.pattern)
                    chosen = choice.packing
            if chosen is None:
                continue
            width = weights[name].shape[-1]
            if width % chosen.group_size:
                left[name] = f"rows of {width} are not whole groups of {chosen.group_size}"
            else:
                packings[name] = chosen
    if unused:
        raise ModelError(f"no matrix of the model is covered by {min(unused)!r}")
    return PackingPlan(weights, packings, left)


def _with_stacked_experts(model: LanguageModel, read: Weights) -> Weights:
    """Return the tensors with experts stacked and named as in MLX's conversions.

    MLX's libraries read quantised experts only in this layout. Families with other layouts keep
    theirs.
    """
    changed: Weights = {}
    numbered: dict[str, dict[int, mx.array]] = {}
    for name, array in read.items():
        base, _, part = name.rpartition(".experts.")
        if match := _NUMBERED.fullmatch(name):
            base, number, part = match.groups()
            numbered.setdefault(f"{base}.switch_mlp.{part}", {})[int(number)] = array
        elif base and part == "gate_up_proj" and array.ndim == 3:
            gate, up = mx.split(array, 2, axis=1)
            changed[f"{base}.switch_mlp.gate_proj.weight"] = gate
            changed[f"{base}.switch_mlp.up_proj.weight"] = up
        elif base and part in ("up_proj", "down_proj") and array.ndim == 3:
            changed[f"{base}.switch_mlp.{part}.weight"] = array
        else:
            changed[name] = array
    if changed.keys() == read.keys():
        return read
    for name, experts in numbered.items():
        changed[name] = mx.stack([experts[number] for number in sorted(experts)])
    usual, own = model.sanitize(dict(read)), _sanitized(model, changed)
    if own.keys() != usual.keys() or any(own[n].shape != usual[n].shape for n in usual):
        return read
    stacked = next(n for n, array in own.items() if array.ndim == 3 and ".experts." in n)
    same = mx.array_equal(own[stacked][0], usual[stacked][0]).item()
    return changed if same else read


def _packable(model: LanguageModel, weights: Weights) -> list[tuple[list[str], str]]:
    """Return the names of matrices that can be quantised, grouped, with the kind of layer they
    belong to.

    This is found by trial, without computing: tensors whose names differ only by numbers are
    replaced by empty codes, scales and biases. The model's `sanitize` must move these to layers
    that can be quantised, and change nothing else.
    """
    similar: dict[str, list[str]] = {}
    for name, array in weights.items():
        matrix = name.endswith(".weight") and array.ndim in (2, 3)
        if matrix and mx.issubdtype(array.dtype, mx.floating):
            similar.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    usual, layers = model.sanitize(dict(weights)), named_layers(model)
    found = []
    for names in similar.values():
        if (kind := _kind(model, weights, names, usual=usual, layers=layers)) is not None:
            found.append((names, kind))
    return found


def _kind(
    model: LanguageModel,
    weights: Weights,
    names: Sequence[str],
    usual: Weights,
    layers: Mapping[str, nn.Module],
) -> str | None:
    """Return the kind of layers that matrices belong to, "" for an ordinary one; None if they
    cannot be quantised.
    """
    trial = dict(weights)
    for name in names:
        trial |= _empty(name, weights[name].shape)
    packed = _sanitized(model, trial)
    paths = [name.removesuffix(".scales") for name in packed if name.endswith(".scales")]
    added = {f"{path}.{part}" for path in paths for part in ("scales", "biases")}
    if not paths or packed.keys() - added != usual.keys() or not added <= packed.keys():
        return None
    for path in paths:
        layer = layers.get(path)
        if not path.startswith(_LANGUAGE) and path != "lm_head":
            return None
        if not isinstance(layer, _PACKABLE) or not _fits(packed, path, usual):
            return None
    path = paths[0]
    if path == "lm_head":
        return HEAD
    if isinstance(layers[path], nn.Embedding):
        return EMBEDDINGS
    return ROUTERS if path.endswith(_ROUTERS) else ""


def _fits(packed: Weights, path: str, usual: Weights) -> bool:
    *rows, width = usual[f"{path}.weight"].shape
    expected = _empty(f"{path}.weight", (*rows, width))
    return all(packed[name].shape == array.shape for name, array in expected.items())


def _empty(name: str, shape: Sequence[int]) -> Weights:
    """Return lazy tensors with the shapes of a quantised matrix."""
    base, (*rows, width) = name.removesuffix(".weight"), shape
    groups = (*rows, -(-width // _PROBE.group_size))
    return {
        name: mx.zeros((*rows, width * _PROBE.bits // 32), dtype=mx.uint32),
        f"{base}.scales": mx.zeros(groups),
        f"{base}.biases": mx.zeros(groups),
    }


def _sanitized(model: LanguageModel, weights: Weights) -> Weights:
    """Return the tensors under the model's names; none if the family's `sanitize` refuses them."""
    try:
        return model.sanitize(dict(weights))
    except (ModelError, ValueError, IndexError, KeyError):
        return {}
