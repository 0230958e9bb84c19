// Attention of few or many query rows over blocks of keys and values, on tensor cores.
//
// A thread block has four warps and a tile of TILES * 16 query vectors: all heads of one KV head, of
// one or several rows of one sequence. It passes 64 keys at a time. Each warp scores 16 of them; the
// weights meet in shared memory; each warp then adds up a quarter of the value's elements. `splits`
// thread blocks share a tile's keys, and `combine` joins what they found.
//
// Operands come from global memory in 16-byte loads and go to the tensor cores as they are: which
// elements of a vector stand in which slot of a product does not matter, as long as both sides agree.

__device__ __forceinline__ void product(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                        unsigned b0, unsigned b1) {
#if BF16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#endif
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned pack(float low, float high) {
#if BF16
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#else
  __half2 pair = __floats2half2_rn(low, high);
#endif
  return *(unsigned*)&pair;
}

__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
