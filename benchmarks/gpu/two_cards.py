"""Runs models split over cards beside the same on one card, without HTTP: `two_cards.py OUT`.

`python benchmarks/gpu/two_cards.py OUT.json` writes the shapes of Gemma 4 31B in bfloat16 and Llama
3.1 70B in 4 bits (a file of one layer's size, whose layers have the same numbers), and runs bursts
of 1, 8 and 32 streams on one card and on two, each in processes of its own. The log says whether
steps run as CUDA graphs. On a machine without cards processes of CPUs take part: `--shapes tiny
--tokens 8`. What has been measured is in the file at any time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from quire.device.cards import count_cards, see_one_card
from quire.device.private import use_private_cache

_FORMS = {"gemma-4-31b": "bfloat16"}
"""Shapes that are run in bfloat16; the others in 4 bits."""
_SHAPES = ("llama-3.1-70b", "gemma-4-31b")


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Open a model in this process, and in those of the other ranks, and run the bursts."""
    ranks = asked.ranks[0]
    os.environ.setdefault("MLX_ENABLE_TF32", "0")  # as `quire serve` sets for its engine
    os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")
    use_private_cache()
    if ranks > 1:
        see_one_card(0)
    # MLX looks for cards when it is imported.
    from workload import bursts

    from engine import run
    from quire.core.config import EngineConfig
    from quire.device.device import current_device
    from quire.engine.factory import open_engine

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    begun = time.perf_counter()
    config = EngineConfig(
        asked.one, ranks=ranks, kv_memory=asked.kv_gigabytes << 30, speculate="off"
    )
    engine = open_engine(config)
    opened = time.perf_counter() - begun
    rows = [run(engine, prompts, asked.tokens, name) for name, prompts in bursts(2)]
    info = engine.info
    return {
        "device": info.device,
        "open, s": round(opened, 1),
        "peak GB": round(current_device().memory()["arrays_peak"] / 1e9, 1),
        "ranks' work, ms": [round(each * 1e3, 3) for each in engine.stats().work_seconds],
        "rows": rows,
    }


def written(shape: str, models: Path) -> Path:
    """Return the folder of a shape's model; write it if it is not there."""
    folder = models / f"{shape}-repeated"
    if not (folder / "config.json").exists():
        here = Path(__file__).with_name("shapes.py")
        command = [sys.executable, str(here), shape, str(folder), "--repeated"]
        command += ["--weights", _FORMS.get(shape, "4 bits")]
        subprocess.run(command, check=True)
    return folder


def main(asked: argparse.Namespace) -> None:
    """Run each shape by each number of ranks in a process of its own; go on after a failure."""
    results: list[dict[str, Any]] = []
    for shape in asked.shapes:
        folder = written(shape, asked.models)
        for ranks in asked.ranks:
            part = asked.out.with_suffix(f".{shape}-{ranks}.json")
            command = [sys.executable, __file__, str(part), "--one", str(folder)]
            command += ["--ranks", str(ranks), "--tokens", str(asked.tokens)]
            command += ["--kv-gigabytes", str(asked.kv_gigabytes)]
            result: dict[str, Any] = {"shape": shape, "ranks": ranks}
            try:
                ended = subprocess.run(command, timeout=asked.limit, check=False)
                result["exit code"] = ended.returncode
            except subprocess.TimeoutExpired:
                result["exit code"] = f"none after {asked.limit} s"
            if part.exists():
                result |= json.loads(part.read_text())
                part.unlink()
            results.append(result)
            asked.out.write_text(json.dumps({"cards": count_cards(), "runs": results}, indent=1))
            print(json.dumps({key: each for key, each in result.items() if key != "rows"}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="+", default=_SHAPES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--kv-gigabytes", type=int, default=8, help="of each rank")
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--limit", type=float, default=250, help="seconds of each run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        given.out.write_text(json.dumps(measure(given)))
    else:
        main(given)
