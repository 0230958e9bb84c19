"""KV formats on this machine: memory of pages, peak memory of a long prefill, decode speed.

    python benchmarks/kv_formats.py [--model FOLDER] [--tokens 20000] [--out FILE]

Memory is measured from the arrays; a peak is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import mlx.core as mx

from quire.cache.formats.choose import parse_format
from quire.config import EngineConfig
from quire.demo import MODEL_DIR
from quire.engine.engine import Engine
from quire.models.loader import open_model
from quire.request import Request, SamplingParams

FORMATS = ("plain", "page-8", "page-4", "page-3", "uniform-8-g64", "uniform-4-g64", "turbo-4")


@dataclass
class Row:
    """One format. Bytes are bytes; speeds are tokens a second."""

    format: str
    kv_bytes: int
    peak_bytes: int
    prefill_tps: float
    decode_tps: float


def measure(model: str, name: str, tokens: int, dtype: str, decode_context: int) -> Row:
    """Prefills `tokens`, then decodes behind a shorter prompt."""
    loaded = open_model(model, dtype=dtype)
    config = EngineConfig(
        model=model,
        kv_memory=4 << 30,
        kv_format=parse_format(name),
        kv_skip_layers=(),
        prefix_cache=False,
        max_context=tokens + 1024,
    )
    engine = Engine(loaded, config)
    mx.eval(loaded.model.parameters())
    vocab = engine.info.vocab_size
    speed = _decode_speed(engine, [3 + i * 7 % (vocab - 3) for i in range(decode_context)])
    mx.clear_cache()
    mx.reset_peak_memory()
    start_bytes = mx.get_active_memory()
    prompt = tuple(3 + i * 11 % (vocab - 3) for i in range(tokens))
    engine.add(Request("long", prompt, SamplingParams(temperature=0), max_tokens=2))
    kv, started, ended = 0, time.perf_counter(), 0.0
    while engine.has_work:
        if any(output.token_ids for output in engine.step()) and not ended:
            ended = time.perf_counter()
        kv = max(kv, sum(size for _, size in engine.stats().kv_used))
    peak = mx.get_peak_memory() - start_bytes
    return Row(name, kv, peak, tokens / (ended - started), speed)


def _decode_speed(engine: Engine, prompt: list[int], new: int = 48) -> float:
    engine.add(Request("d", tuple(prompt), SamplingParams(temperature=0), max_tokens=new))
    times: list[float] = []
    while engine.has_work:
        times += [time.perf_counter() for out in engine.step() if out.token_ids]
    gaps = sorted(after - before for before, after in pairwise(times[4:]))
    return 1 / gaps[len(gaps) // 2]


def main() -> None:
    """Prints a table and writes the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(MODEL_DIR))
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--decode-context", type=int, default=2_000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        row = measure(args.model, args.one, args.tokens, args.dtype, args.decode_context)
        print(json.dumps(asdict(row)))
        return
    rows = []
    print("format          KV MB  times  peak MB  prefill tok/s  decode tok/s")
    for name in args.formats:
        command = [sys.executable, __file__, "--one", name, *sys.argv[1:]]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(Row(**json.loads(out.splitlines()[-1])))
        row, plain = rows[-1], rows[0]
        print(
            f"{row.format:14}  {row.kv_bytes / 1e6:5.1f}  {plain.kv_bytes / row.kv_bytes:5.2f}"
            f"  {row.peak_bytes / 1e6:7.1f}  {row.prefill_tps:13,.0f}  {row.decode_tps:12,.1f}",
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
