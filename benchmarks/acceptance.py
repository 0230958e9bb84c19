"""Measures the acceptance of the embedded model's drafts, by temperature and rule of acceptance.

    python -m benchmarks.acceptance [--temperatures 0 0.7 1.0] [--questions 40]

The answers are sampled by the engine, one at a time. For each token, the distribution of the model
and that of the head are known afterwards, so each rate is an expectation, not a count:

* likeliest: the head's likeliest token stands if it equals the token that the model draws. This is
  what the engine does. Rejection sampling (Leviathan et al., arXiv:2211.17192) of such a guess
  accepts it with the same probability.
* rejection: the head draws by its own distribution; rejection sampling accepts it with the
  probability sum(min(p, q)). No rule accepts more of the guesses that are drawn so, but the answer
  is another than without guesses, for the same seed.
* same noise: the head draws with the randomness of the token's own position, as a draft model does
  here; the guess stands if it equals the model's token.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import mlx.core as mx
import numpy as np
from benchmarks.speculation import loads

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.demo import MODEL_DIR
from quire.device.device import open_device
from quire.engine.assembly import assemble
from quire.executor.guessing import FinalStates
from quire.models.draft_head import DraftHead, GuessStep, open_draft_head
from quire.models.weights.loader import LoadedModel, open_model
from quire.sampling.rows import RowSampling
from quire.sampling.sampler import sample


class Recorder:
    """A guesser that guesses nothing, and keeps each state with the token drawn from it."""

    layers = range(0)
    arrays = ()

    def __init__(self) -> None:
        self.states: list[mx.array] = []
        self.tokens: list[mx.array] = []

    def guess(self, states: FinalStates, tokens: mx.array, count: int) -> mx.array | None:
        self.states.append(states.sampled)
        self.tokens.append(tokens)
        return None

    def read(self, inputs: object, hidden: mx.array) -> None:
        pass


def rates(
    loaded: LoadedModel, head: DraftHead, requests: list[Request], sampling: SamplingParams
) -> tuple[int, dict[str, float]]:
    """Return the number of guesses, and the share of them that stands, by the way to guess."""
    recorder, step = Recorder(), GuessStep(loaded.model, head)
    config = EngineConfig(str(MODEL_DIR), kv_memory=64 << 20, speculate="off")
    engine = assemble(loaded, config, guesser=recorder)
    totals: dict[str, float] = {"likeliest": 0.0, "rejection": 0.0, "same noise": 0.0}
    count = 0
    for number, request in enumerate(requests):
        recorder.states.clear()
        recorder.tokens.clear()
        params = replace(sampling, seed=number)
        engine.add(replace(request, id=str(number), sampling=params))
        while engine.has_work:
            engine.step()
            engine.flush()
        if len(recorder.tokens) < 2:
            continue
        states = mx.concatenate(recorder.states)
        tokens = mx.concatenate(recorder.tokens)
        own = loaded.model.logits(states[1:])
        _, guessed = step.ahead(states[:-1], tokens[:-1])
        if step.tokens is not None:  # the other tokens are never guessed
            whole = mx.full(own.shape, -mx.inf)
            whole[:, step.tokens[:, 0]] = guessed
            guessed = whole
        rows = [
            RowSampling(params, len(request.prompt) + 1 + place) for place in range(len(tokens) - 1)
        ]
        for way, found in _stand(own, guessed, tokens[1:], rows, params.temperature).items():
            totals[way] += found
        count += len(rows)
    return count, {way: total / count for way, total in totals.items()}


def _stand(
    own: mx.array,
    guessed: mx.array,
    tokens: mx.array,
    rows: list[RowSampling],
    temperature: float,
) -> dict[str, float]:
    """Return how many of one answer's guesses are expected to stand, by the way to guess."""
    best = mx.argmax(guessed, axis=-1)
    drawn = sample(guessed, rows).tokens
    coupled = float(mx.sum(drawn == tokens).item())
    if temperature == 0:
        right = float(mx.sum(best == tokens).item())
        return {"likeliest": right, "rejection": right, "same noise": coupled}
    p, q = (np.array(mx.softmax(each / temperature, axis=-1)) for each in (own, guessed))
    likeliest = p[np.arange(len(p)), np.array(best)].sum()
    return {
        "likeliest": float(likeliest),
        "rejection": float(np.minimum(p, q).sum()),
        "same noise": coupled,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--questions", type=int, default=40)
    options = parser.parse_args()
    open_device("auto", "auto", 0)
    loaded = open_model(str(MODEL_DIR))
    head = open_draft_head(loaded.path, loaded.model)
    assert head is not None
    requests = loads()["questions"][: options.questions]
    for temperature in options.temperatures:
        count, found = rates(loaded, head, requests, SamplingParams(temperature=temperature))
        shares = "   ".join(f"{way} {share:.3f}" for way, share in found.items())
        print(f"temperature {temperature:g}: {count} guesses   {shares}", flush=True)


if __name__ == "__main__":
    main()
