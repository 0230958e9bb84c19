"""Speculation on and off in one run: tokens per second of the embedded model, with equal answers.

    python -m benchmarks.speculation [--streams 1 8 32] [--rounds 4]

Three loads: texts that the model is asked to repeat (what an edit of a given text is like), the
questions that it was trained for, and answers drawn at a high temperature, in which nothing hits.
Ways to speculate take turns on one engine after every few requests, since a machine's pace changes.
Tokens per second are those of the best round of each, ratios the medians of rounds. The clock runs
while any answer has begun, so that at one stream prompts are left out. Answers of the same seed
must be equal, whatever guessed them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.core.speculation import Speculation
from quire.demo import MODEL_DIR
from quire.engine.engine import Engine
from quire.engine.factory import open_engine
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

_DATA = Path(__file__).parent.parent / "tests" / "data" / "skills"
_SKILLS = ("counting", "json", "tool_call", "facts", "thinking", "tool_several", "memory")
_GREEDY = SamplingParams(temperature=0)
_WILD = SamplingParams(temperature=3.0)


def _items(skill: str) -> list[dict[str, object]]:
    with (_DATA / f"{skill}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def loads() -> dict[str, list[Request]]:
    """Return requests of each load, without ids."""
    tokenizer = Tokenizer.open(MODEL_DIR)
    template = ChatTemplate.open(MODEL_DIR, tokenizer.special_tokens)
    eos = tokenizer.eos_ids

    def request(item: dict[str, object], sampling: SamplingParams, tokens: int) -> Request:
        text = template.render(
            item["messages"],  # type: ignore[arg-type]
            tools=item["tools"],  # type: ignore[arg-type]
            enable_thinking=item["enable_thinking"],
        )
        prompt = tuple(tokenizer.encode(text, add_special_tokens=False))
        return Request("", prompt, sampling, max_tokens=tokens, stop_token_ids=eos)

    texts = [str(item["expected"]) for item in _items("repeat") if len(str(item["expected"])) > 60]
    repeats = [
        {
            "messages": [{"role": "user", "content": f"Say: {' '.join(texts[n : n + 3])}"}],
            "tools": None,
            "enable_thinking": False,
        }
        for n in range(0, 90, 3)
    ]
    columns = [_items(skill)[:12] for skill in _SKILLS]
    questions = [item for row in zip(*columns, strict=True) for item in row]
    return {
        "repeat a text": [request(item, _GREEDY, 160) for item in repeats],
        "questions": [request(item, _GREEDY, 160) for item in questions],
        "nothing hits": [
            replace(request(item, _WILD, 96), stop_token_ids=frozenset()) for item in questions
        ],
    }


def _serve(
    engine: Engine, requests: list[Request], streams: int, *, cpu_time: bool
) -> tuple[list[tuple[int, ...]], int, float]:
    """Serve requests, so many at once; return their answers, the tokens that the clock saw, and the
    seconds.
    """
    answers: dict[str, list[int]] = {each.id: [] for each in requests}
    waiting = list(reversed(requests))
    running = tokens = 0
    seconds = 0.0
    clock = time.process_time if cpu_time else time.perf_counter
    begun: set[str] = set()
    while waiting or engine.has_work:
        while waiting and running < streams:
            engine.add(waiting.pop())
            running += 1
        counts, started = bool(begun), clock()
        for output in engine.step():
            answers[output.request_id] += output.token_ids
            tokens += counts * len(output.token_ids)
            if output.finish is not None:
                running -= 1
                begun.discard(output.request_id)
            elif output.token_ids:
                begun.add(output.request_id)
        engine.flush()
        seconds += counts * (clock() - started)
    return [tuple(each) for each in answers.values()], tokens, seconds


def measure(
    engine: Engine,
    requests: list[Request],
    streams: int,
    rounds: int,
    ways: Sequence[Speculation],
    *,
    cpu_time: bool,
) -> None:
    """Print tokens per second for each way to speculate, and what part of the drafts stood."""
    rates: dict[Speculation, list[float]] = {way: [] for way in ways}
    expected: dict[int, list[tuple[int, ...]]] = {}
    drafts: Counter[str] = Counter()
    size = 1 if streams == 1 else 2 * streams
    for number in range(rounds):
        served = dict.fromkeys(ways, (0, 0.0))
        for first in range(0, len(requests), size):
            for way in ways:
                named = [
                    replace(
                        each,
                        id=f"{number} {way} {place}",
                        speculation=way,
                        cache_salt=f"{streams} {number} {way}",
                        sampling=replace(each.sampling, seed=place),
                    )
                    for place, each in enumerate(requests[first : first + size], first)
                ]
                before = Counter(dict(engine.stats().drafts))
                answers, tokens, seconds = _serve(engine, named, streams, cpu_time=cpu_time)
                served[way] = served[way][0] + tokens, served[way][1] + seconds
                for name, count in engine.stats().drafts:
                    drafts[f"{way} {name}"] += count - before[name]
                assert answers == expected.setdefault(first, answers), f"{way}: another answer"
        for way, (tokens, seconds) in served.items():
            rates[way].append(tokens / seconds)
    print(f"  {streams:3} streams  ", end="")
    for way, own in rates.items():
        ratio = median(rate / off for rate, off in zip(own, rates["off"], strict=True))
        print(f"{way} {max(own):8.0f} tok/s ({ratio:.2f})   ", end="")
    print({name: count for name, count in drafts.items() if count}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ways", nargs="+", default=["off", "auto"], help="off is the first")
    parser.add_argument("--loads", nargs="+", help="names of some loads; default: all")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=24, help="in a round, at one stream")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, and processor time, for the engine's choices, too: for a machine that "
        "others use",
    )
    options = parser.parse_args()
    if options.cpu_time:
        time.perf_counter = time.process_time
    threads = 1 if options.cpu_time else 0
    engine = open_engine(EngineConfig(str(MODEL_DIR), max_context=2048, threads=threads))
    for name, requests in loads().items():
        if options.loads and name not in options.loads:
            continue
        print(name)
        for streams in options.streams:
            count = max(options.requests, 2 * streams)
            measure(
                engine,
                list(islice(cycle(requests), count)),
                streams,
                options.rounds,
                options.ways,
                cpu_time=options.cpu_time,
            )
    engine.close()


if __name__ == "__main__":
    main()
