"""Times a start of the engine with empty caches, by stage and by compiled kernel.

`first_start.py FOLDER OUT.json [--cache FOLDER] [--again]`. Seconds count from the call of
`open_engine`. MLX compiles one module at a time and writes it when it is done, so the time between
two writes is the most that a module took. `--again` starts a second time, in a new process, on the
caches of the first.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.device.private import use_private_cache

Row = dict[str, Any]


class Clock:
    """Collects what happens in a start, in seconds of the clock and of the processor."""

    def __init__(self) -> None:
        self._started, self._wall = time.perf_counter(), time.time()
        self.stages: list[Row] = []
        self.units: list[Row] = []

    def since(self, moment: float) -> float:
        """Return the seconds from the start to a moment of `time.time`."""
        return round(moment - self._wall, 3)

    def around(self, owner: Any, name: str, tell: Callable[..., Row] = lambda *_, **__: {}) -> None:
        """Note each call of a function from now on."""
        function = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            before, processor = time.perf_counter(), time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                now = time.perf_counter()
                row = {"stage": name, "at": round(before - self._started, 3)}
                row |= {"seconds": round(now - before, 3)}
                row |= {"processor, s": round(time.process_time() - processor, 2)}
                self.stages.append(row | tell(*arguments, **options))

        setattr(owner, name, noted)

    def of_units(self, driver: Any) -> None:
        """Note each kernel that Quire compiles, by the processor time of its thread."""
        compile_source = driver.compile_source

        def noted(text: str, options: list[str]) -> tuple[bytes, str]:
            before, processor = time.perf_counter(), time.thread_time()
            binary, log = compile_source(text, options)
            row = {"at": round(before - self._started, 3), "kernel": _named(text)}
            row |= {"seconds": round(time.perf_counter() - before, 3)}
            row |= {"processor, s": round(time.thread_time() - processor, 3)}
            self.units.append(row | {"source": len(text), "binary": len(binary)})
            return binary, log

        driver.compile_source = noted


class Lines(logging.Handler):
    """Keeps log lines, with their times."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.rows: list[Row] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        self.rows.append({"at": self._clock.since(record.created), "line": line})
        print(self.rows[-1]["at"], line, flush=True)


def _named(text: str) -> str:
    """Return a short description of a kernel's source: its parameters and defines."""
    parameters = re.search(r"(?:kernel|quire_\w+)\s*\(([^)]*)\)", text)
    defines = " ".join(re.findall(r"^#define (\w+ \S+)$", text, re.MULTILINE)[:12])
    return f"{' '.join((parameters[1] if parameters else '').split())[:160]} | {defines[:200]}"


def modules(folder: Path, clock: Clock) -> list[Row]:
    """Return MLX's compiled modules in the order in which they were written."""
    found = sorted(folder.rglob("*.ptx"), key=lambda path: path.stat().st_mtime)
    rows, before = [], 0.0
    for path in found:
        at = clock.since(path.stat().st_mtime)
        name = path.relative_to(folder).with_suffix("").as_posix()
        rows.append({"at": at, "since last": round(at - before, 3), "module": name})
        rows[-1]["binary"] = path.stat().st_size
        before = at
    return rows


def watch(clock: Clock) -> None:
    """Note the stages of a start, and each kernel that it compiles."""
    from quire.device.cuda import driver
    from quire.engine import factory, warm_up
    from quire.executor.graphs import graph_cache, opening, runner

    clock.of_units(driver)
    for name in ("open_model", "warm_up", "measure_steps", "assemble"):
        clock.around(factory, name)
    clock.around(warm_up, "_serve", lambda engine, served: _round(served))
    clock.around(opening, "trace")
    clock.around(runner.CUDAGraphs, "check")
    clock.around(runner.CUDAGraphs, "_verified", lambda self, inputs, rows, eagerly: {"rows": rows})
    clock.around(
        graph_cache.GraphCache, "_record_step", lambda self, rows, *_, **__: {"rows": rows}
    )


def start(folder: str, out: Path, cache: Path) -> None:
    """Open an engine, generate once with 1 to 64 streams, and write what took how long."""
    use_private_cache(cache)
    os.environ["CUDA_CACHE_PATH"] = str(cache / "driver")  # NVRTC takes what the driver keeps
    from quire.core.config import EngineConfig
    from quire.core.request import Request, SamplingParams
    from quire.engine import factory

    clock = Clock()
    lines = Lines(clock)
    log = logging.getLogger("quire")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    watch(clock)
    config = EngineConfig(folder, kv_memory=20 << 30, speculate="off")
    engine = factory.open_engine(config)
    ready = time.time()
    streams = []
    for count in (1, 2, 4, 8, 16, 32, 64):
        before, first = time.perf_counter(), 0.0
        for n in range(count):
            sampling = SamplingParams(temperature=0.0)
            engine.add(Request(f"{count}-{n}", (5, 7 + n, 9), sampling=sampling, max_tokens=16))
        while engine.has_work:
            if any(each.token_ids for each in engine.step()) and not first:
                first = time.perf_counter() - before
        seconds = time.perf_counter() - before
        streams.append({"streams": count, "first token": round(first, 3)})
        streams[-1]["seconds"] = round(seconds, 3)
    found = modules(cache / "ptx", clock)
    result = {
        "model": folder,
        "cores": os.cpu_count(),
        "ready": clock.since(ready),
        "own kernels, processor s": round(sum(each["processor, s"] for each in clock.units), 1),
        "own kernels": len(clock.units),
        "mlx modules": len(found),
        "streams": streams,
        "stages": sorted(clock.stages, key=lambda row: row["at"]),
        "mlx": found,
        "units": sorted(clock.units, key=lambda row: -row["processor, s"]),
        "lines": lines.rows,
    }
    out.write_text(json.dumps(result, indent=1))
    print({key: value for key, value in result.items() if not isinstance(value, list)}, flush=True)


def _round(served: Any) -> Row:
    lengths = [len(each.prompt) for each in served.requests]
    return {"requests": len(lengths), "longest": max(lengths), "late": served.late is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path, help="default: an empty temporary folder")
    parser.add_argument("--again", action="store_true", help="start twice")
    asked = parser.parse_args()
    if not asked.again:
        start(asked.folder, asked.out, asked.cache or Path(tempfile.mkdtemp(prefix="first-start-")))
        return
    cache = asked.cache or Path(tempfile.mkdtemp(prefix="first-start-"))
    for name in ("first", "second"):
        out = asked.out.with_name(f"{asked.out.stem}-{name}.json")
        command = [sys.executable, __file__, asked.folder, str(out), "--cache", str(cache)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
