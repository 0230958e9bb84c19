"""Loads the linear layers that sentence-transformers puts behind pooling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from quire.core.errors import ModelError
from quire.core.folder import read_object
from quire.core.sentence_modules import read_modules
from quire.core.values import Values
from quire.device.activations import Activation
from quire.models.base import Module
from quire.models.weights.safetensors import read_header

_WEIGHTS = "model.safetensors"
_ACTIVATIONS: dict[str, Activation | None] = {
    "Identity": None,
    "GELU": nn.gelu,
    "ReLU": nn.relu,
    "Sigmoid": mx.sigmoid,
    "Tanh": mx.tanh,
}


class Projection(Module):
    """A linear layer of sentence-transformers, behind pooling.

    Args:
        activation: function behind it; None means none.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        activation: Activation | None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self._activation = activation

    def __call__(self, vector: mx.array) -> mx.array:
        """`[inputs]` -> `[outputs]`."""
        y: mx.array = self.linear(vector)
        return y if self._activation is None else self._activation(y)


def weight_files(folders: Sequence[Path]) -> list[Path]:
    """Return the files with the layers' weights.

    Raises:
        ModelError: a folder has none.
    """
    paths = [folder / _WEIGHTS for folder in folders]
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{path.parent} has no {_WEIGHTS}")
    return paths


def projections(folder: Path) -> tuple[Path, ...]:
    """Return the folders of a model's linear layers behind pooling."""
    stages = read_modules(folder)
    return () if stages is None else stages.projections


def open_projections(folders: Sequence[Path]) -> list[Projection]:
    """Return the layers in order, in float32.

    Raises:
        ModelError: a file is missing, damaged, or does not fit its configuration.
    """
    return [_opened(path) for path in weight_files(folders)]


def _opened(path: Path) -> Projection:
    file = path.parent / "config.json"
    settings = Values(read_object(file), file=file)
    name = settings.word("activation_function", default="Identity").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"{file}: activation_function {name!r} is not supported (known: {known})")
    inputs, outputs = settings.integer("in_features"), settings.integer("out_features")
    layer = Projection(
        inputs,
        outputs,
        bias=settings.flag("bias", default=True),
        activation=_ACTIVATIONS[name],
    )
    read_header(path)  # a truncated file is refused before anything is read
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    ready = {name: array.astype(mx.float32) for name, array in weights.items()}
    try:
        layer.load_weights(list(ready.items()))
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    return layer
