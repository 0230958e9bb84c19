"""More than text comes out: pooled hidden states and scores, against a run without any cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from quire.core.config import EngineConfig
from quire.core.request import Embed, FinishReason, Output, Request, Score, ScorePrompt, Task
from quire.models.weights.loader import LoadedModel
from tests.models.solo import SoloStep, solo_logits
from tests.support.everyday import everyday
from tests.support.opened import Open
from tests.support.parity import Company, executor_of, prompts

# Full attention; a recurrent state; layers that only wanted rows pass.
FAMILIES = ("llama", "qwen3_5", "gemma4_ple")
TASKS: dict[str, Task] = {
    "last": Embed("last"),
    "mean": Embed("mean"),
    "as it is": Embed("mean", normalized=False),
    "score": Score((7, 200, 9)),
}
LENGTHS = (1, 40, 64, 130)
Floats = npt.NDArray[np.float32]


def expected(loaded: LoadedModel, request: Request) -> Floats:
    """Return the vector by the definitions in `core/request.py`."""
    tokens, model = list(request.prompt), loaded.model
    if isinstance(request.task, Score):
        logits = np.array(solo_logits(model, tokens)[-1])
        return (logits - np.logaddexp.reduce(logits))[list(request.task.labels)]
    assert isinstance(request.task, Embed)
    hidden = np.array(model(SoloStep(model.layout, tokens)))
    vector = hidden.mean(axis=0) if request.task.pooling == "mean" else hidden[-1]
    return vector / np.linalg.norm(vector) if request.task.normalized else vector


def ends(company: Company, wanted: list[Request]) -> dict[str, Output]:
    """Return the one output of each request."""
    company.run(wanted)
    for request in wanted:
        answer = company.answers[request.id]
        assert (len(answer.ends), answer.tokens) == (1, [])
    return {request.id: company.answers[request.id].ends[0] for request in wanted}


def check(loaded: LoadedModel, got: dict[str, Output], wanted: list[Request]) -> None:
    for request in wanted:
        output = got[request.id]
        assert output.finish is FinishReason.STOP
        assert output.vector is not None
        want = expected(loaded, request)
        assert np.abs(np.array(output.vector) - want).max() < 1e-4 * max(1, np.abs(want).max())


DAILY = [("llama", name) for name in TASKS] + [
    (family, name) for family in FAMILIES[1:] for name in ("mean", "score")
]


@pytest.mark.parametrize(
    ("family", "name"), everyday(product(FAMILIES, TASKS), lambda *case: case in DAILY)
)
def test_beside_streams_in_chunks_and_warm(opened: Open, family: str, name: str) -> None:
    loaded = opened(family)
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20, max_step_tokens=50)
    wanted = [replace(request, task=TASKS[name]) for request in prompts(LENGTHS)]
    company = Company(loaded, config)
    for stream in prompts((9, 30), tokens=40, seed=4):
        company.add(replace(stream, id=f"stream {stream.id}"))
    check(loaded, ends(company, wanted), wanted)
    again = [replace(request, id=f"again {request.id}") for request in wanted]
    check(loaded, ends(company, again), again)
    reused = company.answers["again r3"].ends[0].cached_tokens
    assert reused == (0 if isinstance(TASKS[name], Embed) and "last" not in name else 129)
    assert len(company.answers["stream r1"].tokens) == 40


@pytest.mark.parametrize("name", everyday(TASKS, lambda name: name in ("mean", "score")))
def test_after_pre_emption_and_abort(opened: Open, name: str) -> None:
    loaded = opened("llama")
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20, block_size=16, max_step_tokens=20)
    budget = Company(loaded, config).engine._scheduler.limits.worst_case_bytes(
        config.kv_format, 280
    )
    company = Company(loaded, replace(config, kv_memory=budget))
    streams = prompts((60, 50), tokens=120, seed=4)
    for stream in streams:
        company.add(replace(stream, id=f"stream {stream.id}"))
    wanted = [replace(request, task=TASKS[name]) for request in prompts(LENGTHS)]
    gone = replace(wanted[3], id="gone")
    company.add(gone)
    for _ in range(12):
        company.step()
    company.engine.abort("gone")
    check(loaded, ends(company, wanted), wanted)
    assert [end.finish for end in company.answers["gone"].ends] == [FinishReason.ABORT]
    assert executor_of(company.engine)._vectors.sums == [], "sums of requests that ended are kept"


def test_labels_that_are_no_tokens_are_refused(opened: Open) -> None:
    loaded = opened("llama")
    company = Company(loaded, EngineConfig(str(loaded.path), kv_memory=32 << 20))
    for number, labels in enumerate(((), (5, 256), (-1,))):
        request = Request(f"r{number}", (5, 6), task=Score(labels))
        company.run([request])
        (end,) = company.answers[request.id].ends
        assert end.error is not None
        assert (end.error.status, end.error.param) == (400, "labels")
        assert "from 0 to 255" in end.error.message


def test_a_bias_on_what_is_no_token_harms_nobody_else(opened: Open) -> None:
    """A bias on such an id once failed the step, and every request in it."""
    loaded = opened("llama")
    company = Company(loaded, EngineConfig(str(loaded.path), kv_memory=32 << 20))
    good, bad = prompts((5, 6), tokens=5)
    biased = replace(bad, sampling=replace(bad.sampling, logit_bias=((256, 1.0),)))
    company.run([good, biased])
    (end,) = company.answers[bad.id].ends
    assert end.error is not None
    assert (end.error.status, end.error.param) == (400, "logit_bias")
    assert len(company.answers[good.id].tokens) == 5


def test_positions_come_from_the_model_s_own_rule(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is multimodal RoPE's: three coordinates a token, and fewer positions than tokens."""
    loaded = opened("qwen3_5")
    config = EngineConfig(str(loaded.path), kv_memory=32 << 20, max_step_tokens=30)

    def positions(tokens: tuple[int, ...], images: object = ()) -> npt.NDArray[np.int32]:
        """Return positions of a text with a picture of 4 by 5 after ten tokens
        (arXiv:2409.12191).
        """
        text = np.arange(10)
        rows, columns = np.divmod(np.arange(20), 5)
        behind = np.arange(len(tokens) - 30) + 15
        return np.stack(
            [
                np.concatenate([text, part, behind])
                for part in (np.full(20, 10), rows + 10, columns + 10)
            ]
        ).astype(np.int32)

    wanted = prompts((40, 70), tokens=12)
    (unlike,) = Company(loaded, config).run(wanted[:1]).values()
    monkeypatch.setattr(type(loaded.model), "positions", lambda self, *a: positions(*a))
    company = Company(loaded, config)
    company.run(wanted)
    assert company.answers["r0"].tokens != unlike.tokens
    for request in wanted:
        tokens = [*request.prompt, *company.answers[request.id].tokens]
        step = SoloStep(loaded.model.layout, tokens)
        step.positions = mx.array(positions(tuple(tokens)))
        logits = loaded.model.logits(loaded.model(step))
        chosen = mx.argmax(logits, axis=-1).tolist()[len(request.prompt) - 1 : -1]
        assert company.answers[request.id].tokens == chosen


def test_prompts_scored_in_chunks(opened: Open) -> None:
    """Chunks of 50 tokens, and more rows than are scored at once."""
    loaded = opened("llama")
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20, max_step_tokens=50)
    asked = [
        replace(each, task=ScorePrompt(each.prompt[1:], top=3)) for each in prompts((2, 65, 300))
    ]
    got = ends(Company(loaded, config), asked)
    whole = replace(config, max_step_tokens=2048)
    at_once = ends(Company(loaded, whole), asked)
    for request in asked:
        assert isinstance(request.task, ScorePrompt)
        logits = np.array(solo_logits(loaded.model, list(request.prompt)))[:-1]
        normal = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        for output in (got[request.id], at_once[request.id]):
            assert output.vector is not None
            read = request.task.read(output.vector)
            assert [each.token_id for each in read] == list(request.prompt[1:])
            for row, token in zip(normal, read, strict=True):
                assert abs(row[token.token_id] - token.logprob) < 1e-4
                assert token.rank == 1 + (row > row[token.token_id]).sum()
                assert [each for each, _ in token.top] == list(np.argsort(-row, kind="stable")[:3])
