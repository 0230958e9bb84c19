"""Reads a GGUF file's tensors under this package's names, quantised as in MLX where possible."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from gguf.constants import GGMLQuantizationType

from quire.core.errors import ModelError
from quire.models.weights.gguf import codes
from quire.models.weights.gguf.architectures import Architecture, architecture_of
from quire.models.weights.gguf.file import GGUF
from quire.models.weights.gguf.keys import layers
from quire.models.weights.gguf.names import PROJECTIONS, ROTATIONS, layer_of, renamed
from quire.models.weights.gguf.tensors import lazy_rows
from quire.models.weights.pieces import Pieces

log = logging.getLogger("quire.models")


@dataclass(frozen=True)
class GGUFWeights:
    """The weights in a GGUF file, as `WeightFiles`."""

    gguf: GGUF

    @property
    def paths(self) -> list[Path]:
        return list(self.gguf.files)

    @property
    def default_dtype(self) -> mx.Dtype:
        """The embedding table's type if it is a float type, else bfloat16, which has float32's
        range.
        """
        kind = self.gguf.tensors["token_embd.weight"].kind
        if kind is GGMLQuantizationType.F32:
            return mx.float32
        half = kind is GGMLQuantizationType.F16 and not architecture_of(self.gguf).wide
        return mx.float16 if half else mx.bfloat16

    def read(
        self, config: dict[str, Any], dtype: mx.Dtype | None, pieces: Pieces | None = None
    ) -> dict[str, mx.array]:
        """Return all tensors, lazily. Floats and scales keep their stored type or are float32.

        Raises:
            ModelError: a tensor has an unsupported type.
        """
        architecture, count = architecture_of(self.gguf), layers(self.gguf)
        unpacked: Counter[str] = Counter()
        ready = architecture.parameters(self.gguf)
        for name, rows in lazy_rows(self.gguf).items():
            layer = layer_of(name)
            elsewhere = name.startswith((*ROTATIONS, *PROJECTIONS))
            if elsewhere or (layer is not None and layer >= count):
                continue
            here = self._name(name, architecture)
            kind = self.gguf.tensors[name].kind
            if not codes.is_repacked(kind) and kind not in codes.FLOATS:
                unpacked[kind.name] += 1
            for part, array in self._decoded(here, kind, rows).items():
                try:
                    ready[part] = architecture.change(part, array, config)
                except ValueError as error:
                    shape = self.gguf.tensors[name].shape
                    raise ModelError(
                        f"{self.gguf.files[0]}: tensor {name!r} has shape {shape}, which does not "
                        f"fit the metadata: {error}"
                    ) from error
        if unpacked:
            kinds = ", ".join(f"{number} of {kind}" for kind, number in unpacked.items())
            log.warning(
                "tensors are unpacked, because MLX does not support their packing: %s", kinds
            )
        return _apart(ready, config)

    def _name(self, name: str, architecture: Architecture) -> str:
        here = renamed(name, architecture.names)
        if here is None:
            raise ModelError(
                f"{self.gguf.files[0]}: tensor {name!r} of architecture "
                f"{self.gguf.architecture!r} is not known"
            )
        return here

    def _decoded(
        self, name: str, kind: GGMLQuantizationType, rows: mx.array
    ) -> dict[str, mx.array]:
        try:
            parts = codes.decode(kind, rows)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.gguf.files[0]}: tensor {name!r} has unsupported type {kind.name}"
            ) from error
        path = name.removesuffix(".weight")
        if len(parts) == 1:
            return {name: parts["weight"]}
        return {f"{path}.{part}": array for part, array in parts.items()}


def _apart(weights: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    """Split fused queries, keys and values, and fused gates and up projections of experts."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shares = {
        "qkv_proj": {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads},
        "experts.gate_up_proj": {"experts.gate_proj": 1, "experts.up_proj": 1},
    }
    ready: dict[str, mx.array] = {}
    for name, array in weights.items():
        fused = next((module for module in shares if f".{module}." in name), None)
        if fused is None:
            ready[name] = array
            continue
        axis = 1 if fused.startswith("experts") else 0
        unit = array.shape[axis] // sum(shares[fused].values())
        start = 0
        for single, share in shares[fused].items():
            rows = mx.arange(start, start := start + share * unit)
            ready[name.replace(fused, single)] = mx.take(array, rows, axis=axis)
    return ready
