"""Writes `dequantised.safetensors`: blocks of codes, and the numbers that llama.cpp makes of them.

Run it with the library of ggml that llama.cpp, or llama-cpp-python, is built with:
`python -m tests.models.weights.gguf.make_dequantised libggml-base.so`.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

FILE = Path(__file__).with_name("dequantised.safetensors")
FUNCTIONS = {
    **{getattr(Type, f"Q{n}"): f"q{n}" for n in ("4_0", "4_1", "5_0", "5_1", "8_0")},
    **{getattr(Type, f"Q{n}_K"): f"q{n}_K" for n in (2, 3, 4, 5, 6)},
    Type.IQ4_NL: "iq4_nl",
    Type.IQ4_XS: "iq4_xs",
    Type.MXFP4: "mxfp4",
}
"""Names of types in ggml's functions `dequantize_row_...`."""
_NUMBERS = 1024
_HALVES = {
    **dict.fromkeys((Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K), (0, 2)),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q6_K: (208,),
    Type.MXFP4: (),
}
"""Offsets of the float16 scales in a block; 0 for types that are not listed."""


def blocks(kind: Type) -> npt.NDArray[np.uint8]:
    """Return random bytes `[blocks, bytes of a block]` with scales that are finite numbers."""
    random = np.random.default_rng(int(kind))
    numbers, size = GGML_QUANT_SIZES[kind]
    codes = random.integers(0, 256, (_NUMBERS // numbers, size), dtype=np.uint8)
    for at in _HALVES.get(kind, (0,)):
        scales = random.uniform(-0.1, 0.1, (len(codes), 1)).astype(np.float16)
        codes[:, at : at + 2] = scales.view(np.uint8)
    if kind is Type.MXFP4:
        codes[:, 0] = random.integers(110, 130, len(codes))
    return codes


def main(library: str) -> None:
    ggml = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    tensors: dict[str, mx.array] = {}
    for kind, name in FUNCTIONS.items():
        codes = blocks(kind)
        numbers = np.zeros(_NUMBERS, np.float32)
        function = getattr(ggml, f"dequantize_row_{name}")
        function(codes.ctypes.data_as(ctypes.c_void_p), numbers.ctypes.data_as(ctypes.c_void_p),
                 ctypes.c_int64(_NUMBERS))  # fmt: skip
        tensors[f"{kind.name}.codes"] = mx.array(codes)
        tensors[f"{kind.name}.numbers"] = mx.array(numbers)
    mx.save_safetensors(str(FILE), tensors)


if __name__ == "__main__":
    main(sys.argv[1])
