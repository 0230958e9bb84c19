"""Kernel launches of a step on a Mac, counted on a CPU, beside mlx-lm's step of the same model."""

from __future__ import annotations

import pytest

from tests.support import launches as counting
from tests.support.launches import LEVEL, counted, deepened, launches, launches_of_mlx_lm

EVERYDAY = ("llama", "gemma4_moe")


@pytest.mark.parametrize(
    "name",
    [each if each in EVERYDAY else pytest.param(each, marks=pytest.mark.slow) for each in LEVEL],
)
def test_a_step_launches_no_more_than_mlx_lms(name: str) -> None:
    pytest.importorskip("mlx_lm", reason='mlx-lm is not installed (pip install -e ".[oracle]")')
    config = counted(name)
    own, theirs = launches(config), launches_of_mlx_lm(config)
    assert own.total() <= theirs.total(), own - theirs


def test_a_step_of_one_stream_has_as_few_nodes_as_one_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Views launch nothing, but the host builds them in each layer.
    monkeypatch.setattr(counting, "VIEWS", frozenset())
    layers = 8
    one, several = (launches(deepened("llama", layers), streams) for streams in (1, 8))
    added = one - several
    assert added.total() - added["Squeeze"] <= 4  # the indices of the one row, once for all layers
    assert added["Squeeze"] <= 2 * layers + 6  # keys and values lose the axis of rows
