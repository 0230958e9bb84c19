"""Quire's engine on a CPU beside llama.cpp and beside itself with OpenBLAS, on all cores each.

    python benchmarks/cpu.py --llama avx512/llama-batched-bench [--threads N] [--rounds 3]
    python benchmarks/cpu.py --eager --openblas-shape '' --shapes 225M --only-shapes

`--llama` may be given several times, for programs that were built for several instruction sets, in
folders of their names (README.md says how). The package `gguf` is needed. Contenders take turns, a
process each, so that other work on the machine slows all of them alike. Tokens a second
are given by the clock, and of processor time, which other work changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from cpu_gguf import FILES
from cpu_models import SHAPES, write_gguf, write_mlx
from cpu_work import Rates, Work
from kv_formats import FORMATS, compared, steps_of_each

from quire.demo import MODEL_DIR
from quire.device.cpu.cores import usable_cores
from quire.device.device import open_device

HERE = Path(__file__).parent
KINDS = ("Q4_0", "Q8_0")


@dataclass(frozen=True, slots=True)
class Contender:
    """A contender, and the interpreter and script that run it."""

    name: str
    python: str
    script: str
    work: Work

    def round(self, timeout: float | None = None) -> Rates:
        """Open the model, warm up and measure, in one process.

        Raises:
            SystemExit: the process failed, or took longer than `timeout` seconds.
        """
        try:
            result = subprocess.run(
                [self.python, str(HERE / self.script)],
                input=json.dumps(asdict(self.work)),
                env={**os.environ, "OMP_NUM_THREADS": str(self.work.threads)},
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise SystemExit(f"{self.name} took longer than {timeout} s") from error
        if result.returncode != 0:
            raise SystemExit(f"{self.name} failed ({result.returncode}): {result.stderr[-2000:]}")
        return Rates(**json.loads(result.stdout.splitlines()[-1]))


def in_rounds(contenders: Sequence[Contender], rounds: int) -> dict[str, Rates]:
    """Return the medians of each contender, by name."""
    runs: dict[str, list[Rates]] = {each.name: [] for each in contenders}
    for number in range(rounds):
        for each in contenders:
            runs[each.name].append(each.round())
            print(f"round {number + 1}: {each.name} {runs[each.name][-1].cpu}", file=sys.stderr)
    return {name: _medians(rates) for name, rates in runs.items()}


def _medians(runs: Sequence[Rates]) -> Rates:
    def median(each: Iterable[dict[str, float]]) -> dict[str, float]:
        each = list(each)
        return {what: statistics.median(rates[what] for rates in each) for what in each[0]}

    wall, cpu = median(run.wall for run in runs), median(run.cpu for run in runs)
    return Rates(wall, cpu, runs[0].weight_bytes, runs[0].computes)


def read_speed() -> float:
    """Return the bytes that one thread reads in a second of processor time, the best of a few.

    By the largest of numbers, which is found as fast as they come; products of packed weights read
    nearly as fast as memcmp.
    """
    numbers = np.full(64 << 20, 1, np.uint64)
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        assert numbers.max() == 1
        best = min(best, time.process_time() - started)
    return numbers.nbytes / best


def make_models(folder: Path, shape: str) -> None:
    """The files of a shape, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    write = FILES.get(shape) or partial(write_gguf, shape=SHAPES[shape])
    if shape in SHAPES and not (folder / shape / "config.json").exists():
        write_mlx(folder / shape, SHAPES[shape])
    for kind in KINDS:
        path = folder / f"{shape}-{kind}.gguf"
        if not path.exists():
            write(path, kind=gguf.GGMLQuantizationType[kind])


def own_file(shape: str) -> str:
    """Return the name of a shape's 4-bit file for Quire; a mixture's and a hybrid's is
    llama.cpp's.
    """
    return shape if shape in SHAPES else f"{shape}-{KINDS[0]}.gguf"


def beside_llama(args: argparse.Namespace, shape: str, tokens: int) -> dict[str, Rates]:
    """Return the rates of Quire and llama.cpp on one shape."""
    make_models(args.models, shape)

    def work(model: str) -> Work:
        given = args.prompt, args.streams, tokens, args.threads
        return Work(str(args.models / model), *given, repacks=not args.no_repack)

    def quire(name: str, **own: Any) -> Contender:
        asked = replace(work(own_file(shape)), **{"kernels": args.kernels[0], **own})
        return Contender(name, sys.executable, "cpu_quire.py", asked)

    contenders = [quire("quire", activation_bits=args.activation_bits[0])]
    contenders += [
        quire(f"quire, {bits}-bit activations", activation_bits=bits)
        for bits in args.activation_bits[1:]
    ]
    contenders += [quire(f"quire, {kernels}", kernels=kernels) for kernels in args.kernels[1:]]
    if args.eager:
        contenders.append(quire("quire, without segments", segments=False))
    if shape == args.openblas_shape:
        contenders.append(quire("quire, OpenBLAS", blas="openblas"))
    for program in args.llama:
        for kind in KINDS:
            file = replace(work(f"{shape}-{kind}.gguf"), llama=str(program.resolve()))
            name = f"llama.cpp {kind}, {program.resolve().parent.name}"
            contenders.append(Contender(name, sys.executable, "cpu_llama.py", file))
    return in_rounds(contenders, args.rounds)


def embedded(args: argparse.Namespace) -> dict[str, Rates]:
    """Measure the embedded model with the kernels and with OpenBLAS."""
    contenders = [
        Contender(
            name,
            sys.executable,
            "cpu_quire.py",
            Work(str(MODEL_DIR), 1024, (1, 8, 32), 64, args.threads, blas, args.kernels[0]),
        )
        for name, blas in (("quire", "auto"), ("quire, OpenBLAS", "openblas"))
    ]
    return in_rounds(contenders, args.rounds)


def table(title: str, rates: dict[str, Rates], columns: dict[str, str], memory: float) -> str:
    """Tokens/s of processor time / by the clock, and the first contender's ratios to the others."""
    heads = ("", "computes with", *columns.values(), "read")
    lines = [f"### {title}", "", f"| {' | '.join(heads)} |"]
    lines.append("| --- | --- |" + " ---: |" * (len(columns) + 1))
    for name, each in rates.items():
        cells = [f"{each.cpu[what]:,.1f} / {each.wall[what]:,.1f}" for what in columns]
        read = f"{each.cpu['1'] * each.weight_bytes / memory:.0%}" if "1" in each.cpu else ""
        lines.append(f"| {' | '.join([name, each.computes, *cells, read])} |")
    first, *others = rates.items()
    for name, each in others:
        cells = [
            f"{first[1].cpu[what] / each.cpu[what]:.2f} / "
            f"{first[1].wall[what] / each.wall[what]:.2f}"
            for what in columns
        ]
        lines.append(f"| {' | '.join([f'{first[0]} / {name}', '', *cells])} | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the tables and writes everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama", type=Path, nargs="*", default=[], help="llama-batched-bench")
    parser.add_argument("--eager", action="store_true", help="also Quire without segments")
    parser.add_argument("--models", type=Path, default=Path("/tmp/quire-cpu-models"))
    parser.add_argument("--shapes", nargs="*", choices=[*SHAPES, *FILES], default=list(SHAPES))
    parser.add_argument("--openblas-shape", default="225M", help="others take too long; '': none")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=usable_cores().count, help="of each")
    parser.add_argument(
        "--no-repack",
        action="store_true",
        help="llama.cpp reads weights as they lie: its AMX crashes in some virtual machines",
    )
    parser.add_argument("--only-shapes", action="store_true", help="neither embedded nor formats")
    parser.add_argument(
        "--kernels", nargs="*", default=["auto"], help="instruction sets of Quire's kernels"
    )
    parser.add_argument(
        "--activation-bits", nargs="*", type=int, default=[16], help="of Quire's activations"
    )
    parser.add_argument("--tokens", type=int, default=24, help="that each stream generates")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--format-rounds", type=steps_of_each, default=24, help="steps of each KV format"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu.json")
    args = parser.parse_args()
    memory = read_speed()
    print(f"One thread reads {memory / 1e9:.1f} GB/s. Tokens/s of processor time / by the clock.\n")
    results: dict[str, object] = {"read_bytes_s": memory}
    streams = {str(n): f"{n} stream{'s' * (n > 1)}" for n in args.streams}
    columns = {"prompt": f"prompt of {args.prompt:,}", **streams}
    for shape in args.shapes:
        rates = beside_llama(args, shape, args.tokens)
        results[shape] = {name: vars(each) for name, each in rates.items()}
        print(table(shape, rates, columns, memory), flush=True)
    if args.only_shapes:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        return
    rates = embedded(args)
    results["embedded"] = {name: vars(each) for name, each in rates.items()}
    columns = {"prompt": "prompt of 1,024", **{n: f"{n} streams" for n in ("1", "8", "32")}}
    print(table("embedded", rates, columns, memory), flush=True)
    open_device("auto")
    rows = compared(str(MODEL_DIR), FORMATS, 2000, 1, args.format_rounds)
    results["formats"] = [asdict(row) for row in rows]
    for row in rows:
        print(f"{row.format}: {row.speed:.2f} of plain's speed, {row.cpu_speed:.2f} of CPU time")
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
