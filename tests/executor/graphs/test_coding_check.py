"""The kernels that code full tails and single tokens, emulated, against the format's own way."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.attention.backend import AttentionCase
from quire.cache.specs import FullKV
from quire.core.kv_format import KVFormat
from quire.executor.graphs.attention.coding_check import (
    KernelRunner,
    tail_coding_differs,
    token_coding_differs,
)
from quire.executor.graphs.recorder import Kernel
from tests.support.emulated_metal import why_not
from tests.support.emulated_steps import EmulatedRunner

emulates = pytest.mark.skipif(bool(why_not()), reason=why_not())


class _Idle(KernelRunner):
    """Runs nothing."""

    def address(self, array: mx.array) -> int:
        return 0

    def run(self, kernel: Kernel) -> None:
        pass


@pytest.mark.slow
@emulates
@pytest.mark.parametrize(
    ("dim", "bits"),
    [
        (64, (8, 8)),
        (128, (4, 4)),
        (512, (8, 4)),
        (64, (2, 3)),
        (128, (3, 6)),
        (256, (5, 2)),
        (64, (6, 5)),
    ],
)
def test_full_tails_are_coded_as_the_format_codes_them(dim: int, bits: tuple[int, int]) -> None:
    assert tail_coding_differs(FullKV(2, dim), KVFormat("page", *bits), EmulatedRunner()) is None


@pytest.mark.slow
def test_tails_that_are_not_coded_are_seen() -> None:
    found = tail_coding_differs(FullKV(2, 64), KVFormat("page", 4, 4), _Idle())
    assert "relative error 1," in f"{found},"


def _case(format: KVFormat, dim: int, block_size: int = 16) -> AttentionCase:
    return AttentionCase(format, FullKV(2, dim), block_size, 6, 1, mx.bfloat16, False, False)


@pytest.mark.slow
@emulates
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize(
    "format",
    [
        KVFormat("uniform", 4, 4),
        KVFormat("uniform", 8, 8, group_size=32),
        KVFormat("uniform", 3, 6),
        KVFormat("turbo", 2, 2),
        KVFormat("turbo", 4, 4),
        KVFormat("turbo", 3.5, 3.5),
    ],
    ids=lambda each: each.name,
)
def test_tokens_are_coded_as_the_format_codes_them(format: KVFormat, dim: int) -> None:
    assert token_coding_differs(_case(format, dim), EmulatedRunner()) is None


@pytest.mark.parametrize(
    ("format", "what"),
    [
        (KVFormat("uniform", 4, 4), "coded blocks, scores: relative error 1,"),
        (KVFormat("turbo", 4, 4), "queries of coded keys: relative error"),
    ],
    ids=str,
)
def test_tokens_that_are_not_coded_are_seen(format: KVFormat, what: str) -> None:
    assert what in f"{token_coding_differs(_case(format, 64), _Idle())},"
