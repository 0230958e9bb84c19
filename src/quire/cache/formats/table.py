"""The table of KV cache costs that is shown at start-up."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from quire.cache.formats.base import LayerShape
from quire.cache.formats.registry import block_bytes, store_type
from quire.cache.specs import KVGroup, KVSpec
from quire.core.figures import size
from quire.core.kv_format import KVFormat


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Costs of layers of one group that are stored alike.

    Attributes:
        token_bytes, plain_bytes: bytes of one token in one layer, as stored, and as plain blocks.
        tail_bytes: bytes of a sequence's tail block in one layer.
    """

    layers: tuple[int, ...]
    spec: KVSpec
    name: str
    block_size: int
    token_bytes: float
    plain_bytes: float
    tail_bytes: int

    def context_bytes(self, tokens: int) -> tuple[int, int]:
        """Return the bytes of one sequence of so many tokens here, as stored and plain."""
        held = self.spec.blocks_between_steps(tokens, self.block_size) * self.block_size
        count = len(self.layers)
        stored = count * (held * self.token_bytes + self.tail_bytes)
        return int(stored), int(count * held * self.plain_bytes)


def layer_costs(
    groups: tuple[KVGroup, ...], format: KVFormat, block_size: int, dtype: mx.Dtype
) -> list[LayerCost]:
    """Return the costs of layers with keys and values in a format, grouped by equal storage."""
    costs = []
    for group in groups:
        spec = group.spec.stored
        if spec is None:
            continue
        shape = LayerShape.of(spec, block_size, dtype)
        skipped = tuple(layer for layer in group.layers if layer in format.skip_layers)
        for layers in (tuple(layer for layer in group.layers if layer not in skipped), skipped):
            if not layers:
                continue
            stored, plain = format.of_layer(layers[0]), KVFormat()
            store = store_type(stored)
            costs.append(
                LayerCost(
                    layers=layers,
                    spec=spec,
                    name=stored.name,
                    block_size=block_size,
                    token_bytes=block_bytes(shape, stored) / block_size,
                    plain_bytes=block_bytes(shape, plain) / block_size,
                    tail_bytes=store.tail_bytes(shape, stored),
                )
            )
    return costs


def kv_table(
    groups: tuple[KVGroup, ...],
    format: KVFormat,
    block_size: int,
    dtype: mx.Dtype,
    context: int,
) -> tuple[str, ...]:
    """Return the lines of the table: layers, format, bytes per token, and a full context's cost."""
    costs = layer_costs(groups, format, block_size=block_size, dtype=dtype)
    rows = [("layers", "sees", "heads", "format", "bytes a token", "plain")]
    for cost in costs:
        count = len(cost.layers)
        rows.append(
            (
                _ranges(cost.layers),
                cost.spec.visible,
                f"{cost.spec.kv_heads} x {cost.spec.head_dim}",
                cost.name,
                f"{count * cost.token_bytes:,.0f}",
                f"{count * cost.plain_bytes:,.0f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    sizes = [cost.context_bytes(context) for cost in costs]
    stored, plain_total = sum(s for s, _ in sizes), sum(p for _, p in sizes)
    last = f"a context of {context:,} tokens takes {size(stored)}"
    if stored != plain_total:
        last += f"; plain would take {size(plain_total)}, {plain_total / stored:.2f} times"
        if plain := [each for cost in costs if cost.name == "plain" for each in cost.layers]:
            last += f"; layers {_ranges(tuple(sorted(plain)))} stay plain"
    return (*lines, last)


def _ranges(layers: tuple[int, ...]) -> str:
    """Return layers as ranges: `0-2,4` for 0, 1, 2 and 4."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
