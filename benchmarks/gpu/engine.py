"""Runs Quire's engine on a model, without HTTP: `engine.py FOLDER OUT [what]`.

What: `reference` for MLX's own operations alone; `mac` for these and the portable attention kernel,
which is what a Mac runs, without the warm-up: on CUDA MLX compiles for 5 s a kernel; `page-4` and
the like for a KV format; `quick` without the long prompts; `once` instead of three times;
`tokens-256` for answers of so many; `kv-8` for 8 GB of KV cache; `widths-1,256` for so many streams
at once; `batch-invariant` as the server's setting of that name.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from workload import LONG, bursts, drawn, kv_gigabytes, tokens_asked, widths_asked

from quire.attention.backend import Backends
from quire.attention.paged.portable import PortableBackend
from quire.attention.paged.target import CUDA
from quire.attention.reference import ReferenceBackend
from quire.core.config import EngineConfig
from quire.core.kv_choice import parse_format
from quire.core.kv_format import KVFormat
from quire.core.processes import freeze_heap
from quire.core.request import Request, SamplingParams
from quire.device.device import Metal, current_device
from quire.device.dtypes import DTYPES
from quire.device.metal.operations import MetalOperations
from quire.device.operations import Operations
from quire.engine import factory as opening
from quire.engine.engine import Engine
from quire.engine.factory import open_engine
from quire.executor import eager, factory


def without_kernels() -> None:
    """Use MLX's own operations from now on, and record no step."""
    eager.open_backends = lambda: Backends([ReferenceBackend()])  # type: ignore[assignment]
    factory.open_cuda_graphs = lambda *_, **__: None  # type: ignore[attr-defined]
    current_device().operations = Operations()


def as_on_a_mac() -> None:
    """Use what the Metal device uses from now on: MLX's operations, attention's portable kernel."""
    without_kernels()
    backends = [PortableBackend(CUDA, DTYPES.values()), ReferenceBackend()]
    eager.open_backends = lambda: Backends(backends)  # type: ignore[assignment]
    device = current_device()
    device.operations, device.compiles_steps = MetalOperations(), Metal.compiles_steps
    opening.warm_up = lambda *_, **__: None  # type: ignore[assignment]


def run(engine: Engine, prompts: list[tuple[int, ...]], tokens: int, name: str) -> dict[str, Any]:
    """Generate all answers at once; return their times in milliseconds."""
    before = engine.stats().steps
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0)
        engine.add(Request(f"{name}-{number}", prompt, sampling=sampling, max_tokens=tokens))
    first: dict[str, float] = {}
    steps: list[float] = []
    generated: dict[str, list[int]] = {}
    last = started
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        generating = sum(bool(output.token_ids) for output in outputs)
        if generating == len(prompts) and len(first) == len(prompts):
            steps.append((now - last) * 1e3)
        last = now
        for output in outputs:
            if output.error is not None:
                raise SystemExit(f"{name}: {output.error.message}")
            if not output.token_ids:
                continue  # of a prompt: how much is read
            first.setdefault(output.request_id, now - started)
            generated.setdefault(output.request_id, []).extend(output.token_ids)
    took = time.perf_counter() - started
    step = statistics.median(steps) if steps else None
    result = {
        "what": name,
        "streams": len(prompts),
        "prompt": len(prompts[0]),
        "seconds": round(took, 3),
        "first token, s": round(max(first.values()), 3),
        "steps": engine.stats().steps - before,
        "step, ms": step and round(step, 2),
        "tokens/s while all generate": step and round(len(prompts) / step * 1e3, 1),
    }
    print(json.dumps(result), flush=True)
    return result | {"tokens": generated[f"{name}-0"][:32]}


def main(folder: str, out: Path, what: list[str]) -> None:
    if "reference" in what:
        without_kernels()
    if "mac" in what:
        as_on_a_mac()
    named = [part for part in what if part.startswith(("page", "turbo", "uniform"))]
    format = parse_format(named[0]) if named else KVFormat()
    started = time.perf_counter()
    config = EngineConfig(
        folder,
        kv_memory=kv_gigabytes(what) << 30,
        kv_format=format,
        batch_invariant="batch-invariant" in what,
        max_sequences=max(64, *widths_asked(what)),
        speculate="off",  # random weights repeat themselves
    )
    engine = open_engine(config)
    freeze_heap()  # as the engine's process does
    rows: list[dict[str, Any]] = [{"what": "open", "seconds": time.perf_counter() - started}]
    print(rows[0], flush=True)
    for name, prompts in bursts(1 if "once" in what else 3, widths_asked(what)):
        rows.append(run(engine, prompts, tokens_asked(what), name))
    if "quick" not in what:
        long = drawn(LONG, 1)
        rows.append(run(engine, [long], 32, "one long"))
        shared = [(*long[:-1], n + 10) for n in range(8)]
        rows.append(run(engine, shared, 32, "8 long, all but a token shared"))
    if "own" in what:
        rows.append(run(engine, [drawn(LONG, n + 2) for n in range(8)], 32, "8 long"))
    rows.append(
        {"what": "memory", "peak GB": round(current_device().memory()["arrays_peak"] / 1e9, 1)}
    )
    out.write_text(json.dumps({"model": folder, "options": what, "rows": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
