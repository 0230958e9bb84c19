"""Times Quire's CUDA kernels beside MLX's own operations: `kernel_times.py OUT`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from quire.attention.backend import AttentionCase, Scoring
from quire.attention.metadata import build_metadata
from quire.attention.paged import PagedBackend, check
from quire.attention.reference import ReferenceBackend
from quire.cache.formats.base import LayerShape
from quire.cache.formats.registry import make_store
from quire.cache.specs import AttentionSpec, FullKV, WindowKV
from quire.core.kv_format import KVFormat
from quire.device.cuda import packed, products
from quire.device.weights import PackedWeight, Packing, random_codes

BLOCK = 64
Row = dict[str, Any]


def microseconds(operation: Callable[[mx.array], mx.array], x: mx.array, count: int = 20) -> float:
    """Return median time of one of several operations that wait for each other, in five rounds."""

    def row() -> mx.array:
        out = x
        for _ in range(count):
            out = operation(mx.depends([x], [out])[0])
        return out

    mx.eval(row())
    times = []
    for _ in range(5):
        started = time.perf_counter()
        mx.eval(row())
        times.append((time.perf_counter() - started) / count * 1e6)
    return statistics.median(times)


def attention(
    spec: AttentionSpec, heads: int, spans: list[tuple[int, int]], format: KVFormat, backend: str
) -> Row:
    """Time one call over sequences of (keys before, rows)."""
    shape = LayerShape.of(spec, BLOCK, mx.bfloat16)
    store = make_store(shape, format)
    sizes = [-(-(start + count) // BLOCK) for start, count in spans]
    ids = np.random.default_rng(0).permutation(sum(sizes)).astype(np.int32)
    tables = [each.tolist() for each in np.split(ids, np.cumsum(sizes)[:-1])]
    store.resize(sum(sizes), ())
    if store.has_tail:
        store.resize_tails(len(spans), ())
    rows = [
        check.Rows(start, count, format, tables[n], n if store.has_tail else None)
        for n, (start, count) in enumerate(spans)
    ]
    case = AttentionCase(format, spec, BLOCK, heads, 1, mx.bfloat16, False, False)
    for number, (start, _) in enumerate(spans):  # one after the other: a prompt needs room
        if start:
            before = replace(rows[number], start=0, count=start)
            metadata = build_metadata(0, spec, [before], BLOCK)
            k, v = (
                mx.random.normal((start, spec.kv_heads, n))
                for n in (shape.head_dim, shape.value_dim)
            )
            store.write(k.astype(mx.bfloat16), v.astype(mx.bfloat16), metadata.slots)
            mx.eval(store.arrays())
    metadata = build_metadata(0, spec, rows, BLOCK)
    q = mx.random.normal((metadata.rows, heads, spec.head_dim)).astype(mx.bfloat16)
    new = [
        mx.random.normal((metadata.rows, spec.kv_heads, n)).astype(mx.bfloat16)
        for n in (shape.head_dim, shape.value_dim)
    ]
    written = store.write(new[0], new[1], metadata.slots)
    mx.eval(store.arrays(), q)
    which = PagedBackend() if backend == "paged" else ReferenceBackend()
    if backend == "paged" and not which.serves(case):
        return {"us": None}
    prepared = which.prepare(metadata)
    scoring = Scoring(spec.head_dim**-0.5)
    count = 3 if metadata.rows > 100 or backend != "paged" else 20
    took = microseconds(lambda q: prepared.forward(q, store, written, scoring), q, count)
    seen = (
        (metadata.last_visible - metadata.first_visible + 1).sum()
        if len(spans) > 1 or spans[0][1] == 1
        else metadata.lengths.sum()
    )
    vector = 2 * (spec.head_dim + spec.value_dim)
    return {"us": took, "GB/s as bf16": float(seen) * spec.kv_heads * vector / took / 1e3}


def attentions(formats: list[str]) -> list[Row]:
    plain = KVFormat()
    named = {"plain": plain, "page-4": KVFormat("page", 4, 4), "page-8": KVFormat("page", 8, 8)}
    long = [(20_000, 1)]
    cases: list[tuple[str, AttentionSpec, int, list[tuple[int, int]]]] = [
        ("8 x 20000, 32/8 x 128", FullKV(8, 128), 32, long * 8),
        ("1 x 20000, 32/8 x 128", FullKV(8, 128), 32, long),
        ("8 x 20000, 16/2 x 512", FullKV(2, 512), 16, long * 8),
        ("1 x 20000, 16/2 x 512", FullKV(2, 512), 16, long),
        ("8 x window 1024, 16/8 x 256", WindowKV(8, 256, 1024), 16, long * 8),
        ("32 x 188, 16/8 x 256", WindowKV(8, 256, 1024), 16, [(188, 1)] * 32),
        ("prompt 4096, 32/8 x 128", FullKV(8, 128), 32, [(0, 4096)]),
        ("prompt 2048 after 18000, 32/8 x 128", FullKV(8, 128), 32, [(18_000, 2048)]),
        (
            "prompt 2048 after 18000, 16/8 x 256, window",
            WindowKV(8, 256, 1024),
            16,
            [(18_000, 2048)],
        ),
        ("prompt 2048 after 18000, 16/2 x 512", FullKV(2, 512), 16, [(18_000, 2048)]),
    ]
    rows = []
    for name, spec, heads, spans in cases:
        for format in formats:
            for backend in ("paged", "reference"):
                try:
                    row = attention(spec, heads, spans, named[format], backend)
                except Exception as error:
                    row = {"error": str(error)[:200]}
                rows.append({"what": name, "format": format, "by": backend} | row)
                print(rows[-1], flush=True)
    return rows


def _weight(outputs: int, inputs: int, experts: int = 0) -> PackedWeight:
    lead = (experts, outputs) if experts else (outputs,)
    codes = random_codes((*lead, inputs // 8))
    scales = mx.full((*lead, inputs // 64), 0.01, dtype=mx.bfloat16)
    return PackedWeight(codes, scales, -7.5 * scales, Packing(64, 4, "affine"))


def by_mlx(x: mx.array, w: PackedWeight) -> mx.array:
    return mx.quantized_matmul(
        x, w.codes, w.scales, w.biases, transpose=True, group_size=64, bits=4
    )


def by_unpacked(x: mx.array, w: PackedWeight) -> mx.array:
    return x @ packed.unpacked(w).T


def linears() -> list[Row]:
    """Time each product over many matrices in turn, so that none is in the cache."""
    rows = []
    ways = {"by codes": packed.linear, "unpacked": by_unpacked, "mlx": by_mlx}
    for outputs, inputs in ((4096, 2816), (2816, 4096), (14_336, 4096), (4096, 14_336)):
        weights = [_weight(outputs, inputs) for _ in range(40)]
        mx.eval([each.codes for each in weights])
        for count in (2, 8, 16, 64, 256, 2048):
            x = mx.random.normal((count, inputs)).astype(mx.bfloat16)
            row: Row = {"what": f"{inputs} -> {outputs}", "rows": count}
            for name, way in ways.items():
                if way is packed.linear and count > products.MOST_ROWS:
                    continue

                following = cycle(weights)
                row[name] = microseconds(lambda x, w=way, f=following: w(x, next(f)), x, 40)
            rows.append(row)
            print(rows[-1], flush=True)
    return rows


def experts_by_mlx(
    x: mx.array, chosen: mx.array, gate: PackedWeight, up: PackedWeight, down: PackedWeight
) -> mx.array:
    """Compute the experts' products by MLX, rows sorted by expert, without the activation."""
    flat = chosen.flatten()
    order = mx.argsort(flat)

    def product(x: mx.array, w: PackedWeight) -> mx.array:
        return mx.gather_qmm(
            *(x, w.codes, w.scales, w.biases),
            rhs_indices=flat[order],
            transpose=True,
            group_size=64,
            bits=4,
            sorted_indices=True,
        )

    inner = x[order // 8][:, None]
    return product(product(inner, gate) * product(inner, up), down)[mx.argsort(order)]


def experts() -> list[Row]:
    """Time the experts' MLPs of Gemma 4 26B-A4B."""
    gate, up, down = _weight(704, 2816, 128), _weight(704, 2816, 128), _weight(2816, 704, 128)
    rows = []
    for count in (1, 8, 32, 128, 512, 2048):
        x = mx.random.normal((count, 2816)).astype(mx.bfloat16)
        chosen = mx.argsort(mx.random.normal((count, 128)), axis=-1)[:, :8]
        mx.eval(x, chosen)

        ours = microseconds(lambda x, c=chosen: packed.experts(x, c, (gate, up, down), 1), x, 5)
        mlx = microseconds(lambda x, c=chosen: experts_by_mlx(x, c, gate, up, down), x, 5)
        rows.append({"what": "experts", "rows": count, "us": ours, "mlx": mlx})
        print(rows[-1], flush=True)
    return rows


def main(out: Path, parts: list[str]) -> None:
    found: dict[str, list[Row]] = {}
    if "experts" in parts:
        found["experts"] = experts()
    if "linears" in parts:
        found["linears"] = linears()
    if "attention" in parts:
        found["attention"] = attentions(
            [part for part in parts if part in ("plain", "page-4", "page-8")]
        )
    out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ["experts", "linears", "attention", "plain"])
