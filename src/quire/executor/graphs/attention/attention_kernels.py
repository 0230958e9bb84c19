"""The sources of attention over plain blocks and page codes, and of the kernels that write codes.

Each is a function `kernel` whose arguments are all addresses. `rows` is the number of rows of the
step; a kernel is launched for the rows that its graph was recorded for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from quire.attention.paged import cuda as paged
from quire.attention.paged import packed
from quire.attention.paged.portable_kernels import Codes
from quire.attention.paged.warpgroups import PromptTiles, prompt_tiles
from quire.cache.formats.packing import Affine, affine_coding
from quire.device.cuda.driver import Card
from quire.device.gpu_kernels import kernel_text
from quire.executor.graphs.source import HALF, literal, own_text, written_source

TAIL_THREADS = 256
TAILED = (
    *("const T* tail_keys", "const T* tail_values"),
    *("const int* tiles", "const int* own_tiles", "const int* table", "const int* tails"),
    *("const int* visible", "const float* numbers"),
    *("float* partial", "float* stats", "float* own_partial", "float* own_stats"),
)
"""Parameters of attention over page codes, behind those of the codes."""


def attend(
    shape: paged.Shape,
    card: Card,
    *,
    ordered: bool = False,
    most_tiles: int = 0,
    value_in_key: bool = False,
    tiles_are_made: bool = False,
    stores_digits: bool = False,
) -> str:
    """Return the source of attention over plain blocks, one row a tile.

    Parameters: q, keys, values, tiles, table, numbers, partial, stats, and `ending_of`.

    Args:
        ordered: whether thread blocks without work also wait for the previous kernel. Needed if all
            may be without work.
        most_tiles: the most tiles, if there are more than thread blocks; those with a row come
            first. 0 if each thread block has one tile.
        tiles_are_made: whether an earlier kernel of the step writes the tiles.
        stores_digits: see `ending_of`.
    """
    parameters = ["const T* q", "const T* keys", "const T* values", "const int* tiles"]
    parameters += ["const int* table", "const float* numbers", "float* partial", "float* stats"]
    stride = shape.key_dim if value_in_key else shape.value_dim
    more = {"READY": "wait_for_others()", "ORDERED": int(ordered), "V_STRIDE": stride}
    more |= {"MOST_TILES": most_tiles, "STORES_DIGITS": int(stores_digits)}
    more["SPLITS_AT_ONCE"] = shape.splits_at_once(card)
    defines: Mapping[str, object] = {**shape.defines(1, split=True), **more}
    head = digits_head(stores_digits) + "".join(map(paged.source, ("tensor", "warps", "units")))
    return written_source(
        [*parameters, *ending_of(shape, stores_digits)],
        "const int split = blockIdx.z, splits = gridDim.z;\n" + paged.source("single"),
        paged.LANES,
        defines=defines,
        head=head,
        before="wait_for_others();" * tiles_are_made,
        resident=shape.resident,
    )


def attend_tiles(shape: paged.Shape, *, value_in_key: bool = False) -> str:
    """Return the source of attention whose tiles hold several rows of one sequence.

    Parameters: q, keys, values, tiles, table, visible, numbers, result, and sinks if there are any.
    """
    tiles = shape.many_tiles
    body = [
        "wait_for_others();",
        "if (tiles[blockIdx.x * 6 + 1] == 0) return;",
        "constexpr int split = 0, splits = 1;",
        "float *partial = nullptr, *stats = nullptr;",
        "" if shape.sinks else "const float* sinks = nullptr;",
        paged.source("attend"),
    ]
    stride = shape.key_dim if value_in_key else shape.value_dim
    defines: Mapping[str, object] = {**shape.defines(tiles, split=False), "V_STRIDE": stride}
    parameters, head = _tile_parameters(shape), paged.source("tensor")
    return written_source(parameters, "\n".join(body), paged.LANES, defines=defines, head=head)


def _tile_parameters(shape: paged.Shape) -> list[str]:
    parameters = ["const T* q", "const T* keys", "const T* values", "const int* tiles"]
    parameters += ["const int* table", "const int* visible", "const float* numbers", "T* result"]
    return [*parameters, *sinks_of(shape)]


class PromptKernel(NamedTuple):
    """A kernel of attention of several rows of a sequence.

    Attributes:
        shared: bytes of shared memory.
        piece: bytes of the sums of a tile's piece; 0 if it attends to whole tiles only.
        maps: of keys and of values, if it has sums.
    """

    source: str
    threads: int
    shared: int
    piece: int = 0
    maps: tuple[mx.array, ...] = ()


def attend_many(
    shape: paged.Shape, card: Card, *, value_in_key: bool, in_boxes: bool
) -> PromptKernel:
    """Return the kernel of attention of several rows of a sequence.

    Args:
        in_boxes: see `PromptTiles`.
    """
    tiles = prompt_tiles(shape, card, value_in_key=value_in_key)
    if tiles is None:
        source = attend_tiles(shape, value_in_key=value_in_key)
        return PromptKernel(source, paged.LANES, paged.shared_memory(shape, shape.many_tiles))
    tiles = replace(tiles, in_boxes=in_boxes)
    source = attend_prompts(tiles)
    return PromptKernel(source, tiles.threads, tiles.shared, piece=tiles.piece, maps=tiles.maps)


def attend_prompts(tiles: PromptTiles) -> str:
    """Return the source of attention by warpgroups. Parameters as of `attend_tiles`, then sums of
    pieces, for each tile and head 0, and maps of keys and of values.
    """
    sums, maps = ["float* sums", "int* stored"], ["const void* k_map", "const void* v_map"]
    return written_source(
        [*_tile_parameters(tiles.shape), *sums, *maps],
        paged.source("prompts"),
        tiles.threads,
        defines=tiles.defines,
        head=tiles.functions,
    )


def combine(
    shape: paged.Shape,
    splits: int,
    card: Card,
    *,
    tiles_are_made: bool = False,
    stores_digits: bool = False,
) -> str:
    """Return the source that combines splits.

    Parameters: rows, partial, stats, tiles, and `ending_of`.

    Args:
        tiles_are_made: whether an earlier kernel of the step writes the tiles.
        stores_digits: see `ending_of`.
    """
    parameters = ["const int* rows", "const float* partial", "const float* stats"]
    lines = [
        *of_splits(shape, splits),
        "wait_for_others();" * tiles_are_made,
        f"const int* tile = tiles + blockIdx.x / {shape.heads} * 6;",
        "const int low = tile[2], high = tile[3], each = units_of_split(low, high, splits);",
        "const int count = ((high + 31) / 32 - low / 32 + each - 1) / each;",
        "wait_for_others();",  # before any end: who waits for this waits for those before
        "if (count == 1 || high == 0) return;",
    ]
    body = "\n".join([*lines, paged.source("combine")])
    parameters += ["const int* tiles", *ending_of(shape, stores_digits)]
    head = digits_head(stores_digits) + paged.source("units") + paged.source("splits")
    place = f"((size_t)tile[0] * {shape.heads} + blockIdx.x % {shape.heads})"
    defines = {**joined_defines(shape), "PLACE": place, "STORES_DIGITS": int(stores_digits)}
    defines["SPLITS_AT_ONCE"] = shape.splits_at_once(card)
    return written_source(parameters, body, paged.LANES, defines=defines, head=head)


def of_splits(shape: paged.Shape, splits: int, *, some: bool = False) -> list[str]:
    """Return the declarations before a kernel that combines splits.

    Args:
        some: whether only rows that have tiles were split; the kernel has a parameter for these.
    """
    # Whoever waits for this kernel waits for those before it: no thread block may end sooner.
    skipping = f"if (tiles[blockIdx.x / {shape.heads} * 6 + 1] == 0) return;"
    return [
        *["wait_for_others();", skipping] * some,
        f"if ((int)blockIdx.x >= *rows * {shape.heads}) return;",
        f"constexpr int splits = {splits};",
        "" if shape.sinks else "const float* sinks = nullptr;",
    ]


def ending_of(shape: paged.Shape, stores_digits: bool = False) -> list[str]:
    """Return the last parameters of attention kernels: the result, sinks if there are any, and the
    result's digits.

    Args:
        stores_digits: whether a kernel also writes the result as digits.
    """
    return ["T* result", *sinks_of(shape), *["uint4* digits"] * stores_digits]


def digits_head(stores_digits: bool) -> str:
    """Return the functions of a kernel that may write digits."""
    return kernel_text("quire.device.cuda", "digits.cuh") if stores_digits else ""


def sinks_of(shape: paged.Shape) -> list[str]:
    """Return the last parameter of attention kernels with sinks."""
    return ["const T* sinks"] * shape.sinks


def joined_defines(shape: paged.Shape) -> dict[str, object]:
    """Return the constants of a kernel that combines splits."""
    return {"V_DIM": shape.value_dim, "HEADS": shape.heads, "SINKS": int(shape.sinks)}


def attend_packed(shape: paged.Shape, codes: Codes) -> str:
    """Return the source of attention over page codes.

    Parameters: q, the arrays of a page store, tiles of coded and own blocks, table, tails, visible,
    numbers, partial, stats, and partial and stats of the own blocks.
    """
    parameters = ["const T* q", *_codes("k"), *_codes("v"), *TAILED]
    more = {"LEAST_PASSES": 1, "READY": "wait_for_others()"}
    defines: Mapping[str, object] = {**packed.defines(shape, codes), **more}
    head = HALF + packed.head()
    return written_source(
        parameters, packed.body(), paged.LANES, defines=defines, head=head, resident=shape.resident
    )


def _codes(of: str) -> list[str]:
    return [
        f"const unsigned* {of}_codes",
        *(f"const __half* {of}_{n}" for n in ("scales", "biases")),
    ]


def join(shape: paged.Shape, splits: int, *, turned: bool, some: bool = False) -> str:
    """Return the source that combines splits of coded and own blocks.

    Parameters: rows, partial, stats, partial and stats of the own blocks, signs, tiles if only
    `some` rows have them, result, and sinks if there are any.

    Args:
        turned: whether sums of coded values are rotated back.
    """
    parameters = ["const int* rows", "const float* partial", "const float* stats"]
    parameters += ["const float* own_partial", "const float* own_stats", "const float* signs"]
    parameters += [*["const int* tiles"] * some, "T* result", *sinks_of(shape)]
    body = "\n".join([*of_splits(shape, splits, some=some), paged.source("join")])
    defines = {**joined_defines(shape), "TURNED": int(turned)}
    head = HALF + paged.joining(turned=turned)
    return written_source(parameters, body, paged.LANES, defines=defines, head=head)


def code_tails(kv_heads: int, key_dim: int, value_dim: int, codes: Codes) -> str:
    """Return the source that codes full tails.

    Parameters: rows, blocks, offsets, tails, signs, stores: addresses of each layer's arrays.

    Args:
        value_dim: 0 if values are the starts of keys.
    """
    parameters = ["const int* rows", "const int* blocks", "const int* offsets"]
    parameters += ["const int* tails", "const float* signs", "const long long* stores"]
    return written_source(
        parameters,
        own_text("code_tails.cuh"),
        TAIL_THREADS,
        defines=_block_coding(kv_heads, key_dim, value_dim, codes=codes),
        head=_coding_head(),
    )


def code_written(kv_heads: int, key_dim: int, value_dim: int, codes: Codes) -> str:
    """Return the source that codes the blocks which prompts fill in the workspace.

    Parameters: decoded, written, signs, codes, scales and biases of keys and of values, tails of
    both, then keys and values of the workspace; without those of values where `value_dim` is 0.
    """
    parameters = ["const int* decoded", "const int* written", "const float* signs"]
    kinds = ("key", "value") if value_dim else ("key",)
    for of in kinds:
        parameters += [f"unsigned* {of}_codes", f"__half* {of}_scales", f"__half* {of}_biases"]
    parameters += [f"const T* tail_{of}s" for of in kinds] + [f"T* {of}s" for of in kinds]
    return written_source(
        parameters,
        own_text("code_written.cuh"),
        TAIL_THREADS,
        defines=_block_coding(kv_heads, key_dim, value_dim, codes=codes),
        head=_coding_head() + paged.source("copy"),
    )


def _coding_head() -> str:
    return HALF + kernel_text("quire.device.cuda", "coding.cuh") + own_text("code_block.cuh")


def _block_coding(
    kv_heads: int, key_dim: int, value_dim: int, codes: Codes
) -> Mapping[str, object]:
    """Return the constants of `code_block.cuh`."""
    reach = [
        affine_coding(group, Affine(group, bits), refit=True).reach
        for bits, group in (
            (codes.key_bits, packed.BLOCK_SIZE),
            (codes.value_bits, codes.value_group),
        )
    ]
    return {
        "KV_HEADS": kv_heads,
        "K_DIM": key_dim,
        "V_DIM": value_dim,
        "THREADS": TAIL_THREADS,
        "K_REACH": literal(reach[0], mx.float32),
        "V_REACH": literal(reach[1], mx.float32),
        "K_BITS": codes.key_bits,
        "V_BITS": codes.value_bits,
        "V_GROUP": codes.value_group,
    }
