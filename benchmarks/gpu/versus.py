"""Quire, vLLM, llama.cpp and mlx-lm on the same shapes and loads, in turns: `versus.py OUT.json`.

Each system runs in a process of its own, on models of random weights (`shapes.py`). Rows are merged
into OUT by system, shape, weights and load, so that a table can be made in several commands:

    python benchmarks/gpu/versus.py OUT.json --only quire --shapes llama-3.1-8b
    python benchmarks/gpu/versus.py OUT.json --only vllm --shapes llama-3.1-8b

A system that is not installed, or fails, leaves a row with its error. A model is written if its
folder is not there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loads import LOADS, Options, Row
from systems import NOTES, SYSTEMS

_HERE = Path(__file__).parent
_LLAMA = "llama.cpp"
_MODULES = {"quire": "mlx.core", "vllm": "vllm", "mlx-lm": "mlx_lm"}
_SHAPES = ("gemma-4-26b-a4b", "llama-3.1-8b")
_WEIGHTS = ("4 bits", "bfloat16", "fp8", "mxfp4")
"""As `shapes.py` names them."""
_KEY = ("system", "shape", "weights", "load")


def measured(asked: argparse.Namespace) -> list[Row]:
    """Open one system in this process, and return the rows of its loads."""
    options = _options(asked)
    started = time.perf_counter()
    system = SYSTEMS[asked.only[0]](asked.one, asked.kv_gigabytes, max(options.streams))
    opened = round(time.perf_counter() - started, 1)
    rows: list[Row] = []
    for load in asked.loads:
        for row in LOADS[load](system, options):
            rows.append({"load": load, **row, "about": system.about, "open_s": opened})
            print(json.dumps(rows[-1]), flush=True)
            asked.out.write_text(json.dumps(rows))
    return rows


def _options(asked: argparse.Namespace) -> Options:
    return Options(
        streams=tuple(asked.streams),
        pictures=tuple(asked.pictures),
        tokens=asked.tokens,
        rounds=asked.rounds,
        long=20_000 // asked.short,
        short=asked.short,
    )


def ran(system: str, folder: Path, asked: argparse.Namespace) -> list[Row]:
    """Measure a system in a process of its own; return its rows, and an error if it failed."""
    part = asked.out.with_suffix(f".{system}-{folder.name}.part")
    command = [sys.executable, __file__, str(part), "--one", str(folder), "--only", system]
    for name in ("loads", "streams", "pictures"):
        command += [f"--{name}", *map(str, getattr(asked, name))]
    for name in ("tokens", "rounds", "short", "kv-gigabytes"):
        command += [f"--{name}", str(getattr(asked, name.replace("-", "_")))]
    said = asked.out.with_suffix(f".{system}-{folder.name}.log")
    error = None
    with said.open("w") as log:
        try:
            done = subprocess.run(command, timeout=asked.limit, stderr=log, check=False)
            if done.returncode:
                error = f"exit code {done.returncode}: {_last_line(said)}"
        except subprocess.TimeoutExpired:
            error = f"stopped after {asked.limit} s"
    rows: list[Row] = json.loads(part.read_text()) if part.exists() else []
    part.unlink(missing_ok=True)
    if error is None:
        said.unlink()
        return rows
    measured_loads = {row["load"] for row in rows}
    missing = [load for load in asked.loads if load not in measured_loads] or asked.loads[-1:]
    return [*rows, *({"load": load, "error": error} for load in missing)]


def ran_llama(folder: Path, asked: argparse.Namespace) -> list[Row]:
    """Run llama.cpp's `llama-batched-bench` on `FOLDER.gguf`; write the file if it is not there."""
    if asked.llama_bench is None:
        return [{"load": "bursts", "error": "not run: no --llama-bench"}]
    model = folder.with_suffix(folder.suffix + ".gguf")
    if not model.exists():
        command = [sys.executable, str(_HERE / "gguf_files.py"), str(folder), str(model)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return [{"load": "bursts", "error": f"no file: {done.stderr.strip()[-200:]}"}]
    most = max(asked.streams)
    command = [str(asked.llama_bench), "-m", str(model), "-ngl", "99", "-fa", "on"]
    command += ["-c", str(most * (128 + asked.tokens)), "-npp", "128", "-ntg", str(asked.tokens)]
    command += ["-npl", ",".join(map(str, asked.streams)), "--output-format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [
        {
            "load": "bursts",
            "streams": each["pl"],
            "seconds": round(each["t"], 3),
            "first_token_s": round(each["t_pp"], 3),
            "whole_tokens_s": round(each["pl"] * each["tg"] / each["t"], 1),
            "tokens_s": round(each["speed_tg"], 1),
        }
        for each in found
    ]
    return rows or [{"load": "bursts", "error": done.stderr.strip()[-200:]}]


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line]
    return said[-1][-300:] if said else ""


def written(shape: str, weights: str, asked: argparse.Namespace) -> Path:
    """Return the folder of a shape's model; write it if it is not there."""
    folder = asked.models / (shape if weights == "4 bits" else f"{shape}-{weights}")
    only_config = set(asked.only) <= {"vllm", _LLAMA}
    if (folder / "config.json").exists() and (only_config or any(folder.glob("*.safetensors"))):
        return folder
    command = [sys.executable, str(_HERE / "shapes.py"), shape, str(folder)]
    command += ["--weights", weights] + ["--config-only"] * only_config
    command += ["--layers", str(asked.layers)] if asked.layers else []
    subprocess.run(command, check=True)
    return folder


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """Replace old rows by new ones of the same system, shape, weights and load.

    An error does not replace figures.
    """
    known = {_key(row) for row in old if "error" not in row}
    added = [row for row in new if "error" not in row or _key(row) not in known]
    replaced = set(map(_key, added))
    return [row for row in old if _key(row) not in replaced] + added


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in _KEY)


def main(asked: argparse.Namespace) -> None:
    """Run the systems in turns on each shape, and merge their rows into the table."""
    table: dict[str, Any] = {"rows": []}
    if asked.out.exists():
        table = json.loads(asked.out.read_text())
    for shape in asked.shapes:
        for weights in asked.weights:
            folder = written(shape, weights, asked)
            for system in asked.only:
                own = {"system": system, "shape": shape, "weights": weights}
                if system != _LLAMA and find_spec(_MODULES[system].split(".")[0]) is None:
                    print(f"{system} is not installed", flush=True)
                    continue
                started = time.strftime("%FT%TZ", time.gmtime())
                print(f"{system}, {shape}, {weights}", flush=True)
                found = ran_llama(folder, asked) if system == _LLAMA else ran(system, folder, asked)
                new = [{**own, **row, "at": started} for row in found]
                table["rows"] = merged(table["rows"], new)
                table["uneven"] = NOTES
                asked.out.write_text(json.dumps(table, indent=1) + "\n")
    print_table(table["rows"])


def print_table(rows: list[Row]) -> None:
    """Print the quickest round of each system, shape, weights, load and width."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (*_key(row), *(row.get(name, "") for name in ("streams", "pictures", "prompt")))
        if key not in best or row.get("seconds", 0) < best[key].get("seconds", 0):
            best[key] = row
    print("| system | shape | weights | load | streams | tokens/s | seconds | first token, s |")
    print("| --- | --- | --- | --- | ---: | ---: | ---: | ---: |")
    for (*what, streams, seen, prompt), row in best.items():
        load = what.pop() + {True: ", seen", False: ", text as long"}.get(seen, "")
        rate = row.get("tokens_s") or row.get("whole_tokens_s", "")
        first = row.get("first_token_s", row.get("first_token_p95_s", ""))
        cells = [*what, f"{load} {prompt}", streams, rate, row.get("seconds", row.get("error"))]
        print("| " + " | ".join(map(str, [*cells, first])) + " |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    every = [*SYSTEMS, _LLAMA]
    add("out", type=Path)
    add("--only", nargs="+", default=every, choices=every, help="systems")
    add("--shapes", nargs="+", default=_SHAPES)
    add("--weights", nargs="+", default=["4 bits"], choices=_WEIGHTS)
    add("--loads", nargs="+", default=["bursts"], choices=list(LOADS))
    add("--streams", nargs="+", type=int, default=list(Options.streams), help="of bursts")
    add("--pictures", nargs="+", type=int, default=list(Options.pictures), help="at once")
    add("--tokens", type=int, default=128, help="of each answer of a burst")
    add("--rounds", type=int, default=2)
    add("--short", type=int, default=1, help="divides the lengths of prompts, for a quick look")
    add("--layers", type=int, help="only so many, for a quick look")
    add("--kv-gigabytes", type=int, default=30)
    add("--models", type=Path, default=Path("models"), help="folder of the models")
    add("--limit", type=float, default=500, help="seconds of each system's run")
    add("--llama-bench", type=Path, help="llama.cpp's program llama-batched-bench")
    add("--one", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    if given.one:
        measured(given)
    else:
        main(given)
