"""A model's weight files, in any format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from quire.core.errors import ModelError
from quire.models.weights.foreign_packing import from_foreign
from quire.models.weights.pieces import Pieces
from quire.models.weights.safetensors import find_shards, read_header, tensor_types


class WeightFiles(Protocol):
    """The weights of a model folder."""

    @property
    def default_dtype(self) -> mx.Dtype | None:
        """The type to compute in by default; None keeps the stored types."""
        ...

    def read(
        self, config: dict[str, Any], dtype: mx.Dtype | None, pieces: Pieces | None = None
    ) -> dict[str, mx.array]:
        """Return all tensors by name, as lazy arrays, quantised in MLX's forms.

        Args:
            dtype: dtype for tensors that have to be dequantised.
            pieces: notes the places of tensors, if only pieces of them are needed.

        Raises:
            ModelError: a file is damaged, or its quantisation is not supported.
        """
        ...

    @property
    def paths(self) -> list[Path]:
        """The files, in a fixed order."""
        ...


@dataclass(frozen=True)
class Safetensors:
    """Weights as Hugging Face and MLX store them."""

    shards: list[Path]

    @property
    def paths(self) -> list[Path]:
        return self.shards

    @property
    def default_dtype(self) -> None:
        return None

    def read(
        self, config: dict[str, Any], dtype: mx.Dtype | None, pieces: Pieces | None = None
    ) -> dict[str, mx.array]:
        weights: dict[str, mx.array] = {}
        types: dict[str, str] = {}
        for path in self.shards:
            # A truncated file is refused before anything is read.
            header = read_header(path)
            types |= tensor_types(header)
            try:
                tensors = mx.load(str(path))
            except (RuntimeError, ValueError) as error:  # a tensor type that MLX does not have
                raise ModelError(f"{path}: {error}") from error
            assert isinstance(tensors, dict)
            if pieces is not None:
                pieces.add(path, header, tensors)
            weights |= tensors
        return from_foreign(weights, config, dtype, types=types)


def find_weights(folder: Path) -> WeightFiles:
    """Return the weight files of a folder.

    Raises:
        ModelError: there are no weights, or a file is missing or damaged.
    """
    if parts := sorted(folder.glob("*.gguf")):
        # Imported late, since few models are GGUF files.
        from quire.models.weights.gguf.file import read_gguf
        from quire.models.weights.gguf.weights import GGUFWeights

        if not any(folder.glob("*.safetensors")):
            return GGUFWeights(read_gguf(parts[0]))
    return Safetensors(find_shards(folder))
