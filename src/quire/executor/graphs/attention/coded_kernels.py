"""The sources of kernels that read codes as numbers first: of vectors of any size, and of values
that are the starts of their keys.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.attention.paged import cuda as paged
from quire.attention.paged import decoding, packed
from quire.attention.paged import portable_kernels as portable
from quire.executor.graphs.attention import attention_kernels
from quire.executor.graphs.attention.token_kernels import Attend, code_parameters
from quire.executor.graphs.source import HALF, generated_source, own_text, written_source

LONGEST = 576
"""Most elements of a vector."""
DECODING_THREADS = 256
_WORDS_OF_TILE = 32
"""Keys of a warp's tile in shared memory."""


def takes(key_dim: int, value_dim: int) -> bool:
    """Whether the kernels take coded keys and values of these sizes."""
    warps = paged.warps_together(value_dim)
    parted = all(n % (16 * warps) == 0 and n % 32 == 0 for n in (key_dim, value_dim))
    return parted and warps in (1, 2, 4) and max(key_dim, value_dim) <= LONGEST


def attend(shape: paged.Shape, codes: portable.Codes, value_size: int, *, in_key: bool) -> Attend:
    """Return the kernel of a layer.

    Parameters over codes of single tokens are those of `token_kernels.attend`, over page codes
    those of `attention_kernels.attend_packed`.

    Args:
        value_size: elements of a stored value, of which the first are read.
        in_key: whether values are the starts of keys.
    """
    tailed = codes.by_channel
    parameters = ["const T* q", *code_parameters(codes)]
    if tailed:
        parameters += attention_kernels.TAILED
        body, head = packed.body("single"), packed.head()
    else:
        parameters += ["const int* tiles", "const int* table", "const float* numbers"]
        parameters += ["float* partial", "float* stats"]
        body = "const int split = blockIdx.z, splits = gridDim.z;\n" + paged.source("single")
        head = "".join(map(paged.source, ("tensor", "warps", "codes")))
    stride = shape.key_dim if in_key else shape.value_dim
    defines: Mapping[str, object] = {
        **shape.defines(1, split=True),
        **codes.defines(),
        "CODED": 1,
        "IN_KEY": int(in_key),
        "V_SIZE": value_size,
        "V_STRIDE": stride,  # of tails
        "LEAST_PASSES": 1,
        "THREADS": paged.LANES,
        "READY": "wait_for_others()",
    }
    head = HALF + head + decoding.head() + paged.source("units") + paged.source("expand")
    text = written_source(
        parameters, body, paged.LANES, defines=defines, head=head, resident=shape.resident
    )
    shared = _shared_memory(shape)
    if tailed:
        shared = max(shared, paged.shared_memory(shape, 1))
    return Attend(text, shared)


def decode_prompts(shape: paged.Shape, codes: portable.Codes, *, in_key: bool) -> str:
    """Return the source that decodes the blocks which prompts read into the workspace.

    Parameters: decoded, table, the arrays of keys and of values; over page codes tails of both;
    signs of values, which include the scale of the rotation, or null; keys and values of the
    workspace.
    """
    parameters = ["const int* decoded", "const int* table", *code_parameters(codes)]
    parameters += ["T* tail_keys", "T* tail_values"] * codes.by_channel
    parameters += ["const float* value_signs", "T* to_keys", "T* to_values"]
    defines: Mapping[str, object] = {
        "K_DIM": shape.key_dim,
        "V_DIM": shape.value_dim,
        "BLOCK": shape.block_size,
        "KV_HEADS": shape.kv_heads,
        "THREADS": DECODING_THREADS,
        "IN_KEY": int(in_key),
        **codes.defines(),
    }
    return written_source(
        parameters,
        "wait_for_others();\n" + own_text("decode_prompts.cuh"),
        DECODING_THREADS,
        defines=defines,
        head=HALF + decoding.head(),
        resident=4 if shape.key_dim <= 256 else 2,  # else the compiler leaves too few registers
    )


def _shared_memory(shape: paged.Shape) -> int:
    """Return the bytes that `single.cuh` lays out over codes."""
    share, columns = paged.warps_together(shape.value_dim), -(-shape.part // 8)
    longest = max(-(-n // share // 64) * 64 for n in (shape.key_dim, shape.value_dim))
    return 4 * _WORDS_OF_TILE * 2 * longest + columns * (256 if share == 1 else 8192)


def gather(
    codes: portable.Codes, constants: Mapping[str, int], threads: int, *, turned: bool
) -> str:
    """Return the source that copies chosen keys side by side, as numbers.

    Parameters: rows, tiles of the copies, keys, tiles, table, codes, scales, and biases or levels;
    then over page codes tiles of coded blocks, tails and their keys; else signs.

    Args:
        constants: those of `gather.cuh`.
        turned: whether a rotation is undone; the signs include its scale.
    """
    parameters = ["const int* found", "const int* chosen", "const int* tiles", "const int* table"]
    parameters += code_parameters(codes)[:3]
    if codes.by_channel:
        parameters += ["const int* coded", "const int* tails", "const T* tail_keys"]
    else:
        parameters.append("const float* signs")
    own = {
        **constants,
        "KEY_BITS": codes.key_bits,
        "KEY_GROUP": codes.key_group,
        "CODEBOOK": int(codes.codebook),
    }
    last = "levels" if codes.codebook else "biases"
    lines = [
        "typedef __nv_bfloat16 T;",
        f"#define BY_CHANNEL {int(codes.by_channel)}",
        f"#define TURNED {int(turned)}",
        f"#define key_more key_{last}",
        decoding.head(),
    ]
    body = own_text("gather_codes.cuh")
    return generated_source(
        [*parameters, "T* to"], [body], threads, constants=own, functions="\n".join(lines)
    )
