"""An agent's edits, replayed with n-grams off and on: tokens per second of its answers.

    python -m benchmarks.agent_edits [--turns 6] [--lines 24] [--rounds 2] [--cpu-time]
    python -m benchmarks.agent_edits --model FOLDER --lines 80 --context 32768 --out OUT

A conversation grows turn by turn: a file of this repository comes as a tool's result, and the
answer is the file with some lines changed. Neither the embedded model nor one of random weights can
write that; so each token that it samples is replaced by the trace's own, as if it had. Prompts,
caches, guesses and their verification are the engine's, which chooses its drafts by the clock that
is reported. Tokens are those of the embedded model's tokenizer, whatever model serves them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import mlx.core as mx

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.core.speculation import Speculation
from quire.demo import MODEL_DIR
from quire.engine.engine import Engine
from quire.engine.factory import open_engine
from quire.executor import eager
from quire.sampling import history
from quire.sampling.rows import Moved, RowSampling, Sampled
from quire.sampling.sampler import sample
from quire.text.tokenizer import Tokenizer

SETTINGS = {"MLX_ENABLE_TF32": "0", "MLX_USE_CUDA_GRAPHS": "0"}
"""Variables that `quire serve` sets for its engine. MLX reads them when it is imported."""
Row = dict[str, Any]
_FILES = Path(__file__).parent.parent / "src" / "quire" / "scheduler"
_BEYOND = 64
"""Most tokens behind an answer's end that a step samples."""
_CHANGED = 1 / 8
"""Share of the lines that an answer changes."""


@dataclass(frozen=True)
class Turn:
    """A prompt, which begins with all turns before it, and the answer to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def trace(turns: int, lines: int, limit: int) -> list[Turn]:
    """Return the turns of a session whose tokens fit into `limit`."""
    tokenizer, dice = Tokenizer.open(MODEL_DIR), random.Random(0)

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    said: list[int] = []
    found: list[Turn] = []
    for path in sorted(_FILES.glob("*.py"))[1 : turns + 1]:
        whole = path.read_text().splitlines()[:lines]
        edited = [each + "  # seen" if dice.random() < _CHANGED else each for each in whole]
        said += encoded(f"\nEdit {path.name}:\n" + "\n".join(whole) + "\n")
        answer = encoded("\n".join(edited) + "\n")
        if len(said) + len(answer) > limit:
            break
        found.append(Turn(tuple(said), tuple(answer)))
        said += answer
    return found


class Imposed:
    """Replaces sampled tokens by those of a trace, by the seeds of its requests."""

    def __init__(self, turns: list[Turn]) -> None:
        self._turns = turns
        answers = [[*turn.answer, *[0] * _BEYOND] for turn in turns]
        self._starts = [0, *accumulate(map(len, answers))]
        self._tokens = mx.array(list(chain(*answers)), dtype=mx.int32)
        eager.sample = self.sampled  # type: ignore[attr-defined,assignment]
        # Rows of greedy requests then say which position they are of.
        history.is_greedy = lambda params: False  # type: ignore[attr-defined]

    def sampled(
        self, logits: mx.array, rows: list[RowSampling], *, moved: Moved | None = None
    ) -> Sampled:
        """Sample as the engine does, then replace the tokens."""
        own = sample(logits, rows, moved=moved)
        places = mx.array([self._place(row) for row in rows], dtype=mx.int32)
        wanted = self._tokens[places if moved is None else places - moved.rows]
        return own._replace(tokens=mx.minimum(own.tokens, 0) + wanted)

    def _place(self, row: RowSampling) -> int:
        """Return the place of a row's token among those of all answers."""
        number = row.params.seed or 0
        place = row.position - len(self._turns[number].prompt)
        most = self._starts[number + 1] - self._starts[number] - 1
        return self._starts[number] + min(max(place, 0), most)


def replayed(engine: Engine, turns: list[Turn], name: str, way: Speculation) -> tuple[float, int]:
    """Serve the turns one after the other; return the seconds of answers, and their steps.

    The clock starts at the first token of each answer.
    """
    seconds, steps = 0.0, 0
    for number, turn in enumerate(turns):
        sampling = SamplingParams(temperature=0, seed=number)
        engine.add(
            Request(
                f"{name} {number}",
                turn.prompt,
                sampling,
                len(turn.answer),
                stop_on_loop=0,
                speculation=way,
                cache_salt=name,
            )
        )
        answer: list[int] = []
        while engine.has_work:
            begun, before = time.perf_counter(), len(answer)
            for output in engine.step():
                answer += output.token_ids
            engine.flush()
            if before:
                seconds += time.perf_counter() - begun
                steps += 1
        assert tuple(answer) == turn.answer, f"turn {number}, {way}: another answer"
    return seconds, steps


def measured(engine: Engine, turns: list[Turn], rounds: int) -> dict[Speculation, list[Row]]:
    """Replay the turns in every way, in turns; return and print each replay's figures."""
    tokens = sum(len(turn.answer) - 1 for turn in turns)
    found: dict[Speculation, list[Row]] = {"off": [], "ngram": [], "auto": []}
    for again in range(rounds):
        for way, rows in found.items():
            before = engine.stats()
            seconds, steps = replayed(engine, turns, f"{again} {way}", way)
            drafted = sum(dict(engine.stats().drafts).values()) - sum(dict(before.drafts).values())
            rate = round(tokens / seconds, 1)
            rows.append({"tokens/s": rate, "steps": steps, "drafted": drafted})
            print(f"{way}: {json.dumps(rows[-1])}", flush=True)
    return found


def main(asked: argparse.Namespace) -> None:
    config = EngineConfig(asked.model, max_context=asked.context)
    if asked.cpu_time:
        time.perf_counter = time.process_time
        config = replace(config, threads=1)
    engine = open_engine(config)
    turns = trace(asked.turns, asked.lines, limit=asked.context)
    Imposed(turns)
    tokens = sum(len(turn.answer) for turn in turns)
    print(f"{len(turns)} turns, {tokens} tokens of answers", flush=True)
    found = measured(engine, turns, asked.rounds)
    best = {way: max(row["tokens/s"] for row in rows) for way, rows in found.items()}
    times = {way: round(rate / best["off"], 2) for way, rate in best.items()}
    print(json.dumps(times))
    if asked.out is not None:
        result = {
            "model": Path(asked.model).name,
            "device": engine.info.device,
            "turns": len(turns),
            "prompt tokens of the last turn": len(turns[-1].prompt),
            "tokens of answers": tokens,
            "replays": found,
            "times": times,
        }
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    engine.close()


if __name__ == "__main__":
    if not SETTINGS.keys() <= os.environ.keys():
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.agent_edits", *sys.argv[1:]],
            {**SETTINGS, **os.environ},
        )
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL_DIR), help="a folder")
    parser.add_argument("--context", type=int, default=4096, help="most tokens of the session")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--lines", type=int, default=24, help="of each file")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="processor time, of one thread")
    parser.add_argument("--out", type=Path)
    main(parser.parse_args())
