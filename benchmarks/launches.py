"""Primitives that a step launches on a Mac, beside mlx-lm's: `python -m benchmarks.launches OUT`.

Counted on a CPU with the flags of the Metal device (tests/support/launches.py), for 1 and 8 streams
of small configurations, and the processor time in which Python builds a step of 16 layers; nothing
of it is a Mac's time. Needs mlx-lm.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.launches import (
    LEVEL,
    build_seconds,
    counted,
    deepened,
    launches,
    launches_of_mlx_lm,
)

STREAMS = (1, 8)


def main(out: Path, names: tuple[str, ...] = LEVEL) -> None:
    rows: list[dict[str, Any]] = []
    for name in names:
        config = counted(name)
        for streams in STREAMS:
            own, theirs = build_seconds(deepened(name), streams)
            row = {
                "model": name,
                "streams": streams,
                "layers": config["num_hidden_layers"],
                "quire": launches(config, streams).total(),
                "mlx-lm": launches_of_mlx_lm(config, streams).total(),
                "built in, ms, 16 layers": [round(each * 1e3, 2) for each in (own, theirs)],
                "times": round(own / theirs, 2),
            }
            rows.append(row)
            print(row, flush=True)
    out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]) or LEVEL)
