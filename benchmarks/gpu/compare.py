"""Quire's engine, Quire over HTTP and mlx-lm on the same models, one after the other, in rounds.

`python benchmarks/gpu/compare.py OUT.json`: see `--help`. A model is written if its folder is not
there. The table says how much of what memory allows a step reaches: the bytes of weights that it
reads, experts as they are likely to be chosen, by the speed of a copy. After it the model's tokens
by kernels are held against those by MLX's operations alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from shapes import SHAPES, write
from workload import STREAMS

_HERE = Path(__file__).parent
_SETTINGS = {"MLX_ENABLE_TF32": "0", "MLX_USE_CUDA_GRAPHS": "0"}
"""Variables that `quire serve` sets for its engine; mlx-lm runs with MLX's own."""


def bytes_of_step(folder: Path, rows: int) -> float:
    """Return the bytes of weights that a step of so many rows reads."""
    config = json.loads((folder / "config.json").read_text())
    experts, chosen = config.get("num_experts"), config.get("num_experts_per_tok")
    chosen = chosen or config.get("top_k_experts")
    share = 1 - (1 - chosen / experts) ** rows if experts and chosen else 1.0
    total = 0.0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(size))
        for name, tensor in header.items():
            if name == "__metadata__" or ("embed" in name and not config["tie_word_embeddings"]):
                continue
            start, end = tensor["data_offsets"]
            of_experts = re.search(r"switch_(mlp|glu)", name)
            total += (end - start) * (share if of_experts else 1.0)
    return total


def bytes_per_second() -> float:
    """Return the bytes a second that a copy reads and writes."""
    source = mx.zeros((1 << 28,), dtype=mx.uint32)
    mx.eval(source)
    times = []
    for number in range(5):
        started = time.perf_counter()
        mx.eval(source + number)
        times.append(time.perf_counter() - started)
    return 2 * source.nbytes / min(times)


def ran(
    script: str, python: str, folder: Path, *what: str, own: bool = True
) -> list[dict[str, Any]]:
    """Run a script of this folder; return the rows that it finds.

    Args:
        own: whether it runs with Quire's settings of MLX.
    """
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "out.json")
        command = [python, str(_HERE / script), str(folder), str(out), *what]
        print(" ".join([script, folder.name, *what]), flush=True)
        environment = {**_SETTINGS, **os.environ} if own else None
        subprocess.run(command, check=True, env=environment)
        rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def same_tokens(folder: Path, format: str, memory: str) -> dict[str, str]:
    """Count, by number of streams, the tokens of a first stream that equal those of MLX's
    operations.
    """
    what = ("quick", "once", format, memory)
    ours = ran("engine.py", sys.executable, folder, *what)
    theirs = ran("engine.py", sys.executable, folder, *what, "reference")
    found = {}
    for one, other in zip(ours, theirs, strict=True):
        if "tokens" in one:
            pairs = list(zip(one["tokens"], other["tokens"], strict=True))
            same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
            found[str(one["streams"])] = f"the first {same} of {len(pairs)}"
    return found


def median(rows: list[dict[str, Any]], streams: int, key: str) -> float | None:
    """Return the median of all rounds but the first, in which kernels may have been compiled."""
    own = [row[key] for row in rows if row.get("streams") == streams and "first" not in row["what"]]
    own = [each for each in own if each is not None]
    return round(statistics.median(own), 2) if own else None


def compared(folder: Path, asked: argparse.Namespace, copied: float) -> dict[str, Any]:
    """Measure all systems in rounds; return the lines of the table."""
    length, memory = f"tokens-{asked.tokens}", f"kv-{asked.kv_memory}"
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(asked.rounds):
        for format in asked.formats:
            rows = ran("engine.py", sys.executable, folder, "quick", length, format, memory)
            found.setdefault(format, []).extend(rows)
        found.setdefault("http", []).extend(
            ran("../gpu_http.py", sys.executable, folder, length, memory)
        )
        if asked.mlx_lm:
            rows = ran("mlx_lm_batch.py", asked.mlx_lm, folder, "quick", length, own=False)
            found.setdefault("mlx-lm", []).extend(rows)
    lines = []
    for streams in STREAMS:
        bound = bytes_of_step(folder, streams) / copied * 1e3
        for format in asked.formats:
            step = median(found[format], streams, "step, ms")
            theirs = median(found.get("mlx-lm", []), streams, "step, ms")
            seconds = median(found[format], streams, "seconds")
            lines.append(
                {
                    "streams": streams,
                    "format": format,
                    "step, ms": step,
                    "of the byte bound": step and round(bound / step, 2),
                    "mlx-lm, ms": theirs,
                    "times": step and theirs and round(theirs / step, 1),
                    "tokens/s in all": seconds and round(streams * asked.tokens / seconds),
                    "over HTTP": median(found["http"], streams, "tokens/s"),
                }
            )
    return {"lines": lines, "rows": found}


def printed(shape: str, lines: list[dict[str, Any]]) -> None:
    """The table of a model, as Markdown."""
    print(f"\n{shape}\n\n| " + " | ".join(lines[0]) + " |\n|" + " ---: |" * len(lines[0]))
    for line in lines:
        cells = ("" if each is None else str(each) for each in line.values())
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="a JSON file")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder of the models")
    parser.add_argument("--formats", nargs="+", default=["plain", "page-4"], help="as --kv-format")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--kv-memory", type=int, default=40, help="GB")
    parser.add_argument("--layers", type=int, help="only so many, for a quick look")
    parser.add_argument("--unpacked", action="store_true", help="weights in bfloat16, not 4 bits")
    parser.add_argument("--mlx-lm", metavar="PYTHON", help="an interpreter that has mlx-lm")
    asked = parser.parse_args()
    copied = bytes_per_second()
    device = mx.device_info()
    result: dict[str, Any] = {"date": time.strftime("%F"), "mlx": mx.__version__, "device": device}
    result |= {"copied, GB/s": round(copied / 1e9), "shapes": {}}
    for shape in asked.shapes:
        parts = [shape, asked.layers, "bfloat16" if asked.unpacked else None]
        folder = asked.models / "-".join(str(part) for part in parts if part is not None)
        if not (folder / "config.json").exists():
            weights = "bfloat16" if asked.unpacked else "4 bits"
            write(shape, folder, asked.layers, weights=weights)
        found = result["shapes"][folder.name] = compared(folder, asked, copied)
        printed(folder.name, found["lines"])
        asked.out.write_text(json.dumps(result, indent=1, default=str))
        memory = f"kv-{asked.kv_memory}"
        same = {each: same_tokens(folder, each, memory) for each in asked.formats}
        found["same tokens"] = same
        print(json.dumps(same), flush=True)
        asked.out.write_text(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main()
