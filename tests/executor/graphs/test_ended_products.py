"""Products of one row that compute the norm or the heads behind them, as they are recorded."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.kv_format import KVFormat
from quire.executor.graphs.recorder import Kernel
from tests.device.cuda.cards import H200
from tests.executor.graphs.test_recording import PLAIN, recorded
from tests.support.emulated_card import SMALL
from tests.support.grown import grown

NORM, HEADS, SCALED = "store_squares(squares_to,", "#define HEAD_ROWS 64", "#define UNSCALED 1"


def counts(kernels: list[Kernel]) -> list[int]:
    """Return how many products begin a norm, prepare heads, and scale what they read."""
    return [sum(mark in str(each.source) for each in kernels) for mark in (NORM, HEADS, SCALED)]


@pytest.mark.parametrize("family", ["llama", "mistral", "phi3", "exaone", "seed_oss"])
def test_norms_between_products_have_no_kernel_of_their_own(family: str) -> None:
    """But for the first one, behind the embedding, and the last one, which the head reads."""
    kernels, _ = recorded(grown(family), 1)
    assert counts(kernels) == [5, 0, 5]


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo2", "cohere", "starcoder2"])
def test_norms_elsewhere_have(family: str) -> None:
    """Norms behind a product and before the residual, of rows that are read as they are, too, and
    with means."""
    kernels, _ = recorded(grown(family), 1)
    assert counts(kernels) == [0, 0, 0]


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"max_rows": 2}], ids=str)
def test_steps_of_rows_that_share_bits_or_products_have_norms(options: dict[str, Any]) -> None:
    kernels, _ = recorded(grown("llama"), **{"max_rows": 1, "card": SMALL} | options)
    assert counts(kernels) == [0, 0, 0]


@pytest.mark.parametrize(
    ("family", "format", "layers"),
    [
        ("llama", PLAIN, 3),
        ("smollm3", PLAIN, 2),  # a layer does not rotate
        ("qwen3", PLAIN, 0),  # heads have norms
        ("ernie4_5", PLAIN, 0),  # neighbours turn together
        ("phi3", PLAIN, 3),  # its one matrix is loaded as three
        ("llama", KVFormat("page", 4, 8), 0),
        ("llama", KVFormat("turbo", 4, 4), 0),
    ],
    ids=str,
)
def test_heads_that_only_turn_are_prepared_by_their_product(
    family: str, format: KVFormat, layers: int
) -> None:
    """Where its thread blocks have two parts, as on a small card."""
    kernels, _ = recorded(grown(family), 1, card=SMALL, format=format)
    assert counts(kernels)[1] == layers
    heads, _ = recorded(grown(family), 1, card=H200, format=format)
    assert len(heads) - len(kernels) == layers


def test_every_kernel_waits_for_one() -> None:
    """So that each of them starts early: what a residual needs is done before."""
    kernels, _ = recorded(grown("llama"), 1, card=SMALL)
    first = next(n for n, each in enumerate(kernels) if NORM in str(each.source))
    assert all(len(each.after) == 1 for each in kernels[first:])
