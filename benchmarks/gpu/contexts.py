"""Times steps of 8 streams whose contexts are 128, 1,100 and 20,000 tokens of their own:

`contexts.py FOLDER OUT [FORMAT...]`, formats as in `--kv-format`, `plain` unless said otherwise.
With `all-layers` among them no layer stays plain, where by default the last full one does.

A step is timed in the engine, and where it is recorded also alone: the same graph launched again
and again, without what the host and the sampler do between two steps.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from workload import drawn

from quire.core.config import EngineConfig
from quire.core.kv_choice import parse_format
from quire.core.request import Request, SamplingParams
from quire.engine.engine import Engine
from quire.engine.factory import open_engine
from quire.executor.graphs.runner import CUDAGraphs

STREAMS = 8
CONTEXTS = (128, 1_100, 20_000)
STEPS, LAUNCHES = 80, 40


class Recorded:
    """Stands before the extension that launches graphs, and remembers the last launch."""

    def __init__(self, whole: CUDAGraphs) -> None:
        self._extension: Any = whole._extension
        self._last: dict[str, Any] | None = None
        whole._launching._extension = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extension, name)

    def replay(self, *arguments: Any, **named: Any) -> mx.array:
        self._last = named or self._last
        out: mx.array = self._extension.replay(*arguments, **named)
        return out

    def forget(self) -> None:
        """Forget the last graph, as steps may be launched layer by layer from now on."""
        self._last = None

    def milliseconds(self, graph: int | None = None, launches: int = LAUNCHES) -> float | None:
        """Return a graph's milliseconds on the inputs of the last step; None if that had no graph.

        Args:
            graph: the last step's own unless said otherwise.
        """
        if self._last is None:
            return None
        named = self._last | {"inputs": [mx.array(each) for each in self._last["inputs"]]}
        if graph is not None:
            named["graph"] = graph
        mx.eval(named["inputs"])
        times = []
        for _ in range(5):
            mx.synchronize()
            started = time.perf_counter()
            for _ in range(launches):
                mx.async_eval(self._extension.replay(**named))
            mx.synchronize()
            times.append((time.perf_counter() - started) / launches * 1e3)
        return statistics.median(times)


@contextmanager
def streams(engine: Engine, format: str, context: int) -> Iterator[float]:
    """Run streams until all generate; yield the seconds until the last one's first token."""
    started, waiting = time.perf_counter(), set()
    for number in range(STREAMS):
        name = f"{format}-{context}-{number}"
        waiting.add(name)
        prompt, sampling = drawn(context, 31 * number + context), SamplingParams(temperature=0.0)
        own = parse_format(format)
        engine.add(Request(name, prompt, sampling=sampling, max_tokens=2_000, kv_format=own))
    names = sorted(waiting)
    while waiting:
        for output in engine.step():
            if output.error is not None:
                raise SystemExit(f"{output.request_id}: {output.error.message}")
            if output.token_ids:
                waiting.discard(output.request_id)
    yield time.perf_counter() - started
    for name in names:
        engine.abort(name)
    while engine.has_work:
        engine.step()


def measured(
    engine: Engine, recorded: Recorded | None, format: str, context: int
) -> dict[str, Any]:
    if recorded is not None:
        recorded.forget()
    with streams(engine, format, context) as first:
        steps = []
        for _ in range(STEPS):
            started = time.perf_counter()
            engine.step()
            steps.append((time.perf_counter() - started) * 1e3)
        steps = sorted(steps[STEPS // 5 :])
        step = statistics.median(steps)
        alone = None if recorded is None else recorded.milliseconds()
    return {
        "format": format,
        "context": context,
        "last first token, s": round(first, 3),
        "step, ms": round(step, 3),
        "p10, p90": [round(steps[len(steps) * n // 10], 3) for n in (1, 9)],
        "tokens/s": round(STREAMS / step * 1e3),
        "recorded graph alone, ms": alone and round(alone, 3),
    }


def main(folder: str, out: Path, formats: list[str]) -> None:
    skipped = () if "all-layers" in formats else None
    formats = [each for each in formats if each != "all-layers"]
    engine = open_engine(EngineConfig(folder, kv_memory=40 << 30, kv_skip_layers=skipped))
    whole = getattr(engine._executor, "graphs", None)
    recorded = None if whole is None else Recorded(whole)
    rows: list[dict[str, Any]] = []
    for format in formats or ["plain"]:
        with streams(engine, format, CONTEXTS[0]):
            pass  # kernels of this format
        for context in CONTEXTS:
            rows.append(measured(engine, recorded, format, context))
            print(json.dumps(rows[-1]), flush=True)
            out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
