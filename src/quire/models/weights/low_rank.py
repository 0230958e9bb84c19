"""The factors of an adapter for a model's matrices, for requests that name the adapter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from quire.core.errors import ModelError
from quire.models.base import LanguageModel, named_layers
from quire.models.layers.linear import Linear, PackedLinear
from quire.models.layers.moe import ExpertLinear, PackedExpertLinear
from quire.models.weights.expert_factors import Factors
from quire.models.weights.names import Weights

_NUMBERED = re.compile(r"(.*\.experts\.)(\d+)(\..+)")
_LAYERS = (Linear, PackedLinear, ExpertLinear, PackedExpertLinear)
_TAG = 1_000_003
"""Sizes from here on mark arrays: no matrix has so many columns."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's factors.

    Attributes:
        factors: `[..., in, rank]` and `[..., rank, out]` by the path of their linear layer; the
            second one is scaled. Those of experts start with an axis of experts.
        identity: a hash of the adapter's files.
    """

    factors: Mapping[str, Factors]
    identity: str


@dataclass(frozen=True, slots=True)
class _Unit:
    """Tensors of a checkpoint that become one matrix of the model, or rows of several.

    Attributes:
        names: those of single experts in order, else one.
        first, second: `[..., rank, in]` and `[..., out, rank]` for each tensor, of one rank.
    """

    names: Sequence[str]
    first: Sequence[mx.array]
    second: Sequence[mx.array]

    @property
    def inner(self) -> mx.array:
        """The first factors, with an axis of experts if there are several."""
        return self.first[0] if len(self.names) == 1 else mx.stack([*self.first])

    def marked(self, tag: int, *, turned: bool) -> Weights:
        """Return arrays in the shapes of the factors that stand for the tensors, of rank `tag`."""
        shapes = [(*each.shape[:-2], each.shape[-2]) for each in self.second]
        if turned:
            shapes = [(*each.shape[:-2], each.shape[-1]) for each in self.first]
            return {
                name: mx.zeros((*lead, tag, size))
                for name, (*lead, size) in zip(self.names, shapes, strict=True)
            }
        return {
            name: mx.zeros((*shape, tag)) for name, shape in zip(self.names, shapes, strict=True)
        }


class Placing:
    """Finds the layers to which an adapter's factors belong.

    The model's own `sanitize` determines this: it is applied to the checkpoint with the second
    factors in place of their matrices. So layers that are fused in the checkpoint get their own
    rows, and experts are stacked. A first pass marks each factor by a rank that no other has.

    Args:
        read: the checkpoint's tensors under its own names; they are not evaluated.
        dtype: dtype of the factors.
        file: the adapter's file, for errors.
    """

    def __init__(self, read: Weights, model: LanguageModel, dtype: mx.Dtype, file: Path) -> None:
        self._read = read
        self._sanitize: Callable[[Weights], Weights] = model.sanitize
        self._layers = named_layers(model)
        self._dtype = dtype
        self._file = file

    def placed(self, changes: Mapping[str, Factors]) -> dict[str, Factors]:
        """Return factors by the paths of the model's layers.

        Args:
            changes: by the checkpoint's own names.

        Raises:
            ModelError: factors belong to no layer, or have the wrong shape.
        """
        units = self._units(changes)
        straight = self._paths(units, turned=False)
        rest = [unit for unit in units if not any(each is unit for each in straight.values())]
        turned = self._paths(rest, turned=True) if rest else {}
        for unit in rest:
            if not any(each is unit for each in turned.values()):
                raise self._refused(unit.names[0])
        put: Weights = {}
        for unit in units:
            if any(each is unit for each in rest):
                put |= dict(zip(unit.names, unit.first, strict=True))
            else:
                put |= dict(zip(unit.names, unit.second, strict=True))
        ready = self._sanitized(put)
        found: dict[str, Factors] = {}
        for path, unit in straight.items():
            found[path] = self._factors(path, unit, unit.inner, outer=ready[f"{path}.weight"])
        for path, unit in turned.items():
            inner = unit.second[0].swapaxes(-1, -2)
            found[path] = self._factors(path, unit, inner, outer=ready[f"{path}.weight"])
        mx.eval([list(factors) for factors in found.values()])
        return found

    def _units(self, changes: Mapping[str, Factors]) -> list[_Unit]:
        """Join the changes of experts that become one stack; experts without one get zeros."""
        units = []
        experts: dict[tuple[str, str], dict[int, Factors]] = {}
        for name, factors in changes.items():
            if numbered := _NUMBERED.fullmatch(name):
                own = experts.setdefault((numbered[1], numbered[3]), {})
                own[int(numbered[2])] = factors
            else:
                units.append(_Unit([name], [factors[0]], [factors[1]]))
        numbers: dict[tuple[str, str], list[int]] = {each: [] for each in experts}
        for found in map(_NUMBERED.fullmatch, self._read if experts else ()):
            if found and (found[1], found[3]) in numbers:
                numbers[found[1], found[3]].append(int(found[2]))
        for (before, after), own in experts.items():
            every = sorted(numbers[before, after])
            names = [f"{before}{number}{after}" for number in every]
            units.append(_Unit(names, *_of_one_rank([own.get(number) for number in every])))
        return units

    def _paths(self, units: Sequence[_Unit], *, turned: bool) -> dict[str, _Unit]:
        """Return the units by the paths of the layers that they become.

        Args:
            turned: put the first factors in the places of the tensors, which the family transposes.
        """
        marks: Weights = {}
        for number, unit in enumerate(units):
            marks |= unit.marked(_TAG + number, turned=turned)
        found: dict[str, _Unit] = {}
        for name, array in self._sanitized(marks).items():
            number = array.shape[-1] - _TAG if array.ndim else -1
            if 0 <= number < len(units):
                found[name.removesuffix(".weight")] = units[number]
        return found

    def _sanitized(self, outer: Weights) -> Weights:
        try:
            return self._sanitize({**self._read, **outer})
        except (ValueError, IndexError) as error:  # the family reshapes this matrix
            raise self._refused(next(iter(outer))) from error

    def _factors(self, path: str, unit: _Unit, inner: mx.array, outer: mx.array) -> Factors:
        """Return the factors of a layer, from `[..., rank, in]` and `[..., out, rank]`."""
        layer, name = self._layers.get(path), unit.names[0]
        if not isinstance(layer, _LAYERS) or path.startswith("lm_head"):
            raise self._refused(name)
        *lead, outputs, inputs = layer["weight"].shape
        if isinstance(layer, PackedLinear | PackedExpertLinear):
            inputs = inputs * 32 // layer.bits
        if (outer.shape[:-1], inner.shape[-1]) != ((*lead, outputs), inputs):
            raise ModelError(
                f"{self._file}: the factors of {name!r} make {outer.shape[-2]} x "
                f"{inner.shape[-1]}, the weight has {outputs} x {inputs}"
            )
        first, second = (each.swapaxes(-1, -2).astype(self._dtype) for each in (inner, outer))
        return first, second

    def _refused(self, name: str) -> ModelError:
        return ModelError(
            f"{self._file}: {name!r} cannot be adapted per request; merge the adapter "
            "into the weights (--adapter FOLDER)"
        )


def _of_one_rank(factors: Sequence[Factors | None]) -> tuple[list[mx.array], list[mx.array]]:
    """Return first and second factors, padded with zeros to one rank; None stands for zeros."""
    known = [each for each in factors if each is not None]
    rank = max(first.shape[0] for first, _ in known)
    first, second = known[0]
    none = mx.zeros((0, first.shape[1])), mx.zeros((len(second), 0))
    pairs = [each or none for each in factors]
    return (
        [mx.pad(one, [(0, rank - len(one)), (0, 0)]) for one, _ in pairs],
        [mx.pad(other, [(0, 0), (0, rank - other.shape[1])]) for _, other in pairs],
    )
