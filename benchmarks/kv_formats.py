"""Speed and bytes of KV formats, side by side on one model.

    python benchmarks/kv_formats.py [--model FOLDER] [--context 2000] [--batch 1] [--out FILE]

Each format has an engine of its own; they take turns of a few steps, so that other work on the
machine slows all of them alike, and are timed in processor time (computing and building graphs)
beside the clock's. Prompts are timed in processor time alone. Memory bars are tests:
tests/cache/formats/test_memory.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.core.config import EngineConfig
from quire.core.kv_choice import parse_format
from quire.core.request import Request, SamplingParams
from quire.demo import MODEL_DIR
from quire.device.device import open_device
from quire.engine.assembly import assemble
from quire.engine.engine import Engine
from quire.models.weights.loader import LoadedModel, open_model

FORMATS = (
    "plain",
    *(f"page-{bits}" for bits in ("8", "6", "5", "8/4", "4", "3", "2")),
    *(f"uniform-{bits}-g64" for bits in (8, 4)),
    *(f"turbo-{bits}" for bits in ("4", "3.5", "3", "2")),
)
TURN = 6
"""Steps of one engine at a time."""
UNTIMED = 2
"""Steps of a turn that are not timed: they compute while the next is built, in part another's."""


@dataclass
class Row:
    """One format.

    Attributes:
        kv_bytes: of the blocks of all sequences, after their prompts.
        prefill_tps: prompt tokens a second of processor time.
        step_ms, cpu_ms: median duration of a step that generates, and processor time in it.
        speed: decode tokens/s as a multiple of the first format's.
        cpu_speed: the same of tokens a second of processor time.
    """

    format: str
    kv_bytes: int
    prefill_tps: float
    step_ms: float
    cpu_ms: float
    speed: float
    cpu_speed: float


def prefilled(loaded: LoadedModel, name: str, context: int, batch: int, rounds: int) -> Engine:
    """Return an engine whose sequences have read their prompts and start to generate."""
    config = EngineConfig(
        model=str(loaded.path),
        kv_memory=1 << 30,
        kv_format=parse_format(name),
        kv_skip_layers=(),
        prefix_cache=False,
        step_ms=500,
    )
    engine = assemble(loaded, config)
    vocabulary = engine.info.vocab_size - 3
    for number in range(batch):
        prompt = tuple(3 + (i * 7 + number) % vocabulary for i in range(context))
        sampling = SamplingParams(temperature=0)
        engine.add(Request(str(number), prompt, sampling, max_tokens=rounds + 100))
    started: set[str] = set()
    while len(started) < batch:
        started |= {output.request_id for output in engine.step() if output.token_ids}
    return engine


def timed(engines: list[Engine], rounds: int) -> list[list[tuple[float, float]]]:
    """Time `rounds` steps of each engine; return (seconds, processor seconds) of most of them.

    Args:
        rounds: at least `UNTIMED + 1`; the last turn takes what is left.
    """
    steps: list[list[tuple[float, float]]] = [[] for _ in engines]
    for started in range(0, rounds, TURN):
        for engine, times in zip(engines, steps, strict=True):
            for number in range(min(TURN, rounds - started)):
                wall, cpu = time.perf_counter(), time.process_time()
                engine.step()
                if number >= UNTIMED:
                    times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return steps


def steps_of_each(text: str) -> int:
    """Read how many steps each format takes, for `argparse`.

    Raises:
        ArgumentTypeError: no number, or too few for one to be timed.
    """
    if not text.isdecimal() or int(text) <= UNTIMED:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of at least {UNTIMED + 1}: the first {UNTIMED} steps of a "
            "turn are not timed"
        )
    return int(text)


def compared(model: str, names: Sequence[str], context: int, batch: int, rounds: int) -> list[Row]:
    """Measure each format beside the first one. The device must be open."""
    loaded = open_model(model)
    engines: list[Engine] = []
    read: list[float] = []
    for name in names:
        started = time.process_time()
        engines.append(prefilled(loaded, name, context, batch, rounds))
        read.append(context * batch / (time.process_time() - started))
    medians = [
        tuple(statistics.median(times) for times in zip(*steps, strict=True))
        for steps in timed(engines, rounds)
    ]
    wall, cpu = medians[0]
    return [
        Row(
            name,
            sum(size for _, size in engine.stats().kv_used),
            tps,
            median[0] * 1e3,
            median[1] * 1e3,
            wall / median[0],
            cpu / median[1],
        )
        for name, engine, tps, median in zip(names, engines, read, medians, strict=True)
    ]


def main() -> None:
    """Prints a table and writes the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(MODEL_DIR))
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=steps_of_each, default=60, help="steps of each format")
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument(
        "--blas", default="auto", choices=("auto", "openblas", "mlx"), help="as quire serve's"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    open_device(args.blas)
    rows = compared(args.model, args.formats, args.context, args.batch, args.rounds)
    print("| format | KV MB | prefill tokens/s | step ms | CPU ms | decode speed | of CPU time |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row.format} | {row.kv_bytes / 1e6:.2f} | {row.prefill_tps:,.0f} "
            f"| {row.step_ms:.1f} | {row.cpu_ms:.1f} | {row.speed:.2f} | {row.cpu_speed:.2f} |"
        )
    if args.out:
        args.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
