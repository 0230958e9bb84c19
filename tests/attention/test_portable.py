"""The portable paged kernels: as a Mac compiles them, emulated here, and on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from quire.attention.backend import AttentionCase, Backends
from quire.attention.paged import PortableBackend
from quire.attention.paged.check import Spans, differs
from quire.attention.paged.portable_kernels import Codes, Shape
from quire.attention.paged.target import CUDA, METAL, Target
from quire.attention.reference import ReferenceBackend
from quire.cache.specs import AttentionSpec, FullKV, WindowKV
from quire.core.kv_format import KVFormat
from quire.device.device import current_device
from quire.device.dtypes import DTYPES
from quire.device.gpu_kernels import Kernel
from tests.support.emulated_metal import Emulated, emulate, why_not
from tests.support.nvrtc import assert_compiles

PLAIN, PAGE_4, PAGE_8 = KVFormat(), KVFormat("page", 4, 4), KVFormat("page", 8, 8)
LATENT = FullKV(1, 576, value_dim=512, value_in_key=True)
UNIFORM_4, TURBO_35 = KVFormat("uniform", 4, 4), KVFormat("turbo", 3.5, 3.5)
SINGLE = [(0, 1), (31, 1), (62, 1), (63, 1), (64, 1), (65, 1), (128, 1), (333, 1)]
SEVERAL = [*SINGLE, (0, 3), (60, 8), (125, 2), (200, 5)]
Row = tuple[KVFormat, AttentionSpec, int, mx.Dtype, bool, int]

needs_compiler = pytest.mark.skipif(bool(why_not()), reason=why_not())
needs_gpu = pytest.mark.skipif(not current_device().kernel_language, reason="needs a GPU")


def case(
    format: KVFormat,
    spec: AttentionSpec,
    group: int,
    dtype: mx.Dtype,
    extras: bool = False,
    block_size: int = 64,
) -> AttentionCase:
    """Return one row of a layer; `extras` are a cap and sinks."""
    heads = group * spec.kv_heads
    return AttentionCase(format, spec, block_size, heads, 1, dtype, extras, extras)


def spans(format: KVFormat) -> Spans:
    """Return sequences that end before, at and behind the borders of blocks."""
    return SINGLE if format.has_tail else SEVERAL


def name(row: Row) -> str:
    """Return the name of a test."""
    format, spec, group, dtype, extras, block_size = row
    sizes = f"{spec.kv_heads}x{group}-{spec.head_dim}-{spec.value_dim}-of-{block_size}"
    words = [format.name, sizes, "all" if spec.sees_all else "window", str(dtype)[9:]]
    return " ".join([*words, *(["extras"] if extras else [])])


FEW: list[Row] = [
    (PLAIN, FullKV(2, 64), 2, mx.float32, False, 64),
    (PLAIN, FullKV(1, 128), 5, mx.bfloat16, True, 64),
    (PLAIN, WindowKV(1, 80, 100, value_dim=48), 11, mx.float16, True, 32),
    (PLAIN, LATENT, 8, mx.bfloat16, False, 64),
    (KVFormat(dtype="float16"), FullKV(2, 64), 4, mx.float32, False, 16),
    (PAGE_4, FullKV(2, 64), 2, mx.float32, False, 64),
    (KVFormat("page", 8, 4), WindowKV(1, 128, 100, value_dim=256), 5, mx.bfloat16, True, 32),
    (UNIFORM_4, FullKV(2, 64), 2, mx.float32, False, 64),
    (KVFormat("uniform", 8, 5, 32), WindowKV(1, 80, 100, value_dim=96), 3, mx.bfloat16, True, 32),
    (TURBO_35, FullKV(1, 128), 5, mx.bfloat16, True, 64),
]
MANY: list[Row] = [
    (PLAIN, WindowKV(2, 256, 40), 1, mx.float32, False, 64),
    *((PLAIN, FullKV(2, dim), 3, mx.float32, False, 64) for dim in (96, 192, 320, 512)),
    *((PLAIN, WindowKV(1, 64, n), 1, mx.float32, True, 64) for n in (1, 63, 64, 65)),
    *((PLAIN, FullKV(1, 128), group, mx.float32, False, 64) for group in (1, 4, 8, 9, 13, 32)),
    *((PLAIN, FullKV(2, 128), 4, dtype, True, 64) for dtype in DTYPES.values()),
    *((PAGE_4, FullKV(2, dim), 4, mx.float32, True, 64) for dim in (96, 128, 256, 512)),
    *((PAGE_8, WindowKV(2, dim, 70), 8, mx.float32, False, 64) for dim in (64, 512)),
    *(
        (KVFormat("page", *bits), FullKV(1, 64), 4, mx.float16, False, 64)
        for bits in ((4, 8), (2, 2))
    ),
    (PAGE_4, FullKV(1, 64), 4, mx.float32, False, 128),
    *((KVFormat("page", n, n), FullKV(1, 128), 4, mx.float32, False, 64) for n in (3, 5, 6)),
    *(
        (KVFormat("uniform", n, n, 32 if n % 2 else 64), FullKV(2, 128), 4, mx.float32, True, 64)
        for n in (2, 3, 4, 5, 6, 8)
    ),
    *((KVFormat("turbo", n, n), FullKV(2, 64), 4, mx.float32, False, 64) for n in (2, 3, 3.5, 4)),
    (TURBO_35, FullKV(2, 96), 4, mx.float32, False, 64),
    *((each, WindowKV(2, 512, 70), 8, mx.bfloat16, True, 64) for each in (UNIFORM_4, TURBO_35)),
    *((each, FullKV(1, 256), 2, mx.float16, False, 16) for each in (UNIFORM_4, TURBO_35)),
    *((each, LATENT, 8, mx.float32, False, 64) for each in (UNIFORM_4, TURBO_35)),
]


@pytest.fixture
def emulated() -> PortableBackend:
    target = Target(METAL.name, METAL.positions, METAL.types, emulate)
    return PortableBackend(target, DTYPES.values())


@needs_compiler
@pytest.mark.parametrize(
    "row", [*FEW, *(pytest.param(each, marks=pytest.mark.slow) for each in MANY)], ids=name
)
def test_emulated_kernels_agree_with_the_reference(emulated: PortableBackend, row: Row) -> None:
    assert emulated.made_for(case(*row))
    assert differs(emulated, case(*row), spans(row[0])) is None


@needs_compiler
def test_many_splits_of_a_long_context(emulated: PortableBackend) -> None:
    for format in (PLAIN, PAGE_4):
        own = case(format, FullKV(1, 64), 1, mx.float32)
        assert differs(emulated, own, [(3999, 1), (20, 1), (1300, 1)]) is None


@needs_compiler
def test_rows_that_see_the_image_that_they_belong_to(emulated: PortableBackend) -> None:
    """The last visible key of some rows lies behind them, in the next block."""
    spec = WindowKV(2, 64, 40, bidirectional_media=True)
    own = case(PLAIN, spec, 2, mx.float32)
    image, span = (60, 66), (58, 8)
    assert differs(emulated, own, [span, (10, 1)], bidirectional=[image]) is None


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("row", [*FEW, *MANY], ids=name)
def test_kernels_agree_with_the_reference(row: Row) -> None:
    target = {"metal": METAL, "cuda": CUDA}[current_device().kernel_language]
    backend = PortableBackend(target, DTYPES.values())
    for some in (SINGLE, spans(row[0])):
        assert differs(backend, case(*row), some) is None


@needs_compiler
def test_a_launch_depends_on_rows_and_not_on_lengths() -> None:
    def launches(lengths: Sequence[int]) -> list[object]:
        made: list[Emulated] = []

        def compile(*arguments: object) -> Kernel:
            made.append(Emulated(*arguments))  # type: ignore[arg-type]
            return made[-1]

        backend = PortableBackend(replace(METAL, compile=compile), [mx.float32])
        own = case(PLAIN, FullKV(2, 64), 2, mx.float32)
        assert differs(backend, own, [(length - 1, 1) for length in lengths]) is None
        return [each.launches for each in made]

    assert launches([1, 64, 65]) == launches([700, 2, 300])
    assert launches([5]) != launches([5, 5])


@pytest.mark.parametrize(
    ("own", "serves"),
    [
        (case(PLAIN, FullKV(2, 128), 4, mx.bfloat16), True),
        (replace(case(PLAIN, FullKV(2, 128), 4, mx.bfloat16), rows=8), True),
        (replace(case(PLAIN, FullKV(2, 128), 4, mx.bfloat16), rows=9), False),
        (case(PLAIN, FullKV(2, 640), 4, mx.bfloat16), False),
        (case(PLAIN, LATENT, 128, mx.bfloat16), False),
        (case(PAGE_4, FullKV(2, 128), 4, mx.float32), True),
        (replace(case(PAGE_4, FullKV(2, 128), 4, mx.float32), rows=2), False),
        (case(KVFormat("page", 6, 6), FullKV(2, 128), 4, mx.float32), True),
        (case(PAGE_4, FullKV(2, 80), 4, mx.float32), False),
        (case(TURBO_35, FullKV(2, 80), 4, mx.bfloat16), True),
        (replace(case(UNIFORM_4, FullKV(2, 128), 4, mx.float16), rows=8), True),
        (replace(case(UNIFORM_4, FullKV(2, 128), 4, mx.float16), rows=9), False),
    ],
)
def test_what_the_kernels_are_made_for(own: AttentionCase, serves: bool) -> None:
    assert PortableBackend(METAL, DTYPES.values()).made_for(own) == serves
    only_float32 = PortableBackend(CUDA, [mx.float32])
    plain = own.format.scheme == "plain"
    assert only_float32.made_for(own) == (serves and (own.dtype == mx.float32 or not plain))


def _no_compiler(*arguments: object) -> Kernel:
    raise RuntimeError("no such language")


def _half(*arguments: object) -> Kernel:
    """Return kernels with results half as large as they should be."""
    kernel = Emulated(*arguments)  # type: ignore[arg-type]

    def run(**launch: object) -> list[mx.array]:
        return [0.5 * each for each in kernel(**launch)]  # type: ignore[arg-type]

    return run


def test_kernels_that_do_not_compile_give_way(caplog: pytest.LogCaptureFixture) -> None:
    own = case(PLAIN, FullKV(2, 64), 2, mx.float32)
    reference = ReferenceBackend()
    backend = PortableBackend(replace(METAL, compile=_no_compiler), [mx.float32])
    backend.name = "the broken one"  # what was found is kept by name
    with caplog.at_level(logging.WARNING, "quire.attention"):
        assert Backends([backend, reference]).backend_for(own) is reference
    assert "Attention kernels disabled for ('the broken one'" in caplog.text
    assert "no such language" in caplog.text
    assert "no such language" in (backend.problem or "")


@needs_compiler
def test_kernels_that_compute_something_else_give_way() -> None:
    own = case(PLAIN, FullKV(2, 64), 2, mx.float32)
    backend = PortableBackend(replace(METAL, compile=_half), [mx.float32])
    backend.name = "the one that halves"
    reference = ReferenceBackend()
    assert Backends([backend, reference]).backend_for(own) is reference
    assert "relative error" in (backend.problem or "")


FAULTS = {
    "outside of an array": ("to[index] = from[index + 1];", "from: 64 of 64"),
    "a barrier for some": (
        "if (index < 40) threadgroup_barrier(mem_flags::mem_threadgroup);\nto[index] = 0;",
        "others that do not come",
    ),
    "too much shared memory": (
        "threadgroup float x[9000]; x[index] = from[index]; to[index] = x[8999 - index];",
        "32 KiB",
    ),
}


@needs_compiler
@pytest.mark.parametrize(("body", "error"), FAULTS.values(), ids=FAULTS)
def test_the_emulation_finds_what_a_gpu_would_not_tell(body: str, error: str) -> None:
    positions = "const int index = thread_index_in_threadgroup;\n"
    with pytest.raises(RuntimeError, match=error):
        _over_64(positions + body)


@needs_compiler
def test_the_emulation_shows_a_missing_barrier() -> None:
    """Threads read what others write: right with a barrier, NaN somewhere without."""
    body = (
        "const int index = thread_index_in_threadgroup; threadgroup float x[64];\n"
        "x[index] = from[index];\n%s\nto[index] = x[63 - index];"
    )
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    assert _over_64(body % barrier).tolist() == [63.0 - n for n in range(64)]
    assert mx.isnan(_over_64(body % "")).any()


def _over_64(body: str) -> mx.array:
    """Return what a kernel of one thread group makes of 0 to 63."""
    return emulate("test", ["from"], ["to"], body, "")(
        inputs=[mx.arange(64, dtype=mx.float32)],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
    )[0]


COMPILED = [
    None,
    *(Codes(n, 64, 8, 64, by_channel=True, codebook=False) for n in (4, 6)),
    *(Codes(n, 64, n, 32, by_channel=False, codebook=False) for n in (2, 3, 4, 5, 6, 8)),
    *(Codes(n, 64, 4, 64, by_channel=False, codebook=True) for n in (2, 3, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 512])
@pytest.mark.parametrize(
    ("dtype", "codes"),
    [(mx.float32, None), *((mx.bfloat16, each) for each in COMPILED)],
    ids=str,
)
def test_sources_compile_for_cuda(
    dim: int, dtype: mx.Dtype, codes: Codes | None, tmp_path: Path
) -> None:
    texts = []

    def compile(
        name: str, inputs: Sequence[str], outputs: Sequence[str], body: str, header: str
    ) -> Kernel:
        ints = {"tiles": "int", "table": "int", "visible": "int", "sizes": "int"}
        read = {"q": "T"} if codes is not None else {"q": "T", "keys": "T", "values": "T"}
        coded = {"keys": "unsigned", "values": "unsigned"} if codes is not None else {}
        coded |= {name: "__half" for name in inputs if name.endswith(("scales", "biases"))}
        types = ints | coded | read
        arguments = [f"const {types.get(each, 'float')}* {each}" for each in inputs]
        arguments += [f"{'T' if 'result' in each else 'float'}* {each}" for each in outputs]
        texts.append(
            f'{header}\nextern "C" __global__ void {name}({", ".join(arguments)}) {{{body}}}\n'
        )
        return lambda **_: []

    shape = Shape(dtype, dim, dim, dim, 2, 4, 64, capped=True, sinks=True, several=False)
    target = replace(CUDA, compile=compile)
    if codes is not None and codes.codebook:
        codes = replace(codes, key_group=dim, value_group=dim)
    blocks = ["keys", "values"] if codes is None else codes.inputs()
    turned = codes is not None and codes.codebook
    signs = ["signs"] if turned else []
    inputs = ["q", *blocks, "tiles", "table", "visible", "numbers", *signs]
    defines = shape.defines(codes, turned=turned)
    target.kernel("attend", inputs, ["partial", "stats"], [], dtype, defines)
    assert_compiles(texts[0], tmp_path)
    tails = ["tail_partial", "tail_stats"]
    inputs = ["partial", "stats", *tails, "sizes", "sinks", *signs]
    defines = shape.merge_defines(tail=True, turned=turned)
    target.kernel("merge", inputs, ["result", "tail_result"], [], dtype, defines)
    assert_compiles(texts[1], tmp_path)
