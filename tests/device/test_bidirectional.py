"""Attention in both directions: every query sees every key, whatever their numbers are."""

from __future__ import annotations

import mlx.core as mx
import pytest

from quire.device.operations import Operations


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(5, 12), (12, 5)])
def test_queries_see_all_keys_where_there_are_more_or_fewer_of_them(
    rows: int, keys: int, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiled:  # two queries at once, where scores are materialised
        monkeypatch.setattr(Operations, "score_bytes", 2 * 2 * keys * 4)
    mx.random.seed(0)
    q = mx.random.normal((1, rows, 2, 8))
    k, v = (mx.random.normal((1, keys, 2, 8)) for _ in range(2))
    weights = mx.softmax(mx.einsum("gqhd,gkhd->ghqk", q, k) * 0.5, axis=-1)
    expected = mx.einsum("ghqk,gkhd->gqhd", weights, v)
    assert mx.allclose(Operations().attend_groups(q, k, v, scale=0.5), expected, atol=1e-5)
