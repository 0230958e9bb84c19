"""Products by cuBLASLt within recorded steps: which it computes, and when it is not used."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.device import verified
from quire.device.cuda.cublas import Library, LibraryProduct
from quire.device.verified import VerifiedKernels
from quire.executor.graphs import graph_cache
from quire.executor.graphs.products import library_products, proposals
from quire.executor.graphs.products.library_products import (
    LEAST_ROWS,
    LEAST_ROWS_BESIDE_EXPERTS,
    least_library_rows,
    open_library,
)
from quire.executor.graphs.recorder import Kernel
from quire.executor.graphs.runner import CUDAGraphs
from quire.program.passes import recordable
from quire.program.trace import trace
from tests.device.cuda.cards import H200, RTX_4090
from tests.executor.graphs.recorded import opened, served
from tests.executor.graphs.test_recording import FAMILIES, recorder_of
from tests.support.emulated_card import emulate_card
from tests.support.emulated_cublas import VERSION, EmulatedCublas, emulate_cublas
from tests.support.emulated_metal import why_not
from tests.support.emulated_steps import EmulatedRunner
from tests.support.grown import grown
from tests.support.packed_models import experts_in_mxfp4, in_codes, join_matrices, packed_model
from tests.support.parity import prompts

ROWS = 128
LLAMA = FAMILIES["llama"]


def as_it_is(model: nn.Module) -> None:
    """Pack nothing."""


def by_library(kernels: list[Kernel]) -> Counter[tuple[int, int]]:
    """Return how many products the library computes, by columns and rows of the matrix."""
    found = [each.source for each in kernels if isinstance(each.source, LibraryProduct)]
    assert {each.rows for each in found} <= {ROWS}
    return Counter((each.inputs, each.outputs) for each in found)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> EmulatedCublas:
    monkeypatch.setattr(verified, "verified_kernels", lambda: VerifiedKernels(None, ""))
    return emulate_cublas(monkeypatch)


def test_the_library_computes_products_of_plain_matrices() -> None:
    model = packed_model(LLAMA, as_it_is)
    own = recorder_of(model, ROWS).kernels
    kernels = recorder_of(model, ROWS, library=Library(VERSION, ROWS)).kernels
    heads, kv_heads, layers = (
        LLAMA[name] for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    hidden, inner, dim = (LLAMA[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    shapes = [(hidden, heads * dim), (heads * dim, hidden), (inner, hidden)]
    shapes += 2 * [(hidden, kv_heads * dim)] + 2 * [(hidden, inner)]
    assert by_library(kernels) == Counter(layers * shapes)
    assert not by_library(own)
    # Two launches more for queries, keys and values, and for the gate two.
    assert len(kernels) == len(own) + layers * (2 + 2)


@pytest.mark.parametrize("ending", [False, True])
def test_matrices_that_are_stored_as_one_are_multiplied_at_once(ending: bool) -> None:
    model = packed_model(LLAMA, as_it_is)
    join_matrices(model)
    kernels = recorder_of(model, ROWS, library=Library(VERSION, ROWS), ending=ending).kernels
    heads, layers, hidden, inner, dim = (
        LLAMA[name]
        for name in (
            *("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size"),
            "head_dim",
        )
    )
    joined = heads * dim + 2 * LLAMA["num_key_value_heads"] * dim
    expected = Counter({(hidden, joined): layers})
    behind = [(heads * dim, hidden), (hidden, 2 * inner), (inner, hidden)]
    expected += Counter((layers - ending) * behind)
    assert by_library(kernels) == expected


def test_products_of_wanted_rows_stay_with_own_kernels() -> None:
    """The library would multiply as many rows as the graph has."""
    model = packed_model(LLAMA, as_it_is)
    whole, ending = (
        by_library(recorder_of(model, ROWS, library=Library(VERSION, ROWS), ending=each).kernels)
        for each in (False, True)
    )
    assert whole.total() - ending.total() == 4, "attention's output, and the MLP of the last layer"


@pytest.mark.parametrize("case", ["fewer rows", "codes", "no algorithm"])
def test_other_products_stay_with_own_kernels(case: str, library: EmulatedCublas) -> None:
    model = packed_model(LLAMA, in_codes if case == "codes" else as_it_is)
    library.algorithms = int(case != "no algorithm")
    rows = ROWS // 2 if case == "fewer rows" else ROWS
    assert not by_library(recorder_of(model, rows, library=Library(VERSION, ROWS)).kernels)


def test_the_library_adds_biases() -> None:
    """Those of queries, keys and values, which are stored as one."""
    model = packed_model(grown("qwen2"), as_it_is)
    join_matrices(model)
    kernels = recorder_of(model, ROWS, library=Library(VERSION, ROWS)).kernels
    biased = [
        each.arguments
        for each in kernels
        if isinstance(each.source, LibraryProduct) and each.source.biased
    ]
    assert len(biased) == grown("qwen2")["num_hidden_layers"]
    assert by_library(kernels).total() == 4 * len(biased)
    assert {len(each) for each in biased} == {4}


@pytest.mark.parametrize(
    ("family", "pack", "rows"),
    [
        ("llama", as_it_is, LEAST_ROWS),
        ("llama", in_codes, None),
        ("qwen3_moe", as_it_is, LEAST_ROWS_BESIDE_EXPERTS),
        ("qwen3_moe", experts_in_mxfp4, LEAST_ROWS_BESIDE_EXPERTS),
        ("qwen3_moe", in_codes, None),
    ],
)
def test_the_library_serves_wide_graphs_whose_dense_weights_are_plain(
    family: str, pack: Callable[[nn.Module], None], rows: int | None
) -> None:
    body = recordable(trace(packed_model(FAMILIES[family], pack)).body)
    assert least_library_rows(body) == rows


class Runner(EmulatedRunner):
    """Lets the library compute its kernels, with an error if asked to."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self._error = error

    def run(self, kernel: Kernel) -> None:
        assert isinstance(kernel.source, LibraryProduct)
        kernel.source.enqueue(0, kernel.arguments)
        for memory, copy in self._known:
            memory[...] = copy
        y = self._known[-1][0]
        wrong = mx.array(y).view(mx.bfloat16) * (1 + self._error)
        y[...] = np.array(wrong.view(mx.uint16))


def test_the_library_is_used_where_it_agrees(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_library(Runner(0), RTX_4090) is None
    assert open_library(Runner(0), H200) == Library(VERSION, LEAST_ROWS)
    with caplog.at_level(logging.WARNING, "quire.engine"):
        assert open_library(Runner(0.05), H200) is None
    assert "cuBLASLt is not used" in caplog.text


def test_the_library_is_not_used_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_products, "library_version", lambda: None)
    assert open_library(Runner(0), H200) is None


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    ("family", "invariant"),
    [
        ("llama", False),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("gpt_oss", False, marks=pytest.mark.slow),
    ],
)
def test_steps_by_the_library_compute_what_the_model_does(
    family: str,
    invariant: bool,
    wholes: list[CUDAGraphs],
    library: EmulatedCublas,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulate_card(monkeypatch)
    monkeypatch.setattr(
        graph_cache, "open_library", lambda runner, *_: open_library(runner, H200, least_rows=2)
    )
    library.algorithms = 3
    monkeypatch.setattr(
        proposals, "graph_microseconds", lambda graph, _: 9.0 - graph.launches[0].function.proposal
    )
    config = EngineConfig("", kv_memory=64 << 20, prefix_cache=False, batch_invariant=invariant)
    wanted = [replace(each, max_tokens=3) for each in prompts([3, 2])]
    mixture = family == "gpt_oss"  # with biases, beside experts in codes
    loaded = opened(grown(family), experts_in_mxfp4) if mixture else opened(LLAMA, as_it_is)
    join_matrices(loaded.model)
    served(loaded, wanted, config)
    (whole,) = wholes
    assert any(rows > 1 for _, rows in whole.verified)
    assert all(whole.verified.values())
    assert bool(library.products) != invariant
    assert (2 in library.used) != invariant, "the quickest proposal"
    if not invariant:
        widest = max(outputs for outputs, _, _ in library.products)
        assert widest == 512, "queries, keys and values at once"
