"""An agent's edits, replayed with n-grams off and on: tokens per second of processor time.

    python -m benchmarks.agent_edits [--turns 6] [--lines 24] [--rounds 2]

A conversation grows turn by turn: a file of this repository comes as a tool's result, and the
answer is the file with some lines changed. The embedded model cannot write that; so each token that
it samples is replaced by the trace's own, as if it had. Prompts, caches, guesses and their
verification are the engine's. The engine chooses its drafts by processor time, of one thread.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.core.speculation import Speculation
from quire.demo import MODEL_DIR
from quire.engine.engine import Engine
from quire.engine.factory import open_engine
from quire.executor import eager
from quire.sampling import history
from quire.sampling.rows import RowSampling, Sampled
from quire.sampling.sampler import sample
from quire.text.tokenizer import Tokenizer

_FILES = Path(__file__).parent.parent / "src" / "quire" / "scheduler"
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
        eager.sample = self.sampled  # type: ignore[attr-defined,assignment]
        # Rows of greedy requests then say which position they are of.
        history.is_greedy = lambda params: False  # type: ignore[attr-defined]

    def sampled(self, logits: mx.array, rows: list[RowSampling]) -> Sampled:
        """Sample as the engine does, then replace the tokens."""
        own = sample(logits, rows)
        wanted = [self._token(row) for row in rows]
        return replace(own, tokens=mx.minimum(own.tokens, 0) + mx.array(wanted, dtype=mx.int32))

    def _token(self, row: RowSampling) -> int:
        if row.params.seed is None:
            return 0
        turn = self._turns[row.params.seed]
        place = row.position - len(turn.prompt)
        return turn.answer[place] if 0 <= place < len(turn.answer) else 0


def replayed(engine: Engine, turns: list[Turn], name: str, way: Speculation) -> tuple[float, int]:
    """Serve the turns one after the other; return the seconds of answers, and their steps."""
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
            begun = time.process_time()
            for output in engine.step():
                answer += output.token_ids
            engine.flush()
            if answer:
                seconds += time.process_time() - begun
                steps += 1
        assert tuple(answer) == turn.answer, f"turn {number}, {way}: another answer"
    return seconds, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--lines", type=int, default=24, help="of each file")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    time.perf_counter = time.process_time
    config = EngineConfig(str(MODEL_DIR), max_context=4096, threads=1)
    engine = open_engine(config)
    turns = trace(asked.turns, asked.lines, limit=4000)
    Imposed(turns)
    tokens = sum(len(turn.answer) for turn in turns)
    print(f"{len(turns)} turns, {tokens} tokens of answers")
    best: dict[str, float] = {}
    for again in range(asked.rounds):
        for way in ("off", "auto"):
            before = engine.stats()
            seconds, steps = replayed(engine, turns, f"{again} {way}", way)
            best[way] = max(best.get(way, 0.0), tokens / seconds)
            drafted = sum(dict(engine.stats().drafts).values()) - sum(dict(before.drafts).values())
            print(f"{way}: {tokens / seconds:.0f} tok/s, {steps} steps, {drafted} drafted")
    print(f"auto is {best['auto'] / best['off']:.2f} times off")
    engine.close()


if __name__ == "__main__":
    main()
