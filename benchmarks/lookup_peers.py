"""Prompt lookup on and off, Quire beside llama.cpp's: tokens per second of processor time.

    python -m benchmarks.lookup_peers --peers-python PYTHON [--models FOLDER] [--tokens 96]

PYTHON is an interpreter with llama-cpp-python, whose `LlamaPromptLookupDecoding` guesses as many
tokens as its default says. Both serve a random Llama (`cpu.py`'s shape, Quire 4 bits, llama.cpp
Q4_0) with one thread and one stream. Greedy answers of random weights soon repeat themselves, so
that guesses come true: an edit of a given text is alike. Answers with and without guesses must be
equal; on a busy machine compare the ratios alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

_PROMPT = 64


def _prompts(count: int, vocabulary: int) -> list[list[int]]:
    dice = Random(1)
    return [[dice.randrange(10, vocabulary) for _ in range(_PROMPT)] for _ in range(count)]


def _rates(
    ways: dict[str, Callable[[list[int], int], list[int]]],
    prompts: list[list[int]],
    tokens: int,
    rounds: int,
) -> dict[str, float]:
    """Run ways in turns; return the best tokens per second of each, prompts left out."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        answers = []
        for way, run in ways.items():
            began = time.process_time()
            for prompt in prompts:
                run(prompt, 1)
            reading = time.process_time() - began
            began = time.process_time()
            answers.append([run(prompt, tokens) for prompt in prompts])
            seconds = time.process_time() - began - reading
            best[way] = max(best.get(way, 0.0), len(prompts) * (tokens - 1) / seconds)
        assert answers[0] == answers[1], "another answer"
    return best


def quire(model: Path, asked: argparse.Namespace) -> dict[str, float]:
    """Return Quire's rates."""
    time.perf_counter = time.process_time  # for the engine's choices, too
    from quire.core.config import EngineConfig
    from quire.core.request import Request, SamplingParams
    from quire.core.speculation import Speculation
    from quire.engine.factory import open_engine

    config = EngineConfig(str(model), kv_memory=256 << 20, threads=1, prefix_cache=False)
    engine = open_engine(config)
    number = 0

    def served(way: Speculation) -> Callable[[list[int], int], list[int]]:
        def run(prompt: list[int], tokens: int) -> list[int]:
            nonlocal number
            number += 1
            sampling = SamplingParams(temperature=0)
            engine.add(
                Request(
                    f"{number}", tuple(prompt), sampling, tokens, stop_on_loop=0, speculation=way
                )
            )
            answer: list[int] = []
            while engine.has_work:
                for output in engine.step():
                    answer += output.token_ids
                engine.flush()
            return answer

        return run

    prompts = _prompts(asked.prompts, engine.info.vocab_size)
    return _rates(
        {"off": served("off"), "lookup": served("ngram")}, prompts, asked.tokens, asked.rounds
    )


def llama_cpp(model: Path, asked: argparse.Namespace) -> dict[str, float]:
    """Return llama.cpp's rates."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    def opened(guesses: bool) -> Callable[[list[int], int], list[int]]:
        drafter = LlamaPromptLookupDecoding() if guesses else None
        llama = Llama(
            str(model),
            n_ctx=1024,
            n_threads=1,
            n_threads_batch=1,
            draft_model=drafter,
            logits_all=guesses,
            verbose=False,
        )

        def run(prompt: list[int], tokens: int) -> list[int]:
            llama.reset()
            answer: list[int] = []
            for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True):
                answer.append(int(token))
                if len(answer) >= tokens:
                    break
            return answer

        return run

    ways = {"off": opened(guesses=False), "lookup": opened(guesses=True)}
    return _rates(ways, _prompts(asked.prompts, asked.vocabulary), asked.tokens, asked.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--models", type=Path, default=Path("/tmp/quire-cpu-models"))
    parser.add_argument("--shape", default="225M")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=["quire", "llama.cpp"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side == "quire":
        print(json.dumps(quire(asked.models / asked.shape, asked)))
        return
    if asked.side == "llama.cpp":
        print(json.dumps(llama_cpp(asked.models / f"{asked.shape}-Q4_0.gguf", asked)))
        return
    config = json.loads((asked.models / asked.shape / "config.json").read_text())
    for side, python in (("quire", sys.executable), ("llama.cpp", asked.peers_python)):
        if python is None:
            continue
        command = [python, __file__, *sys.argv[1:], "--side", side]
        command += ["--vocabulary", str(config["vocab_size"])]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        rates = json.loads(ended.stdout.splitlines()[-1])
        ratio = rates["lookup"] / rates["off"]
        print(f"{side}: {rates['off']:.0f}, with guesses {rates['lookup']:.0f} ({ratio:.2f})")


if __name__ == "__main__":
    main()
