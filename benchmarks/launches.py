"""Primitives that a step launches on a Mac, beside mlx-lm's: `python -m benchmarks.launches OUT`.

Counted on a CPU with the flags of the Metal device (tests/support/launches.py), for 8 streams of
small configurations; nothing is computed and nothing is timed. Needs mlx-lm.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.launches import LEVEL, MORE, counted, launches, launches_of_mlx_lm


def main(out: Path) -> None:
    rows = []
    for name in (*LEVEL, *MORE):
        config = counted(name)
        own, theirs = launches(config), launches_of_mlx_lm(config)
        layers = config["num_hidden_layers"]
        rows.append(
            {"model": name, "layers": layers, "quire": own.total(), "mlx-lm": theirs.total()}
        )
        print(rows[-1], flush=True)
    out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
