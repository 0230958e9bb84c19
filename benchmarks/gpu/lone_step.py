"""Times what a recorded step of a few rows consists of: `lone_step.py SHAPE OUT --rows N`.

The graph is launched without an engine, on random weights and keys, by these means:

* the whole step, and the step in which each kind of kernel is left out or replaced by a kernel
  that only waits;
* each kind of kernel alone, one instance behind the other, with the bytes of weights that it reads;
* chains of kernels that only wait, and that only read the step's weights: what launches, and
  memory, allow;
* the step with kernels that do not start early, or start others later;
* stamps of the card's clock in each kernel: when it starts, when it may read what others wrote,
  and when it ends;
* with `--cuts`, the step with other cuts of each kind of product.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from shapes import SHAPES, write
from step_kernels import named

from quire.cache.blocks import PoolKey, Resize
from quire.cache.specs import KVLayout
from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.device.cuda import driver, skinny_gemm
from quire.device.cuda.driver import Graph, driver_call
from quire.device.cuda.skinny_gemm import Cut, SkinnyGemm
from quire.device.cuda.timing import graph_microseconds
from quire.device.device import open_device
from quire.executor.factory import open_pools
from quire.executor.graphs.graph_cache import GraphCache
from quire.executor.graphs.input_numbers import step_numbers
from quire.executor.graphs.opening import open_cuda_graphs
from quire.executor.graphs.recorder import Kernel, Recorder, launches
from quire.executor.graphs.step_graphs import RecordedStep
from quire.models.base import named_parameters
from quire.models.weights.loader import open_model
from quire.scheduler.plan import BlockIds, KVPlacement, ScheduledSequence

PLAIN = KVFormat()
CONTEXT = 200
REPEATS, ROUNDS, STAMPED = 20, 5, 8
CUTS = [
    Cut(parts, warps, chunk, stages)
    for parts, warps, chunk, stages in [
        *[(1, 4, 2, 4), (1, 4, 2, 8), (1, 4, 4, 2), (1, 4, 4, 4), (1, 8, 1, 4), (1, 8, 1, 8)],
        *[(1, 8, 2, 2), (1, 8, 2, 3), (1, 8, 2, 4), (1, 8, 4, 2), (1, 8, 4, 3), (1, 16, 1, 2)],
        *[(1, 16, 1, 4), (1, 16, 2, 2), (1, 16, 4, 2), (2, 8, 1, 4), (2, 8, 2, 2), (2, 8, 2, 3)],
        *[(2, 8, 4, 2), (2, 16, 1, 2), (2, 16, 2, 2), (2, 4, 4, 2), (2, 4, 2, 4)],
    ]
]
FRAME = """
__device__ __forceinline__ void others_may_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void wait_for_others() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
"""
STAMPS = """
__device__ __forceinline__ unsigned long long card_time() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
// The first start, the first and the last end of waiting, and the last end, of thread blocks.
struct Stamped {
  unsigned long long* to;
  __device__ Stamped(unsigned long long* to) : to(to) {
    if (threadIdx.x == 0) atomicMin(to, card_time());
  }
  __device__ void wait() {
    wait_for_others();
    if (threadIdx.x == 0) {
      const unsigned long long now = card_time();
      atomicMin(to + 1, now);
      atomicMax(to + 2, now);
    }
  }
  __device__ void mark(int stage) {
    if (threadIdx.x == 0) atomicMax(to + 4 + stage, card_time());
  }
  __device__ ~Stamped() {
    if (threadIdx.x == 0) atomicMax(to + 3, card_time());
  }
};
"""


class Part(NamedTuple):
    """A kernel of the step.

    Attributes:
        kind: what it computes, by its source and its thread blocks.
        kernel: its launch; `after` holds numbers of other parts.
        bytes: of weights that it reads.
    """

    kind: str
    kernel: Kernel
    bytes: int


def microseconds(graph: Graph) -> float:
    """Return the median time of a launch among others."""
    found = [graph_microseconds(graph, REPEATS) for _ in range(ROUNDS)]
    return round(statistics.median(found), 2)


def launched(graph: Graph) -> None:
    """Launch a graph once, and wait for it."""
    driver_call("cuGraphLaunch", ctypes.c_void_p(graph.handle), None)
    driver_call("cuCtxSynchronize")


class LoneStep:
    """A recorded step of a model, without an engine: a row each of so many sequences.

    Attributes:
        parts: its kernels, in order.
        weights: the model's, by their addresses.

    Args:
        rows: a power of two.
    """

    def __init__(self, folder: str, rows: int = 1) -> None:
        config = EngineConfig(folder)
        open_device(config.blas, config.kernels, config.threads)
        loaded = open_model(folder)
        pools, layout = open_pools(loaded, config), KVLayout.of(loaded.model.layout)
        graphs = open_cuda_graphs(loaded.model, layout, pools, identity="lone step")
        if graphs is None:
            raise SystemExit("no step of this model is recorded here")
        self.cache: GraphCache = graphs._cache
        self.rows, blocks = rows, CONTEXT // config.block_size + 1
        for group in layout.groups:
            count = rows * blocks if group.spec.recurrent is None else rows
            pools.resize(Resize(PoolKey(group.index, PLAIN), count))
        pools.replace(map(drawn_like, pools.arrays()))
        mx.eval(pools.arrays())
        pointer = self.cache._extension.pointer
        weights = named_parameters(loaded.model).values()
        self.weights = {pointer(each): each for each in weights}
        self._addresses = self.cache._addresses(PLAIN)
        self._kept: list[RecordedStep] = []
        self.parts = self.recorded()
        self._write_inputs(layout, config.block_size, blocks)

    @classmethod
    def of_shape(
        cls, shape: str, folder: Path | None, rows: int, layers: int | None = None
    ) -> Self:
        """Open the model of a shape, which is written first if its folder has none.

        Args:
            folder: None for a temporary one.
        """
        with tempfile.TemporaryDirectory() as temporary:
            place = folder or Path(temporary)
            if not (place / "config.json").exists():
                write(shape, place, layers, repeated=True)
            return cls(str(place), rows)

    def _write_inputs(self, layout: KVLayout, size: int, blocks: int) -> None:
        """Write the step's inputs.

        Args:
            blocks: of each sequence.
        """
        tokens = [17 + n for n in range(self.rows)]
        sequences = []
        for n, token in enumerate(tokens):
            own = BlockIds(array("i", range(n * blocks, (n + 1) * blocks)), blocks)
            slot = BlockIds(array("i", [n]), 1)
            tables = [own if each.spec.recurrent is None else slot for each in layout.groups]
            sequences.append(
                ScheduledSequence(
                    id=str(n),
                    number=n + 1,
                    format=PLAIN,
                    start=CONTEXT,
                    count=1,
                    tokens=array("i", [token]),
                    positions=range(CONTEXT, CONTEXT + 1),
                    placement=KVPlacement(tuple(tables)),
                )
            )
        inputs, rows = self.cache.inputs(self.rows), self.rows
        numbers = step_numbers(
            sequences, layout, inputs, block_size=size, max_rows=rows, tokens=tokens
        )
        assert numbers is not None, "the step has inputs"
        data = np.ascontiguousarray(numbers, np.int32).tobytes()
        driver_call(
            "cuMemcpyHtoD_v2", ctypes.c_uint64(inputs.tokens), data, ctypes.c_size_t(len(data))
        )

    def _parts_of(self, kernels: Sequence[Kernel]) -> list[Part]:
        names: dict[str, str] = {}
        found = []
        for each in kernels:
            if each.source not in names:
                name, grid = named(each.source), "x".join(map(str, each.grid))
                names[each.source] = f"{len(names)}: {name} {grid} of {each.block}"
            read = [self.weights[at] for at in each.arguments if at in self.weights]
            count = sum(
                array.nbytes * (each.grid[1] / array.shape[0] if array.ndim == 3 else 1)
                for array in read
            )
            is_product = names[each.source].partition(": ")[2].startswith(("skinny", "head "))
            found.append(Part(names[each.source], each, int(count) * is_product))
        return found

    def recorded(self) -> list[Part]:
        """Record the step. No buffer is used twice, so that kernels can be left out."""
        with patch.object(Recorder, "release", lambda recorder, buffer: None):
            self._kept.append(self.cache._record_step(self.rows, PLAIN, self._addresses))
        return self._parts_of(self._kept[-1].recorder.kernels)

    def with_cut(self, cut: Cut) -> list[Part]:
        """Return the parts of the step recorded with a cut for all products that it fits."""
        usual = skinny_gemm._chosen

        def chosen(gemm: SkinnyGemm) -> tuple[int, Cut]:
            tiles = usual(gemm)[0]
            fits = gemm.rows == self.rows and gemm.shared_of(tiles, cut) <= gemm.card.shared
            return (tiles, cut) if fits else usual(gemm)

        with patch.object(skinny_gemm, "_chosen", chosen):
            return self.recorded()

    def reader(self, part: Part, *, early: bool) -> Kernel:
        """Return a kernel that reads the weights of a product, before or after it waits."""
        read = [self.weights[at] for at in part.kernel.arguments if at in self.weights]
        grid = part.kernel.grid[1]
        places = [at for at in part.kernel.arguments if at in self.weights]
        sizes = [
            each.nbytes * grid // each.shape[0] if each.ndim == 3 else each.nbytes for each in read
        ]
        parameters = [f"const uint4* w{n}" for n in range(len(read))]
        loops = []
        for n, size in enumerate(size // 16 for size in sizes):
            one = f"i + j * all < {size} ? __ldcs(w{n} + i + j * all) : make_uint4(0, 0, 0, 0)"
            loops += [f"for (int i = at; i < {size}; i += 4 * all) {{ uint4 v[4];"]
            loops += ["#pragma unroll", f"for (int j = 0; j < 4; j++) v[j] = {one};"]
            loops += ["for (int j = 0; j < 4; j++) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w; }"]
        body = ["const int at = blockIdx.x * 512 + threadIdx.x, all = gridDim.x * 512;"]
        body += ["unsigned sum = 0;"]
        wait = ["wait_for_others();"]
        body += [*loops, *wait] if early else [*wait, *loops]
        body += ["if (sum == 0x12345677u) *to = sum;"]
        source = simple([*parameters, "unsigned* to"], body, 512)
        arguments = (*places, self.cache.inputs(self.rows).tokens)
        return replace(
            part.kernel, source=source, grid=(264, 1, 1), block=512, shared=0, arguments=arguments
        )

    def graph(self, kernels: Sequence[Kernel]) -> Graph:
        functions = self.cache._compiler.functions([each.source for each in kernels])
        return Graph(launches(kernels, functions))

    def compile(self, sources: Sequence[str]) -> None:
        self.cache._compiler.functions(list(dict.fromkeys(sources)))

    def logits(self) -> np.ndarray:
        """Return the logits that the last launch wrote."""
        output, _ = self.cache.output(self.rows)
        found = np.zeros(self.rows * output.shape[1], np.float32)
        at = ctypes.c_uint64(self.cache._extension.pointer(output))
        driver_call(
            "cuMemcpyDtoH_v2",
            found.ctypes.data_as(ctypes.c_void_p),
            at,
            ctypes.c_size_t(found.nbytes),
        )
        return found


def drawn_like(array: mx.array) -> mx.array:
    """Return random numbers; zeros in place of integers, which count what waits beside states."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return mx.zeros_like(array)
    return mx.random.normal(array.shape).astype(array.dtype)


def simple(parameters: Sequence[str], body: Sequence[str], threads: int) -> str:
    """Return the source of a kernel of this benchmark."""
    head = f'extern "C" __global__ void __launch_bounds__({threads})'
    head += f" kernel({', '.join(parameters)}) {{"
    return "\n".join([FRAME, head, "others_may_start();", *body, "}"])


def waiting(kernel: Kernel, *, alone: bool = False) -> Kernel:
    """Return a kernel in a kernel's place that only waits; with `alone` by one small block."""
    source = simple(["int* to"], ["wait_for_others();"], 1024)
    if alone:
        return replace(kernel, source=source, grid=(1, 1, 1), block=32, shared=0, arguments=(0,))
    return replace(kernel, source=source, arguments=(0,))


def without(kernels: Sequence[Kernel], left_out: Sequence[bool]) -> list[Kernel]:
    """Return the kernels that are not left out. What waited for others waits for those before."""
    places: list[tuple[int, ...]] = []
    kept: list[Kernel] = []
    for kernel, gone in zip(kernels, left_out, strict=True):
        after = tuple(sorted({place for each in kernel.after for place in places[each]}))
        if gone:
            places.append(after)
        else:
            places.append((len(kept),))
            kept.append(replace(kernel, after=reduced(after, kept)))
    return kept


def reduced(after: Sequence[int], kernels: Sequence[Kernel]) -> tuple[int, ...]:
    """Remove what others imply."""
    before: set[int] = set()
    for each in after:
        open_ = list(kernels[each].after)
        while open_:
            one = open_.pop()
            if one not in before:
                before.add(one)
                open_ += kernels[one].after
    return tuple(each for each in after if each not in before)


def in_a_chain(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return kernels each of which waits for the one before."""
    return [replace(each, after=(n - 1,) if n else ()) for n, each in enumerate(kernels)]


# -- what is measured ------------------------------------------------------------------------------


def by_kind(parts: Sequence[Part]) -> Mapping[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        found[part.kind].append(number)
    return found


def kinds(step: LoneStep, whole: float) -> list[dict[str, Any]]:
    """Time each kind of kernel alone, and the step without it."""
    kernels, rows = [part.kernel for part in step.parts], []
    for kind, numbers in by_kind(step.parts).items():
        own = set(numbers)
        gone = [number in own for number in range(len(kernels))]
        row: dict[str, Any] = {"kind": kind, "count": len(numbers)}
        alone = microseconds(step.graph(in_a_chain([kernels[n] for n in numbers])))
        row["alone, us each"] = round(alone / len(numbers), 2)
        read = sum(step.parts[n].bytes for n in numbers)
        if read:
            row["MB each"] = round(read / len(numbers) / 1e6, 2)
            row["alone, GB/s"] = round(read / alone / 1e3)
        left = microseconds(step.graph(without(kernels, gone)))
        row["step without, us less each"] = round((whole - left) / len(numbers), 2)
        some = [waiting(each) if out else each for each, out in zip(kernels, gone, strict=True)]
        empty = microseconds(step.graph(some))
        row["emptied, us less each"] = round((whole - empty) / len(numbers), 2)
        rows.append(row)
        print(row, flush=True)
    return rows


def chains(step: LoneStep) -> dict[str, float]:
    """Time chains of kernels that compute nothing."""
    kernels = [part.kernel for part in step.parts]
    products = [part for part in step.parts if part.bytes]
    empty = [waiting(each) for each in kernels]
    small = [waiting(each, alone=True) for each in kernels]
    made: dict[str, Sequence[Kernel]] = {
        "empty, same blocks and edges": empty,
        "empty, same blocks, chained": in_a_chain(empty),
        "empty, one block each, same edges": small,
        "empty, one block each, chained": in_a_chain(small),
    }
    for early in (True, False):
        readers = [step.reader(part, early=early) for part in products]
        made[f"read {'before' if early else 'after'} waiting"] = in_a_chain(readers)
        both = [
            step.reader(part, early=early) if part.bytes else waiting(part.kernel, alone=True)
            for part in step.parts
        ]
        made[f"read {'before' if early else 'after'} waiting, others empty"] = in_a_chain(both)
    found = {name: microseconds(step.graph(each)) for name, each in made.items()}
    found["products alone, chained"] = microseconds(
        step.graph(in_a_chain([part.kernel for part in products]))
    )
    return found


def orders(step: LoneStep) -> dict[str, Any]:
    """Time the step with other dependencies, and compare its logits."""
    kernels = [part.kernel for part in step.parts]
    with patch.object(driver, "_capability", lambda: 80):
        one_by_one = step.graph(kernels)
    found: dict[str, Any] = {"no kernel starts early": microseconds(one_by_one)}
    expected = step.logits()
    for name, own in (("as it is", kernels), ("in a chain", in_a_chain(kernels))):
        took = microseconds(step.graph(own))
        found[name] = {"us": took, "same bits": bool((step.logits() == expected).all())}
    print(found, flush=True)
    return found


def triggers(step: LoneStep, whole: float) -> list[dict[str, Any]]:
    """Time the step in which one kind of kernel lets others start later, by microseconds each."""
    kernels, rows = [part.kernel for part in step.parts], []

    def after_waiting(text: str) -> str:
        head, kernel, rest = text.partition('extern "C"')
        return (
            head.replace("READY wait_for_others()", "READY wait_for_others(), others_may_start()")
            + kernel
            + (
                rest.replace("others_may_start();", "", 1).replace(
                    "wait_for_others();", "wait_for_others(); others_may_start();"
                )
            )
        )

    def after_loads(text: str) -> str:
        head, kernel, rest = text.partition('extern "C"')
        rest = rest.replace("others_may_start();", "", 1)
        return head + kernel + re.sub(r"(sum_up<[^;]*;)", r"\1 others_may_start();", rest, count=1)

    for kind, numbers in by_kind(step.parts).items():
        row: dict[str, Any] = {"kind": kind}
        for name, change in (("after waiting", after_waiting), ("after loads", after_loads)):
            source = kernels[numbers[0]].source
            changed = change(source)
            if "others_may_start();\n" not in source or changed.count("others_may_start()") < 2:
                continue
            other = list(kernels)
            for n in numbers:
                other[n] = replace(kernels[n], source=changed)
            took = microseconds(step.graph(other))
            row[name] = round((whole - took) / len(numbers), 2)
        rows.append(row)
        print(row, flush=True)
    return rows


def stamped(step: LoneStep) -> list[dict[str, Any]]:
    """Return, by kind, what the card's clock says of a kernel's stages, in microseconds."""
    count = len(step.parts)
    memory = mx.zeros((count, 8), mx.uint64)
    mx.eval(memory)
    base = step.cache._extension.pointer(memory)
    kernels = []
    for number, part in enumerate(step.parts):
        head, kernel, rest = part.kernel.source.partition('extern "C"')
        marker = head.rindex("wait_for_others() {") if "wait_for_others() {" in head else 0
        end = head.index("\n}\n", marker) + 3
        ready = re.findall("#define READY .*", head)
        again = ["#undef READY", *ready] if ready else []
        again = [line.replace("wait_for_others()", "stamped.wait()") for line in again]
        rest = rest.replace("wait_for_others()", "stamped.wait()")
        rest = re.sub(
            r"\) \{\n",
            ", unsigned long long* stamps) {\nStamped stamped{stamps};\n",
            rest,
            count=1,
        )
        if part.bytes:
            pieces = re.split(r"^__syncthreads\(\);", rest, flags=re.MULTILINE)
            rest = pieces[0]
            for stage, piece in enumerate(pieces[1:]):
                rest += f"__syncthreads(); stamped.mark({min(stage, 3)});{piece}"
        own = "\n".join([*again, ""])
        source = head[:end] + STAMPS + head[end:] + own + kernel + rest
        arguments = (*part.kernel.arguments, base + 64 * number)
        kernels.append(replace(part.kernel, source=source, arguments=arguments))
    step.compile([each.source for each in kernels])
    graph = step.graph(kernels)
    launched(graph)
    start = np.array([[2**63, 2**63, 0, 0, 0, 0, 0, 0]] * count, np.uint64)
    sums: dict[str, list[list[float]]] = defaultdict(list)
    wholes = []
    for _ in range(STAMPED):
        place = ctypes.c_uint64(base)
        driver_call("cuMemcpyHtoD_v2", place, start.tobytes(), ctypes.c_size_t(start.nbytes))
        launched(graph)
        found = np.zeros((count, 8), np.uint64)
        driver_call(
            "cuMemcpyDtoH_v2",
            found.ctypes.data_as(ctypes.c_void_p),
            place,
            ctypes.c_size_t(found.nbytes),
        )
        times = found.astype(np.int64)
        wholes.append((times[:, 3].max() - times[:, 0].min()) / 1e3)
        for number, part in enumerate(step.parts):
            first, some, last, end = map(int, times[number, :4])
            if not part.kernel.after or not 0 < some < 2**62:
                continue
            before = max(int(times[each, 3]) for each in part.kernel.after)
            stages = [before - first, some - before, last - some, end - last, end - before]
            stages += [max(0, int(mark) - last) for mark in times[number, 4:]]
            sums[part.kind].append([each / 1e3 for each in stages])
    names = ("there before, us", "until it may read", "until the last may", "then works", "in all")
    names += tuple(f"barrier {n} after" for n in range(4))
    rows = [{"whole, us": statistics.median(wholes)}]
    for kind, stages in sums.items():
        medians = [round(statistics.median(each), 2) for each in zip(*stages, strict=True)]
        rows.append(
            {"kind": kind, "count": len(stages) // STAMPED} | dict(zip(names, medians, strict=True))
        )
        print(rows[-1], flush=True)
    return rows


def cuts(step: LoneStep, whole: float) -> list[dict[str, Any]]:
    """Time the step with another cut of one kind of product."""
    made = {cut: step.with_cut(cut) for cut in CUTS}
    step.compile([part.kernel.source for parts in made.values() for part in parts])
    kernels, rows = [part.kernel for part in step.parts], []
    for kind, numbers in by_kind(step.parts).items():
        if ": skinny" not in kind:
            continue
        found: list[tuple[float, Cut]] = []
        seen = {kernels[numbers[0]].source}
        for cut, parts in made.items():
            if len(parts) != len(kernels) or parts[numbers[0]].kernel.source in seen:
                continue
            seen.add(parts[numbers[0]].kernel.source)
            other = list(kernels)
            for n in numbers:
                own = parts[n].kernel
                # Buffers are others in another recording: the step's own arguments.
                other[n] = replace(own, arguments=kernels[n].arguments, after=kernels[n].after)
            saved = (whole - microseconds(step.graph(other))) / len(numbers)
            found.append((round(saved, 2), cut))
        best = sorted(found, reverse=True)
        rows.append({"kind": kind, "us less each": [(saved, *cut) for saved, cut in best]})
        print(kind, best[:4], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=1, help="a power of two")
    parser.add_argument("--layers", type=int, help="only so many")
    parser.add_argument("--folder", type=Path, help="of the model, which is written if absent")
    parser.add_argument("--cuts", action="store_true", help="try other cuts of products")
    parser.add_argument("--brief", action="store_true", help="no chains, no kernels left out")
    asked = parser.parse_args()
    step = LoneStep.of_shape(asked.shape, asked.folder, asked.rows, asked.layers)
    graph = step.graph([part.kernel for part in step.parts])
    whole = microseconds(graph)
    found: dict[str, Any] = {
        "shape": asked.shape,
        "rows": asked.rows,
        "layers": asked.layers,
        "kernels": len(step.parts),
        "MB": round(sum(part.bytes for part in step.parts) / 1e6, 1),
        "whole, us": whole,
    }
    print(found, flush=True)

    def add(name: str, measured: Callable[[], Any]) -> None:
        found[name] = measured()
        asked.out.write_text(json.dumps(found, indent=1))

    add("orders", lambda: orders(step))
    add("stamps", lambda: stamped(step))
    add("triggers", lambda: triggers(step, whole))
    if asked.cuts:
        add("cuts", lambda: cuts(step, whole))
    if not asked.brief:
        add("chains", lambda: chains(step))
        print(found["chains"], flush=True)
        add("kinds", lambda: kinds(step, whole))


if __name__ == "__main__":
    main()
