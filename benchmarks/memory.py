"""Print the memory that published models take: weights in 4 bits, and KV caches by context.

`python benchmarks/memory.py`: no weights are loaded. docs/memory.md holds the result.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import mlx.core as mx

from quire.cache.formats.skips import skipped_layers
from quire.core.kv_choice import choose_format
from quire.core.kv_format import KVFormat
from quire.engine.memory import sequence_bytes
from quire.models.base import named_parameters
from quire.models.registry import build

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from shapes import BITS, GROUP, SHAPES

BLOCK_SIZE = 64
CONTEXTS = (8_192, 32_768, 131_072)
CACHED_BITS = (None, "8", "4")


def packed_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a parameter: packed with its scales if it is a matrix, else bfloat16."""
    count = math.prod(shape)
    packs = len(shape) > 1 and shape[-1] % GROUP == 0
    return count * BITS // 8 + count // GROUP * 4 if packs else count * 2


def main() -> None:
    """Print a table in Markdown."""
    formats = [(bits, choose_format(["page-8", "page-4"], bits, None)) for bits in CACHED_BITS]
    print(
        "| Model | Weights |",
        *(f"{n // 1024}K, {b or 16} bits |" for b, _ in formats for n in CONTEXTS),
    )
    print("| --- |", "---: |" * (1 + len(formats) * len(CONTEXTS)))
    for name, config in SHAPES.items():
        model = build(config)
        weights = sum(packed_bytes(each.shape) for each in named_parameters(model).values())
        cells = [f"{weights / 1e9:.1f}"]
        for _, chosen in formats:
            format = (chosen or KVFormat()).skipping(skipped_layers(model.own_layout, None))
            for tokens in CONTEXTS:
                size = sequence_bytes(model, mx.bfloat16, BLOCK_SIZE, format, tokens)
                cells.append(f"{size / 1e9:.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
