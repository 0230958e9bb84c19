"""The factors of an adapter for a model's matrices, for requests that name the adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from quire.core.errors import ModelError
from quire.models.base import LanguageModel, named_layers
from quire.models.layers.linear import Linear, PackedLinear
from quire.models.weights.names import Weights, without_wrapper

Factors = tuple[mx.array, mx.array]
"""Two matrices, `[in, rank]` and `[rank, out]`; the second one is scaled."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's factors.

    Attributes:
        factors: factors by the path of their linear layer.
        identity: a hash of the adapter's files.
    """

    factors: Mapping[str, Factors]
    identity: str


class Placing:
    """Finds the layers to which an adapter's factors belong.

    The model's own `sanitize` determines this: it is applied to the checkpoint with the second
    factors in place of their matrices. So layers that are fused in the checkpoint get their own
    rows.

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
        self._names = {without_wrapper(name): name for name in read}

    def placed(self, modules: Mapping[str, Factors]) -> dict[str, Factors]:
        """Return factors by the paths of the model's layers.

        Args:
            modules: factors `[rank, in]` and scaled `[out, rank]` by the adapter's module names.

        Raises:
            ModelError: factors belong to no layer, or have the wrong shape.
        """
        names = {module: self._name(module) for module in modules}
        outer = {names[module]: factors[1] for module, factors in modules.items()}
        places = {id(array): path for path, array in self._sanitized(outer).items()}
        found: dict[str, Factors] = {}
        for module, (first, second) in modules.items():
            whole = places.get(id(second))
            parts = {whole: second} if whole else self._parts(names[module], second)
            for name, rows in parts.items():
                path = name.removesuffix(".weight")
                self._check(module, path, first, rows)
                found[path] = first.T.astype(self._dtype), rows.T.astype(self._dtype)
        mx.eval([list(factors) for factors in found.values()])
        return found

    def _sanitized(self, outer: Weights) -> Weights:
        try:
            return self._sanitize({**self._read, **outer})
        except (ValueError, IndexError) as error:  # the family reshapes this matrix
            raise self._refused(next(iter(outer))) from error

    def _parts(self, name: str, second: mx.array) -> Weights:
        """Return the rows of one matrix by the layers to which `sanitize` moved them."""
        usual, changed = self._sanitized({}), self._sanitized({name: second})
        parts = {path: array for path, array in changed.items() if array.shape != usual[path].shape}
        if not parts or sum(len(array) for array in parts.values()) != len(second):
            raise self._refused(name)
        return parts

    def _name(self, module: str) -> str:
        found = self._names.get(without_wrapper(f"{module}.weight"))
        if found is None:
            raise ModelError(f"{self._file}: the model has no matrix {module!r}")
        return found

    def _check(self, module: str, path: str, first: mx.array, rows: mx.array) -> None:
        layer = self._layers.get(path)
        if not isinstance(layer, Linear | PackedLinear) or path.startswith("lm_head"):
            raise self._refused(module)
        outputs, inputs = layer["weight"].shape
        if isinstance(layer, PackedLinear):
            inputs = inputs * 32 // layer.bits
        if (len(rows), first.shape[1]) != (outputs, inputs):
            raise ModelError(
                f"{self._file}: the factors of {module!r} make {len(rows)} x {first.shape[1]}, "
                f"the weight has {outputs} x {inputs}"
            )

    def _refused(self, name: str) -> ModelError:
        return ModelError(
            f"{self._file}: {name!r} cannot be adapted per request; merge the adapter "
            "into the weights (--adapter FOLDER)"
        )
