// Of kernels of products. OFFSETS: a row of W may have one, which is added to its products. FIRST: x has
// a row for TOP pairs of row and expert, y one for each pair. JOINED makes an element of y from the
// products with all matrices. X_ROW and Y_ROW are elements from one row to the next.
#ifndef OFFSETS
#define OFFSETS 0
#endif
#ifndef FIRST
#define FIRST GATED
#endif
#ifndef JOINED
#define JOINED(sums) gated(sums[0], sums[1])
#endif
#ifndef X_ROW
#define X_ROW K
#endif
#ifndef Y_ROW
#define Y_ROW N
#endif
__device__ __forceinline__ void product(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                        unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// 16 bytes from global to shared memory, in the background, as part of a whole line; copies of a turn arrive
// together.
__device__ __forceinline__ void copy_of_line(const void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void end_turn() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all turns but the last LEFT have arrived.
template <int LEFT>
__device__ __forceinline__ void await_turns() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Two 4-bit codes of a word, four apart, as bfloat16 numbers 128 + n.
__device__ __forceinline__ unsigned raised(unsigned word, int shift) {
  unsigned up;  // the compiler alone makes two operations of this one
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(up) : "r"(word >> shift), "n"(0x000F000F), "r"(0x43004300));
  return up;
}
// What the eight codes of a word stand for, in their order.
__device__ __forceinline__ uint4 numbers(unsigned word, __nv_bfloat162 scale, __nv_bfloat162 bias) {
  const __nv_bfloat162 base = __float2bfloat162_rn(128.f);
  unsigned pair[4];  // elements (j, j + 4)
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    const unsigned up = raised(word, 4 * j);
    const __nv_bfloat162 n = __hsub2(*(const __nv_bfloat162*)&up, base);
    const __nv_bfloat162 number = __hfma2(n, scale, bias);
    pair[j] = *(const unsigned*)&number;
  }
  return make_uint4(__byte_perm(pair[0], pair[1], 0x5410), __byte_perm(pair[2], pair[3], 0x5410),
                    __byte_perm(pair[0], pair[1], 0x7632), __byte_perm(pair[2], pair[3], 0x7632));
}
__device__ __forceinline__ unsigned bits_of(__nv_bfloat16 x) { return *(const unsigned short*)&x; }
// What eight codes of 8 bits stand for, in their order.
__device__ __forceinline__ uint4 byte_numbers(uint2 codes, __nv_bfloat162 scale, __nv_bfloat162 bias) {
  const float s = (float)scale.x, b = (float)bias.x;
  unsigned pair[4];
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    const unsigned word = j < 2 ? codes.x : codes.y, at = 2 * (j % 2);
    // A byte behind this exponent is 2^23 + n.
    const float low = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7650u + at)) - 8388608.f;
    const float high = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7651u + at)) - 8388608.f;
    const __nv_bfloat162 both = __floats2bfloat162_rn(fmaf(low, s, b), fmaf(high, s, b));
    pair[j] = *(const unsigned*)&both;
  }
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}
__device__ __forceinline__ float gated(float gate, float up) {
#if GELU
  const float y = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.f + __expf(-2.f * y)) * up;
#else
  return gate / (1.f + __expf(-gate)) * up;
#endif
}
