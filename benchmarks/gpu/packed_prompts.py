"""Times prompts over plain and coded KV blocks: `packed_prompts.py FOLDER OUT [FORMAT...]`.

FOLDER is a model of `shapes.py`; formats are as in `--kv-format`, `plain` and `page-4` unless said
otherwise. For each format: a prompt of 20,000 tokens, 600 tokens after 8,000 cached ones with
nobody beside, bursts of 32 and 256 streams, and the agents' load of `loads.py`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from loads import QUESTION, SHARED, Asked, Options, Row, agents, at_once, bursts
from systems import Quire
from workload import LONG, drawn

_AGAIN = 3
_STREAMS = (32, 256)


def measured(folder: Path, kv_format: str) -> Row:
    """Open an engine over a format, and return its figures."""
    started = time.perf_counter()
    system = Quire(folder, 30, max(_STREAMS), kv_format)
    found: Row = {"format": kv_format, "opened_s": round(time.perf_counter() - started, 1)}
    found["long_s"] = [
        at_once(system, [Asked(f"long {n}", drawn(LONG, 7_000 + n), 2)])["first_token_s"]
        for n in range(_AGAIN)
    ]
    shared = drawn(SHARED, 8_000)
    at_once(system, [Asked("shared", shared, 2)])
    found["behind_cached_s"] = [
        at_once(system, [Asked(f"behind {n}", shared + drawn(QUESTION, 8_001 + n), 2)])[
            "first_token_s"
        ]
        for n in range(_AGAIN)
    ]
    found["bursts"] = list(bursts(system, Options(streams=_STREAMS, rounds=1)))
    found["agents"] = list(agents(system, Options(rounds=1)))
    found["graphs"] = _graphs(system)
    return found


def _graphs(system: Quire) -> list[str]:
    """Return which graphs were used: a format, rows, and whether they agreed with the model."""
    whole = getattr(system._engine._executor, "_graphs", None)
    return [] if whole is None else [f"{f.name} {n}: {ok}" for (f, n), ok in whole.verified.items()]


def main(folder: Path, out: Path, formats: list[str]) -> None:
    rows: list[Row] = []
    for each in formats:
        rows.append(measured(folder, each))
        print(json.dumps(rows[-1]), flush=True)
        out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or ["plain", "page-4"])
