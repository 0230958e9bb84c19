"""The target of the portable kernels: Metal, or CUDA without tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from quire.device.gpu_kernels import Kernel, cuda_kernel, kernel_text, metal_kernel

Compile = Callable[[str, Sequence[str], Sequence[str], str, str], Kernel]
"""A function that makes a kernel of `mx.fast` from its name, names of inputs and outputs, body and
header.
"""


@dataclass(frozen=True, eq=False, slots=True)
class Target:
    """A language of kernels.

    Attributes:
        name: name of the language, and of its header in `sources/`.
        positions: thread position attributes, as the body names them. MLX declares in a kernel's
            signature those of Metal's attributes that the body itself mentions.
        types: names of element types.
        compile: creates the kernel, which is compiled at its first call.
    """

    name: str
    positions: str
    types: dict[mx.Dtype, str]
    compile: Compile

    def kernel(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        given: Sequence[mx.Dtype],
        dtype: mx.Dtype,
        defines: dict[str, int],
    ) -> Kernel:
        """Return the kernel of `sources/portable_<name>.h`.

        Args:
            given: types of inputs whose types vary; part of the kernel's name.
            dtype: the body's `T`.
            defines: the body's constants.
        """
        package = "quire.attention.paged"
        lines = [f"#define {key} {value}" for key, value in defines.items()]
        header = "\n".join([*lines, f"typedef {self.types[dtype]} T;", ""])
        types = [self.types.get(each, "codes") for each in (*given, dtype)]
        own = "_".join([*types, *(str(value) for value in defines.values())])
        return self.compile(
            f"quire_{name}_{own}",
            inputs,
            outputs,
            self.positions + kernel_text(package, f"portable_{name}.h"),
            kernel_text(package, f"{self.name}.h")
            + kernel_text(package, "portable_turn.h")
            + header,
        )


METAL = Target(
    "metal",
    """\
const int index = thread_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const int warp = simdgroup_index_in_threadgroup;
const int group_x = threadgroup_position_in_grid.x;
const int group_y = threadgroup_position_in_grid.y;
const int group_z = threadgroup_position_in_grid.z;
const int splits = threadgroups_per_grid.z;
""",
    {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t"},
    compile=metal_kernel,
)

CUDA = Target(
    "cuda",
    """\
const int index = threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
const int group_x = blockIdx.x, group_y = blockIdx.y, group_z = blockIdx.z;
const int splits = gridDim.z;
""",
    {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"},
    compile=cuda_kernel,
)
