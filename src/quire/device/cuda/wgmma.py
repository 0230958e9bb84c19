"""The C functions of wgmma, the tensor core instruction of Hopper's warpgroups.

PTX names each register of an instruction, so the text of a function depends on its columns.
"""

from __future__ import annotations


def multiplying(columns: int, *, in_registers: bool, turned: bool = False) -> str:
    """Return a function that adds products of 16 columns of two matrices, bfloat16, to `c`.

    A warpgroup multiplies 64 rows of the left matrix by `columns` rows of the right one, a tile in
    shared memory. The function is `wgmma`, `wgmma_shared`, `wgmma_turned` or
    `wgmma_shared_turned`, by its operands.

    Args:
        in_registers: whether the left matrix is in registers, or a tile in shared memory. With a
            tile, sums start at 0 where `add` is 0.
        turned: whether the sums are over rows of the right matrix, not over its columns.
    """
    sums = columns // 2
    held = ", ".join(f"%{n}" for n in range(sums))
    outputs = ", ".join(f'"+f"(c[{n}])' for n in range(sums))
    name = "wgmma" + "_shared" * (not in_registers) + "_turned" * turned
    step = 128 if turned else 2  # in pieces of 16 bytes: 16 rows of 128 bytes, or 16 columns
    if in_registers:
        given = "unsigned a0, unsigned a1, unsigned a2, unsigned a3, Tile x, int slice"
        left = ", ".join(f"%{sums + n}" for n in range(4))
        left, right, flags, add = f"{{{left}}}", sums + 4, f"1, 1, {int(turned)}", "1"
        inputs = f'"r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x + {step} * slice)'
    else:
        given = "Tile w, Tile x, int slice, int add = 1"
        left, right, flags, add = f"%{sums}", sums + 1, f"1, 1, 0, {int(turned)}", f"%{sums + 2}"
        inputs = f'"l"(w + 2 * slice), "l"(x + {step} * slice), "r"(add)'
    operation = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"
    return f"""
__device__ __forceinline__ void {name}(float (&c)[{sums}], {given}) {{
  asm volatile("{{.reg .pred add; setp.ne.b32 add, {add}, 0;"
    "{operation} {{{held}}}, {left}, %{right}, add, {flags};}}"
    : {outputs} : {inputs});
}}
"""
