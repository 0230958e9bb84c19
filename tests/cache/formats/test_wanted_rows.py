"""Layers that keep nothing get only the rows whose logits are wanted: the same, and less work."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import mlx.core as mx
import pytest

from quire.core.kv_format import KVFormat
from quire.executor.inputs import StepInputs
from quire.models.base import ForwardContext
from quire.models.weights.loader import LoadedModel, open_model
from tests.cache.formats.harness import TOLERANCE, Bench, difference, requests
from tests.support.everyday import everyday
from tests.support.tiny_models import tiny_model

# Prompts that end within a page, with its last token, and with the first of the next.
LENGTHS = (1, 40, 63, 64, 65, 128, 130, 192)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Return Gemma 4 with layers that share others' keys."""
    return open_model(str(tiny_model(tmp_path_factory.mktemp("ple"), "gemma4_ple")))


FORMATS = (
    KVFormat(),
    KVFormat("page", 4, 4),
    KVFormat("uniform", 8, 8, 64),
    KVFormat("turbo", 4, 4),
)


@pytest.mark.parametrize(
    ("format", "most"),
    everyday(
        product(FORMATS, (2048, 50)), lambda format, most: (format in FORMATS[:2]) == (most == 50)
    ),
    ids=lambda each: getattr(each, "name", each),
)
def test_the_same_as_with_all_rows(
    shared: LoadedModel, format: KVFormat, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(format, LENGTHS, new=3)
    ids = [request.id for request in asked]
    got = Bench(shared, max_step_tokens=most).run(asked)
    monkeypatch.setattr(StepInputs, "sampled_rows_only", lambda self: None)
    expected = Bench(shared, max_step_tokens=most).run(asked)
    assert difference(expected, got, ids) <= TOLERANCE


def test_a_prompt_s_other_rows_stay_out(
    shared: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrowed: list[tuple[int, int]] = []
    real = StepInputs.sampled_rows_only

    def spy(self: StepInputs) -> tuple[ForwardContext, mx.array] | None:
        step = real(self)
        if step is not None:
            narrowed.append((self.tokens.shape[0], step[0].tokens.shape[0]))
        return step

    monkeypatch.setattr(StepInputs, "sampled_rows_only", spy)
    Bench(shared).run(requests(KVFormat(), (100, 30), new=4))
    assert narrowed
    assert all(wanted <= 2 and wanted < rows for rows, wanted in narrowed)


def test_a_family_that_shares_nothing_needs_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepInputs, "sampled_rows_only", lambda self: pytest.fail("asked"))
    Bench(open_model(str(tiny_model(tmp_path, "gemma4")))).run(requests(KVFormat(), (30,), new=2))
