"""A GGUF file of random weights, for the scripts that write one of some model's shape."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Kind = gguf.GGMLQuantizationType
SCALE = 0.01
"""Scale of all blocks, where the size of activations does not matter."""


class GGUFFile:
    """A file while it is written. Codes are drawn, scales are constant.

    Args:
        kind: how matrices are coded, unless they say otherwise.
    """

    def __init__(
        self, path: Path, architecture: str, kind: Kind, *, use_temp_file: bool = False
    ) -> None:
        self.kind = kind
        self.writer = gguf.GGUFWriter(path, architecture, use_temp_file=use_temp_file)
        self.random = np.random.default_rng(0)

    def matrix(self, name: str, *shape: int, kind: Kind | None = None) -> None:
        """Add a matrix `[columns, depth]`, or a stack of them."""
        kind = kind or self.kind
        *axes, depth = shape
        size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = self.codes(math.prod(axes) * depth // size * block_bytes)
        self.scale(blocks.reshape(-1, block_bytes), kind, depth)
        self.writer.add_tensor(f"{name}.weight", blocks.reshape(*axes, -1), raw_dtype=kind)

    def codes(self, count: int) -> np.ndarray[Any, Any]:
        """Return random bytes for a matrix's blocks."""
        return self.random.integers(0, 256, count, dtype=np.uint8)

    def scale(self, blocks: np.ndarray[Any, Any], kind: Kind, depth: int) -> None:
        """Write the scales of a matrix into its blocks `[n, bytes]`."""
        blocks[:, :2] = np.frombuffer(np.float16(SCALE).tobytes(), np.uint8)

    def floats(self, name: str, values: np.ndarray[Any, Any]) -> None:
        """Add a tensor of float32."""
        self.writer.add_tensor(name, values.astype(np.float32))

    def norms(self, prefix: str, width: int, *names: str) -> None:
        """Add weights of norms, all 1."""
        for name in names:
            self.floats(f"{prefix}{name}.weight", np.ones(width))

    def gated(
        self, block: str, inner: int, hidden: int, *, experts: int = 0, kind: Kind | None = None
    ) -> None:
        """Add an MLP's matrices, or those of experts."""
        stack, end = ((experts,), "_exps") if experts else ((), "")
        for name in ("gate", "up"):
            self.matrix(f"{block}ffn_{name}{end}", *stack, inner, hidden, kind=kind)
        self.matrix(f"{block}ffn_down{end}", *stack, hidden, inner, kind=kind)

    def close(self) -> None:
        """Write everything."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
