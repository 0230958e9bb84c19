// Products of tiles on tensor cores whose operands are sums of two numbers in bfloat16, so that 16 bits of float32 count.
__device__ __forceinline__ void product(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                        unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ unsigned pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *(const unsigned*)&both;
}
// Two numbers as sums of two in bfloat16 each.
__device__ __forceinline__ void in_parts(unsigned& high, unsigned& low, float x, float y) {
  high = pack(x, y);
  low = pack(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xFFFF0000u));
}
// A result of 16 x 8 as the right operand of another product, in parts.
__device__ __forceinline__ void transposed_parts(unsigned* high, unsigned* low, const float* c) {
  #pragma unroll
  for (int n = 0; n < 2; n++) {
    in_parts(high[n], low[n], c[2 * n], c[2 * n + 1]);
    high[n] = transposed(high[n]);
    low[n] = transposed(low[n]);
  }
}
// Adds a product whose operands are in parts, of the left one first all high, then all low ones. Its largest part is
// added to sums[0], the rest to sums[1].
__device__ __forceinline__ void add_product(float (*sums)[4], const uint4* left, const unsigned* high, const unsigned* low) {
  const uint4 a = left[0], rest = left[32];
  product(sums[0], a.x, a.y, a.z, a.w, high[0], high[1]);
  product(sums[1], rest.x, rest.y, rest.z, rest.w, high[0], high[1]);
  product(sums[1], a.x, a.y, a.z, a.w, low[0], low[1]);
}
