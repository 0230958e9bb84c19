"""The table of docs/graphs.md that says what part of encoders CUDA graphs compute."""

from __future__ import annotations

from collections.abc import Iterator

from quire.executor.graphs.encoders import CALLS, MOST_ROWS, surveyed_in_pieces
from quire.executor.graphs.layout import InputLayout
from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.recorder import Recorder
from quire.program.encoder_rows import RowProgram
from quire.program.passes import RESHAPES
from quire.program.pieces import at_once
from quire.program.trace import trace_encoder
from quire.program.values import FUSED, Node
from tests.device.cuda.cards import H200
from tests.support.media_items import CONFIGS, encoders, shape_for
from tests.support.packed_models import packed_model

INTRODUCTION = f"""
## Encoders

Encoders of pictures, sounds and videos run as graphs, too, once a shape has come by {CALLS} calls,
in calls of up to {MOST_ROWS:,} rows: an item's patches or frames, times the items that one call
encodes. Before graphs serve, they encode an item beside the encoder. They are dropped if they
differ, or take longer. Not yet run on a card.

The table is of the test configurations. "Nodes" counts the nodes from the first one with a kernel
to the last one, by how many have kernels. MLX computes the nodes before and behind them, which read
and merge patches, and those named last, between two graphs. It also multiplies by matrices that are
not bfloat16, or whose columns are no multiple of 64. Encoders with "-" run eagerly: less than half
of their products have kernels.

| `model_type` | Item | Nodes | Between graphs |
| --- | --- | --- | --- |
"""


def line(name: str, kind: str) -> str:
    """Return the table's line of an encoder of a configuration."""
    model = packed_model(CONFIGS[name], lambda model: None)
    traced = at_once(trace_encoder(model, kind, shape_for(model.encoders[kind])))
    program = at_once(RowProgram.of(traced, 1))
    given = 64, id, InputLayout(0, 1, 1, id)
    front = f"| `{CONFIGS[name]['model_type']}` | {kind} |"
    try:
        others = at_once(surveyed_in_pieces(program, Recorder(*given, card=H200)))
    except UnsupportedNode:
        return f"{front} - | |"
    nodes = [each for each in program.program.nodes if each.kind not in RESHAPES]
    places = [number for number, each in enumerate(nodes) if each not in others]
    span = nodes[places[0] : places[-1] + 1]
    kinds = sorted({f"`{_name(each)}`" for each in span if each in others})
    return f"{front} {len(places)} of {len(span)} | {', '.join(kinds)} |"


def _name(node: Node) -> str:
    return str(node.attributes["what"]) if node.kind == FUSED else node.kind


def table() -> str:
    """Return the section, with one configuration of each `model_type`."""
    return INTRODUCTION + "\n".join(line(*each) for each in _shown()) + "\n"


def _shown() -> Iterator[tuple[str, str]]:
    seen: set[tuple[str, str]] = set()
    for name, kind in sorted(encoders()):
        key = CONFIGS[name]["model_type"], kind
        if key not in seen:
            seen.add(key)
            yield name, kind
