"""Serves a model and asks for many answers at once: `gpu_http.py FOLDER OUT [what]`.

Prompts are 128 token ids each, those of `gpu/engine.py`. What: `tokens-256` for answers of so many;
`kv-8` for 8 GB of KV cache; `widths-1,256` for so many streams at once. The folder gets a tokenizer
of made-up words if it has none. `speculate-off,auto` serves each burst in these modes; without it,
off as in `gpu/engine.py`. Random weights repeat themselves, so lookups always hit.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from gpu.workload import bursts, kv_gigabytes, tokens_asked, widths_asked
from servers import SERVERS, running
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.cli.load import Target, closed_loop

_LIMIT_S = 300.0


def with_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer, with a word for each further token of the model's."""
    file = folder / "tokenizer.json"
    if file.exists():
        return
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary |= {f"\u0120w{number}": number for number in range(len(letters), size)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(file))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def steps(target: Target) -> int:
    """Return the engine's number of steps. Steps beyond an answer's tokens have read prompts."""
    with urlopen(f"{target.base}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        int(float(line.split()[-1])) for line in lines if line.startswith("quire_steps_total")
    )


def run(
    target: Target, model: str, prompts: list[tuple[int, ...]], tokens: int, name: str, mode: str
) -> dict[str, Any]:
    """Generate all answers at once, to their ends."""
    body = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {
        "speculation": mode,
        "cache_salt": mode,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    bodies = [json.dumps(body | {"prompt": prompt}).encode() for prompt in prompts]
    before = steps(target)
    exchanges = asyncio.run(closed_loop(target, "/completions", bodies, len(bodies), _LIMIT_S))
    answers = [each.timings() for each in exchanges]
    for answer in answers:
        if answer.error is not None:
            raise SystemExit(f"{name}: {answer.error}")
    started = min(answer.started for answer in answers)
    took = max(answer.ended for answer in answers) - started
    first = max(answer.text_times[0] for answer in answers) - started
    result = {
        "what": name,
        "streams": len(prompts),
        "prompt": len(prompts[0]),
        "speculation": mode,
        "seconds": round(took, 3),
        "first token, s": round(first, 3),
        "tokens/s": round(sum(answer.tokens for answer in answers) / took, 1),
        "steps": steps(target) - before,
    }
    print(json.dumps(result), flush=True)
    return result


def main(folder: Path, out: Path, what: list[str]) -> None:
    with_tokenizer(folder)
    quire = next(server for server in SERVERS if server.name == "quire")
    widths = widths_asked(what)
    options = ["--kv-memory", f"{kv_gigabytes(what)}GB", "--max-sequences", f"{max(64, *widths)}"]
    modes = next((each.removeprefix("speculate-") for each in what if "speculate" in each), "off")
    server = replace(quire, command=(*quire.command, *options))
    rows: list[dict[str, Any]] = []
    with running(server, str(folder), sys.executable, limit_s=_LIMIT_S) as (target, seconds):
        rows.append({"what": "open", "seconds": seconds})
        for name, prompts in bursts(widths=widths):
            for mode in modes.split(","):
                rows.append(run(target, folder.name, prompts, tokens_asked(what), name, mode))
    out.write_text(json.dumps({"model": str(folder), "rows": rows}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
