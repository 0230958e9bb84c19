// Rows of x as integers, for products by codes of 4 bits. Of 64 columns, x is integers times a unit, a power of two:
// in even columns up to 2^22, in odd ones, whose codes count 16 times, up to 2^18. Each is three signed digits of base
// 256. A record of 64 columns of a row is 13 pieces of 16 bytes: of each digit four, in which a piece is of 16
// columns, by eight of them the even ones and then the odd ones; then the unit, -INTEGER_BASE times it, and the sum.
#define DIGIT_PIECES 13
// An integer n below 2^22, added to these bits, is the float 1.5 * 2^23 + n.
#define INTEGER_BITS 0x4B400000
#define INTEGER_BASE 12582912.f
// Digits of four numbers, the lowest ones first, a byte each. `inverse`: of their unit.
__device__ __forceinline__ void digits_of(const float* x, float inverse, unsigned* to) {
  unsigned n[4];
  #pragma unroll
  for (int i = 0; i < 4; i++)  // with 128 in each digit none is negative
    n[i] = __float_as_uint(fmaf(x[i], inverse, INTEGER_BASE)) + (0x808080u - INTEGER_BITS);
  const unsigned low[2] = {__byte_perm(n[0], n[1], 0x5140), __byte_perm(n[2], n[3], 0x5140)};
  const unsigned high[2] = {__byte_perm(n[0], n[1], 0x0062), __byte_perm(n[2], n[3], 0x0062)};
  to[0] = __byte_perm(low[0], low[1], 0x5410) ^ 0x80808080u;
  to[1] = __byte_perm(low[0], low[1], 0x7632) ^ 0x80808080u;
  to[2] = __byte_perm(high[0], high[1], 0x5410) ^ 0x80808080u;
}
// Stores eight neighbours of a row of `rows`, from a column on; eight lanes have 64 columns. All lanes of a warp call it.
__device__ __forceinline__ void store_digits(uint4* to, int row, int rows, int column, const __nv_bfloat16* x,
                                             bool inside) {
  float even[4], odd[4], most = 0.f, sum = 0.f;
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    even[i] = inside ? __bfloat162float(x[2 * i]) : 0.f;
    odd[i] = inside ? __bfloat162float(x[2 * i + 1]) : 0.f;
    most = fmaxf(most, fmaxf(fabsf(even[i]), fabsf(odd[i])));
    sum += even[i] + odd[i];
  }
  #pragma unroll
  for (int by = 1; by < 8; by *= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, by));
    sum += __shfl_xor_sync(0xffffffffu, sum, by);
  }
  const int exponent = max((int)(__float_as_uint(most) >> 23), 32), eight = column / 8 % 8;
  unsigned of_even[3], of_odd[3];
  digits_of(even, __uint_as_float(275 - exponent << 23), of_even);
  digits_of(odd, __uint_as_float(271 - exponent << 23), of_odd);
  if (!inside) return;
  uint4* const record = to + (column / 64 * rows + row) * DIGIT_PIECES;
  #pragma unroll
  for (int d = 0; d < 3; d++) ((uint2*)(record + d * 4))[eight] = make_uint2(of_even[d], of_odd[d]);
  const float unit = __uint_as_float(exponent - 21 << 23);
  if (eight == 0) *(float4*)(record + 12) = make_float4(unit, -INTEGER_BASE * unit, sum, 0.f);
}
