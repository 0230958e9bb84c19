"""Nodes without kernels, which MLX computes between two graphs."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from quire.cache.specs import KVLayout
from quire.device.device import current_device
from quire.device.weights import Packing
from quire.executor.graphs.coverage import Survey
from quire.executor.graphs.graph_cache import MAX_ROWS
from quire.executor.graphs.layout import InputLayout
from quire.executor.graphs.places import Place
from quire.executor.graphs.recorder import Buffer, Recorder, launches
from quire.executor.graphs.recording import Recording
from quire.executor.graphs.states import unplaced_states
from quire.program.passes import recordable
from quire.program.trace import trace
from tests.device.cuda.cards import H200
from tests.executor.graphs.test_recording import FAMILIES, pools_of
from tests.support.packed_models import in_codes, packed_model

ROWS = 8


def six_bits_down(model: nn.Module) -> None:
    """Mutates: pack one matrix of each layer in codes that no kernel reads."""
    in_codes(model, Packing(64, 6, "affine"), "mlp.down_proj")
    in_codes(model)


@pytest.fixture(scope="module")
def recorded() -> tuple[Recorder, Recording, Survey]:
    """Return a step of two layers, whose last products no kernel computes."""
    model = packed_model(FAMILIES["llama"] | {"hidden_size": 576}, six_bits_down)
    layout, body = KVLayout.of(model.layout), recordable(trace(model).body)
    inputs = InputLayout(len(layout.groups), MAX_ROWS, 100, id)
    rest = pools_of(layout), layout, unplaced_states(layout, mx.bfloat16)
    given = {
        name: Place(at, Buffer(at, 4 * ROWS))
        for name, at in (("tokens", inputs.tokens), ("positions", inputs.positions))
    }
    survey = Survey(Recorder(ROWS, id, inputs, H200), *rest)
    survey.record(body, given, [Buffer(3, 0)])
    recorder = Recorder(ROWS, id, inputs, H200)
    recording = Recording(recorder, *rest, [node for node, _ in survey.unsupported])
    recording.record(body, given, [Buffer(3, 0)])
    return recorder, recording, survey


def test_a_step_is_cut_where_a_node_has_no_kernel(
    recorded: tuple[Recorder, Recording, Survey],
) -> None:
    recorder, recording, survey = recorded
    reasons = {reason for _, reason in survey.unsupported}
    assert reasons == {"codes of 6 bits in mode affine"}
    assert len(recording.segments) == len(recorder.parts) == len(survey.unsupported) == 2
    assert not any(node.uses_pools for node, _ in survey.unsupported)
    ends = [*recorder.parts, len(recorder.kernels)]
    for first, end in zip([0, *recorder.parts], ends, strict=True):
        part = launches(recorder.kernels[first:end], range(end - first), first=first)
        assert all(
            0 <= before < number for number, each in enumerate(part) for before in each.after
        )


def test_mlx_computes_from_buffers_what_the_next_graph_reads(
    recorded: tuple[Recorder, Recording, Survey],
) -> None:
    recorder, recording, _ = recorded
    segment = recording.segments[0]
    (node,), (buffer,) = segment.nodes, segment.reads.values()
    weight = node.weight("weight")
    rows = mx.random.normal((ROWS, 128)).astype(mx.bfloat16)
    assert buffer.bytes == rows.nbytes
    buffer.memory = rows.reshape(-1).view(mx.uint8)
    (found,) = segment.compute(mx.zeros(1), 3)
    expected = current_device().operations.packed_linear(rows[:3], weight, None)
    assert mx.array_equal(found, expected)
    following = recorder.kernels[recorder.parts[0] :]
    assert any(address in each.arguments for each in following for address in segment.targets)
