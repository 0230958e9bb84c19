"""Products with matrices side by side compute what the products one by one do."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import mlx.core as mx
import pytest

from quire.device.device import open_device
from quire.device.weights import JoinedMatrix
from quire.models.base import named_parameters
from quire.program.folding import simplified
from quire.program.passes import prepared
from quire.program.side_by_side import with_matrices_joined
from quire.program.trace import trace
from quire.program.values import Program
from quire.program.wanted_rows import with_wanted_rows
from tests.program.programs import opened, worst_difference

GROUPS = ("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))


@pytest.mark.parametrize("wanted", [False, True])
def test_joined_products_change_no_logit(wanted: bool, tmp_path: Path) -> None:
    open_device("auto")
    loaded = opened("llama", tmp_path)
    weights = named_parameters(loaded.model)
    joined = {}
    for layer in range(len(loaded.model.layout)):
        for part, names in GROUPS:
            paths = tuple(f"model.layers.{layer}.{part}.{name}.weight" for name in names)
            matrices = [weights[path] for path in paths]
            ends = tuple(accumulate(len(each) for each in matrices))
            joined[paths] = JoinedMatrix(mx.concatenate(matrices), None, ends)

    def passes(program: Program) -> Program:
        body = simplified(program)
        body = with_wanted_rows(body) if wanted else body
        return prepared(with_matrices_joined(body, joined))

    found = with_matrices_joined(simplified(trace(loaded.model).body), joined)
    products = [each for each in found.nodes if each.kind == "linear"]
    assert len(products) == 4 * len(loaded.model.layout)
    assert worst_difference(loaded, passes) < 1e-5
