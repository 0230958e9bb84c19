"""Measures mlx-lm's BatchGenerator on the requests: `mlx_lm_batch.py FOLDER OUT [what]`.

What: `quick` without the long prompt; `tokens-256` for answers of so many; `widths-1,8` for so many
streams at once. Needs no Quire.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model
from workload import LONG, bursts, drawn, tokens_asked, widths_asked


def run(model: Any, prompts: list[tuple[int, ...]], tokens: int, name: str) -> dict[str, Any]:
    """Generate all answers at once; return their times in milliseconds."""
    started = time.perf_counter()
    generator = BatchGenerator(
        model,
        max_tokens=tokens,
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
    )
    generator.insert([list(prompt) for prompt in prompts], [tokens] * len(prompts))
    first: dict[int, float] = {}
    steps: list[float] = []
    last = started
    done = 0
    while done < len(prompts):
        _, responses = generator.next()
        now = time.perf_counter()
        if len(responses) == len(prompts) and len(first) == len(prompts):
            steps.append((now - last) * 1e3)
        last = now
        for response in responses:
            first.setdefault(response.uid, now - started)
            done += response.finish_reason is not None
    generator.close()
    step = statistics.median(steps) if steps else None
    result = {
        "what": name,
        "streams": len(prompts),
        "prompt": len(prompts[0]),
        "seconds": round(time.perf_counter() - started, 3),
        "first token, s": round(max(first.values()), 3),
        "step, ms": step and round(step, 2),
        "tokens/s while all generate": step and round(len(prompts) / step * 1e3, 1),
    }
    print(json.dumps(result), flush=True)
    return result


def main(folder: str, out: Path, what: list[str]) -> None:
    started = time.perf_counter()
    model, _ = load_model(Path(folder))
    mx.eval(model.parameters())
    rows: list[dict[str, Any]] = [{"what": "open", "seconds": time.perf_counter() - started}]
    for name, prompts in bursts(3, widths_asked(what)):
        rows.append(run(model, prompts, tokens_asked(what), name))
    if "quick" not in what:
        rows.append(run(model, [drawn(LONG, 1)], 32, "one long"))
    out.write_text(json.dumps({"model": folder, "rows": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
