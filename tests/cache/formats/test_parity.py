"""Packed caches in company: whatever runs beside a request, however it is cut, it gets the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.core.kv_format import KVFormat
from quire.models.weights.loader import LoadedModel, open_model
from tests.cache.formats.harness import TOLERANCE, Answers, Bench, difference, requests
from tests.support.tiny_models import tiny_model

LENGTHS = (1, 63, 64, 130, 150, 40)
NEW = 14

PAGE4, PAGE84 = KVFormat("page", 4, 4), KVFormat("page", 8, 4)
UNIFORM8, TURBO = KVFormat("uniform", 8, 8, 64), KVFormat("turbo", 3.5, 3.5)
FORMATS = (PAGE4, PAGE84, UNIFORM8, TURBO)
REST: tuple[KVFormat, ...] = (
    *(KVFormat("page", bits, bits) for bits in (2, 3, 5, 6, 8)),
    KVFormat("page", 4, 3),
    KVFormat("uniform", 4, 4, 32),
    KVFormat("turbo", 2, 2),
    KVFormat("turbo", 4, 4),
    KVFormat(dtype="float16"),
    KVFormat(dtype="bfloat16"),
)

FAMILIES = ("llama", "gemma4", "gemma4_ple", "qwen3_5")


def _cases() -> Sequence[object]:
    # Two kinds of store; shared and sliding layers, and plain ones.
    quick = [("gemma4_ple", PAGE4), ("llama", TURBO)]
    slow = [(family, each) for family in FAMILIES for each in (*FORMATS, *REST)]
    cases = [pytest.param(case, id=f"{case[0]}-{case[1].name}") for case in quick]
    return cases + [
        pytest.param(case, id=f"{case[0]}-{case[1].name}", marks=pytest.mark.slow)
        for case in slow
        if case not in quick
    ]


@dataclass
class Case:
    """One family in one format, and what each request gets alone."""

    loaded: LoadedModel
    format: KVFormat
    alone: Answers

    def worst(self, got: Answers, ids: tuple[int, ...] = tuple(range(len(LENGTHS)))) -> float:
        """Return the largest difference of a logit to what each request gets alone."""
        return difference(self.alone, got, [f"{self.format.name}:{id}" for id in ids])


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    models: dict[str, LoadedModel] = {}

    def find(family: str) -> LoadedModel:
        if family not in models:
            folder: Path = tmp_path_factory.mktemp(family)
            models[family] = open_model(str(tiny_model(folder, family)))
        return models[family]

    return find


def alone(loaded: LoadedModel, format: KVFormat) -> Answers:
    """Serve each request alone, in an engine of its own."""
    answers = Answers()
    for request in requests(format, LENGTHS, NEW):
        got = Bench(loaded).run([request])
        answers.tokens.update(got.tokens)
        answers.logits.update(got.logits)
    return answers


@pytest.fixture(scope="module", params=_cases())
def case(request: pytest.FixtureRequest, opened: Callable[[str], LoadedModel]) -> Case:
    family, format = request.param
    return Case(opened(family), format, alone(opened(family), format))


def test_batch_of_unequal_lengths_loses_no_cached_token(case: Case) -> None:
    """Faults of other servers.

    In omlx unequal prompts in a batch lost cached tokens under 4-bit KV; in mlx-vlm Qwen3.5 with a
    quantised cache was wrong in a batch (the `qwen3_5` case).
    """
    assert case.worst(Bench(case.loaded).run(requests(case.format, LENGTHS, NEW))) <= TOLERANCE


def test_late_arrivals(case: Case) -> None:
    got = Bench(case.loaded).run(requests(case.format, LENGTHS, NEW), gap=3)
    assert case.worst(got) <= TOLERANCE


def test_cancelled_neighbour(case: Case) -> None:
    wanted = requests(case.format, LENGTHS, NEW)
    got = Bench(case.loaded).run(wanted, cancel=(wanted[4].id, 5))
    assert len(got.tokens[wanted[4].id]) < NEW
    assert case.worst(got, (0, 1, 2, 3, 5)) <= TOLERANCE


@pytest.mark.parametrize("rows", [9, pytest.param(50, marks=pytest.mark.slow)])
def test_any_chunk_size(case: Case, rows: int) -> None:
    bench = Bench(case.loaded, max_step_tokens=rows)
    assert case.worst(bench.run(requests(case.format, LENGTHS, NEW))) <= TOLERANCE


def test_preempted_and_resumed(case: Case) -> None:
    bench = Bench(case.loaded, kv_format=case.format)
    # Room for a page of each; two of them outgrow it.
    bench.kv_memory = max(3 * bench.bytes_for(case.format, 64), bench.bytes_for(case.format, 256))
    wanted = requests(case.format, LENGTHS, NEW)
    got = bench.run([wanted[1], wanted[2], wanted[5]])
    assert got.preemptions > 0
    assert case.worst(got, (1, 2, 5)) <= TOLERANCE


def test_prefix_hit(case: Case) -> None:
    bench = Bench(case.loaded, prefix_cache=True)
    first = requests(case.format, LENGTHS, NEW)
    again = requests(case.format, LENGTHS, NEW)
    got = bench.run(first, again)
    # Whole blocks at least; a packed block in which prompts part is computed again.
    assert got.cached[f"{case.format.name}:4"] >= 128
    assert case.worst(got) <= TOLERANCE


def test_rows_of_different_formats_share_a_step(opened: Callable[[str], LoadedModel]) -> None:
    loaded = opened("gemma4_ple")
    lengths = (70, 130)
    formats = (KVFormat(), *FORMATS)
    wanted = [r for format in formats for r in requests(format, lengths, 5)]
    got = Bench(loaded).run(wanted)
    for request in wanted:
        expected = Bench(loaded).run([request])
        assert difference(expected, got, [request.id]) <= TOLERANCE
