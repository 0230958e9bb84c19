"""Writes docs/graphs.md: by family, what part of a step CUDA graphs compute.

Run it after a family or a kernel came: `python -m tests.models.make_graphs_doc`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from quire.attention.backend import AttentionCase
from quire.cache.specs import AttentionSpec, KVLayout
from quire.core.kv_format import KVFormat
from quire.device.weights import Packing
from quire.executor.graphs.attention.indexers import has_indexers, most_keys
from quire.executor.graphs.attention.pool_kinds import kind_of
from quire.executor.graphs.coverage import Survey
from quire.executor.graphs.graph_cache import MAX_ROWS, WIDE_ROWS
from quire.executor.graphs.layout import InputLayout
from quire.executor.graphs.operands import attention_heads
from quire.executor.graphs.places import Place
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.states import unplaced_states
from quire.program.passes import recordable
from quire.program.trace import trace
from quire.program.values import Program
from tests.device.cuda.cards import H200
from tests.executor.graphs.test_recording import (
    pools_of,
)
from tests.models import graphed_encoders
from tests.models.weights import stored_layouts
from tests.program.programs import CONFIGS
from tests.support.grown import grown
from tests.support.packed_models import experts_in_mxfp4, in_codes, packed_model
from tests.support.packings import FP8_OF_128, MXFP4, MXFP8, NVFP4, OF_32

DOCUMENT = Path(__file__).parents[2] / "docs" / "graphs.md"
BLOCK = 64
FORMATS = {
    "plain": KVFormat(),
    "page": KVFormat("page", 4, 4),
    "uniform": KVFormat("uniform", 4, 4),
    "turbo": KVFormat("turbo", 4, 4),
}

INTRODUCTION = f"""\
# What CUDA graphs compute

Written by `python -m tests.models.make_graphs_doc`; do not edit.

On CUDA a step is one graph, recorded from the program of the step
([architecture](../ARCHITECTURE.md)). It has up to {WIDE_ROWS:,} rows, prompts' included. Where
"({MAX_ROWS})" stands behind a KV format, and with adapters of requests or `--batch-invariant`, it
has up to {MAX_ROWS}.

Over coded KV blocks, graphs of more than {MAX_ROWS} rows decode the blocks that prompts read into a
workspace, layer by layer. On an H100, such steps of Llama 8B over page-4 differed from the model by
a relative error of 0.001 to 0.002, from 128 to 2,048 rows, with up to 20,000 keys. Sequences of few
rows read codes; behind the first 512 of their rows they read the workspace, too. In a warmed
engine of 4 layers in Llama 8B's shape the graphs of all sizes agreed on an H100.

Steps of families with indexers (`deepseek_v32`, `glm_moe_dsa`, `hy_v4`) of 64 rows have up to
{most_keys(MAX_ROWS):,} keys each.

MLX computes a node without a kernel between two graphs of the step. A family with such a node that
reads or writes the KV cache is served eagerly, and so is a request whose KV format has no kernels
for the family's attention.

The table is of the test configurations with wider matrices, in affine codes of 4 bits in groups of
64; the [second table](#other-weights) is of other weights. Over plain blocks, keys and values of
heads have a multiple of 16 elements, up to 128, or 256 or 512. Over coded ones it is a multiple of
32: requests in KV formats of codes go eagerly where heads have others (80).

"Nodes" counts those of a step that compute something, by how many of them have kernels. "Head" says
whether logits are computed in the graph, too; else MLX computes them behind it. "-" in the KV
formats means that the model keeps no keys.

| `model_type` | Nodes | Head | KV formats | Without kernels |
| --- | --- | --- | --- | --- |
"""
OTHER_WEIGHTS = """
## Other weights

Nodes with kernels, as above, by how all matrices are stored, or those of experts alone. Affine
groups of 128 columns are read like those of 64. Affine codes of 2 and 3 bits are stored in 4 bits
when a model is loaded, those of 5 and 6 in 8, if all weights then take at most three quarters of
the memory. Where they do not fit, matrices have kernels only where they have at most 512 outputs;
as experts none. MLX computes the others.

"""
CHECKPOINTS = """
## Checkpoints

How a matrix of a checkpoint is stored on CUDA, the kernel that multiplies by it in graphs of so
many rows on Hopper (elsewhere `wide_gemm` takes the place of `warpgroup_gemm`), and what does
outside of graphs. "4 bits" and "8 bits" are affine codes. On Hopper, graphs of 128 rows and more of
dense models in bfloat16 multiply with cuBLASLt, at once by matrices that multiply the same rows;
so do graphs of 256 rows and more of mixtures in bfloat16, whose experts may be in codes.

"""
FAMILIES = ("llama", "gemma4_text", "gpt_oss", "qwen3_5_moe_text", "deepseek_v3")
WEIGHTS: Mapping[str, Callable[[nn.Module], None]] = {
    "affine, 8 bits": partial(in_codes, packing=Packing(64, 8, "affine")),
    "affine, 4 bits in groups of 32": partial(in_codes, packing=OF_32),
    "bfloat16": lambda model: None,
    "MXFP4": partial(in_codes, packing=MXFP4),
    "experts in MXFP4, the rest in bfloat16": experts_in_mxfp4,
    "NVFP4": partial(in_codes, packing=NVFP4),
    "MXFP8": partial(in_codes, packing=MXFP8),
    "FP8 with scales of 128 columns": partial(in_codes, packing=FP8_OF_128),
}


@dataclass
class Line:
    """A family's row of the table: which of its configurations run as CUDA graphs."""

    recorded: int = 0
    nodes: int = 0
    heads: set[bool] = field(default_factory=set)
    formats: list[set[str]] = field(default_factory=list)
    small: set[str] = field(default_factory=set)
    """KV formats of steps of at most `MAX_ROWS` rows."""
    refused: dict[str, None] = field(default_factory=dict)

    def add(self, name: str, pack: Callable[[nn.Module], None] = in_codes) -> None:
        """Mutates: add a configuration.

        Args:
            pack: its matrices.
        """
        model = packed_model(grown(name), pack)
        layout, programs = KVLayout.of(model.layout), trace(model)
        body, head = recordable(programs.body), recordable(programs.head)
        inputs = InputLayout(len(layout.groups), MAX_ROWS, 1, id)
        states = unplaced_states(layout, mx.bfloat16)
        survey = Survey(Recorder(8, id, inputs, H200), pools_of(layout), layout, states)
        given = {
            "tokens": Place(inputs.tokens, None),
            "positions": Place(inputs.positions, None),
        }
        survey.record(body, given, [Buffer(0, 0)])
        self.recorded += survey.nodes - len(survey.unsupported)
        self.nodes += survey.nodes
        self.heads.add(_is_recorded(head, layout))
        cases = []
        for layer, heads in attention_heads(body, layout.owner).items():
            spec = layout.groups[layout.group[layer]].spec.attention
            assert spec is not None, "layers that attend keep keys"
            cases.append((spec, heads))
        if cases:
            self.formats.append(set(_served(cases)))
            indexed = has_indexers(body)
            self.small |= {name for name in FORMATS if indexed or not _reads_prompts(name, cases)}
        for node, reason in survey.unsupported:
            whole = reason.startswith(("%", f"{node.name}("))  # the node as it prints
            self.refused |= {f"`{node.name}`" if whole else reason: None}

    @property
    def share(self) -> str:
        """Nodes with kernels."""
        return "all" if self.recorded == self.nodes else f"{self.recorded} of {self.nodes}"

    def __str__(self) -> str:
        head = " or ".join("yes" if each else "no" for each in sorted(self.heads, reverse=True))
        served = [name for name in FORMATS if all(name in each for each in self.formats)]
        sizes = dict.fromkeys(self.small, f" ({MAX_ROWS})")
        named = ", ".join(name + sizes.get(name, "") for name in served)
        formats = named if self.formats else "-"
        return f"{self.share} | {head} | {formats} | {'; '.join(self.refused)} |"


def _is_recorded(head: Program, layout: KVLayout) -> bool:
    inputs = InputLayout(1, MAX_ROWS, 1, id)
    survey = Survey(Recorder(8, id, inputs, H200), {}, layout, {})
    survey.record(head, {"hidden": Place(0, Buffer(0, 0))}, [Buffer(0, 0)])
    return not survey.unsupported


Heads = Sequence[tuple[AttentionSpec, int]]


def _served(layers: Heads) -> Iterator[str]:
    for name, format in FORMATS.items():
        if all(kind_of(format).serves(each) for each in _cases(format, layers)):
            yield name


def _reads_prompts(name: str, layers: Heads) -> bool:
    format = FORMATS[name]
    return all(kind_of(format).reads_prompts(each) for each in _cases(format, layers))


def _cases(format: KVFormat, layers: Heads) -> list[AttentionCase]:
    return [
        AttentionCase(format, spec, BLOCK, heads, 1, mx.bfloat16, softcap=False, sinks=False)
        for spec, heads in layers
    ]


def line_of(model_type: str, pack: Callable[[nn.Module], None] = in_codes) -> Line:
    """Return the table's line of a family, from all its configurations."""
    line = Line()
    for name, config in CONFIGS.items():
        if config["model_type"] == model_type:
            line.add(name, pack)
    return line


def row(model_type: str) -> str:
    """Return one line of the first table."""
    return f"| `{model_type}` | {line_of(model_type)}"


def row_of_weights(name: str) -> str:
    """Return one line of the second table."""
    shares = (line_of(each, WEIGHTS[name]).share for each in FAMILIES)
    return f"| {name} | {' | '.join(shares)} |"


def model_types() -> list[str]:
    """Return the model types of all configurations, in order."""
    return sorted({config["model_type"] for config in CONFIGS.values()})


def document() -> str:
    """Return the whole page."""
    heads = ["Weights", *(f"`{each}`" for each in FAMILIES)]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    first = INTRODUCTION + "\n".join(map(row, model_types())) + "\n"
    others = OTHER_WEIGHTS + "\n".join([*lines, *map(row_of_weights, WEIGHTS)]) + "\n"
    stored = CHECKPOINTS + stored_layouts.table() + "\n"
    return first + graphed_encoders.table() + others + stored


if __name__ == "__main__":
    DOCUMENT.write_text(document())
