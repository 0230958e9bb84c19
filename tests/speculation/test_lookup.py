"""Drafters without a model: prompt and answer, an expected answer, other requests' answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.speculation import Speculation
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.draft_lengths import EveryDraft
from quire.speculation.drafters import allowed, lookup_drafters
from tests.support.parity import Company, prompts
from tests.support.tiny_models import tiny_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_model(tmp_path_factory.mktemp("llama"), "llama")
    return open_model(str(folder), dtype="float32")


def company(loaded: LoadedModel, speculate: Speculation) -> Company:
    config = EngineConfig(str(loaded.path), kv_memory=16 << 20, block_size=16, speculate=speculate)
    return Company(loaded, config, lookup_drafters(), EveryDraft())


def drafted(served: Company) -> dict[str, int]:
    return dict(served.engine.stats().accepted_drafts)


def test_an_answer_is_drafted_from_what_is_expected_and_from_earlier_answers(
    loaded: LoadedModel,
) -> None:
    (request,) = prompts([20], tokens=40)
    plain = company(loaded, "off")
    answer = plain.run([request])["r0"].tokens
    steps = plain.engine.stats().steps
    assert plain.engine.stats().drafts == ()

    served = company(loaded, "auto")
    # Expected is the answer, but for a few tokens in the middle.
    expected = (*answer[:15], 3, 4, *answer[17:])
    first = served.run([replace(request, prediction=expected)])["r0"]
    assert first.tokens == answer
    assert drafted(served)["prediction"] > 15
    assert first.ends[0].accepted_drafts > 15
    assert first.ends[0].rejected_drafts > 0
    once = served.engine.stats().steps
    assert once < 0.6 * steps

    again = served.run([replace(request, id="again")])["again"]
    assert again.tokens == answer
    assert drafted(served)["cached"] > 20
    assert served.engine.stats().steps - once < 0.5 * steps


def test_repeated_tokens_are_drafted(loaded: LoadedModel) -> None:
    """An answer of two tokens alone repeats itself."""
    (request,) = prompts([5], tokens=60)
    params = replace(request.sampling, logit_bias=((7, 100.0), (8, 100.0)))
    request = replace(request, sampling=params)
    plain, served = company(loaded, "off"), company(loaded, "ngram")
    answer = plain.run([request])["r0"].tokens
    assert served.run([request])["r0"].tokens == answer
    assert drafted(served).get("ngram", 0) > 10
    assert served.engine.stats().steps < 0.8 * plain.engine.stats().steps


ALL = frozenset({"prediction", "cached", "ngram", "mtp"})


@pytest.mark.parametrize(
    ("own", "default", "expects", "names"),
    [
        (None, "auto", False, {"cached", "ngram", "mtp"}),
        (None, "auto", True, ALL),
        (None, "off", False, set()),
        (None, "off", True, {"prediction"}),
        ("off", "auto", True, set()),
        ("ngram", "off", False, {"cached", "ngram"}),
        ("mtp", "off", True, ALL),
    ],
)
def test_a_request_chooses_what_guesses_its_tokens(
    own: Speculation | None, default: Speculation, expects: bool, names: set[str]
) -> None:
    request = Request("r", (1,), speculation=own, prediction=(1,) if expects else ())
    assert allowed(request, default, ALL) == names
