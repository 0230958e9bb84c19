"""Primitives that a step launches on a Mac, beside mlx-lm's: `python -m benchmarks.launches OUT`.

Counted on a CPU with the flags of the Metal device (tests/support/launches.py), for 8 streams of
small configurations; nothing of a counted step is computed. For some families, with 16 layers, the
processor time in which Python builds a step is measured, too. Needs mlx-lm.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.launches import (
    LEVEL,
    build_seconds,
    build_seconds_of_mlx_lm,
    counted,
    deepened,
    launches,
    launches_of_mlx_lm,
)

BUILT = ("llama", "gemma4", "gemma4_moe")


def main(out: Path) -> None:
    rows: list[dict[str, Any]] = []
    for name in LEVEL:
        config = counted(name)
        own, theirs = launches(config), launches_of_mlx_lm(config)
        layers = config["num_hidden_layers"]
        rows.append(
            {"model": name, "layers": layers, "quire": own.total(), "mlx-lm": theirs.total()}
        )
        if name in BUILT:
            deep = deepened(name)
            times = build_seconds(deep), build_seconds_of_mlx_lm(deep)
            rows[-1]["built in, ms, 16 layers"] = [round(each * 1e3, 2) for each in times]
        print(rows[-1], flush=True)
    out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
