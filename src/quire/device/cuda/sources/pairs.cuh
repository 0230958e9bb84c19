// Of `warpgroup_gemm.cuh`: pairs of codes as two numbers in bfloat16.
#if BITS == 4 && !FLOATS
// Sums of products with `affine_pair` are multiplied by this.
#define PAIR_FACTOR 0x1p64f
// The low four bits of a byte of a word, in bits 0 to 3, and its high ones, in bits 20 to 23. Other bits are not 0.
__device__ __forceinline__ unsigned pair_of_byte(unsigned word, int byte) {
  return __byte_perm(word, 0, 0x4040 + byte * 0x101);
}
#else
#define PAIR_FACTOR SUM_FACTOR
// The low four bits of a byte of a word, in bits 0 to 3, and its high ones, in bits 16 to 19. Other bits are not 0.
__device__ __forceinline__ unsigned pair_of_byte(unsigned word, int byte) {
  return __byte_perm(word, 0, 0x4440 + byte) * 0x1001u;
}
#endif
#if FLOATS
// The numbers of two codes, times a small power of two: e2m1 in bits 0 to 3 and 16 to 19, e4m3 in bits 8 to 15 and
// 24 to 31.
__device__ __forceinline__ __nv_bfloat162 small_pair(unsigned codes) {
#if BITS == 4
  return small_e2m1<0>(codes);
#else
  return small_e4m3(codes);
#endif
}
// A byte of a word, of its half `odd & 1`, in bits 8 to 15, and the next one, in bits 24 to 31.
__device__ __forceinline__ unsigned pair_of_half(unsigned word, int odd) {
  return __byte_perm(word, 0, odd & 1 ? 0x3424 : 0x1404);
}
#elif BITS < 16
// A byte of a word, of its half `odd & 1`, in bits 0 to 7, and the next one, in bits 16 to 23.
__device__ __forceinline__ unsigned pair_of_half(unsigned word, int odd) {
  return __byte_perm(word, 0, odd & 1 ? 0x4342 : 0x4140);
}
#if BITS == 4
// What two codes of `pair_of_byte` stand for, times 2^-64, by a word of `joined_scales`. Eight bits n alone, with no
// exponent, are n times 2^-133: bfloat16 has numbers that small, and computes with them.
__device__ __forceinline__ unsigned affine_pair(unsigned codes, unsigned scaling) {
  const unsigned n = codes & 0x00F0000Fu, bias = __byte_perm(scaling, scaling, 0x3232);
  const unsigned scale = __byte_perm(scaling, scaling, 0x1010) + 0x200u;  // times 16 for bits 0 to 3
  const __nv_bfloat162 both = __hfma2(*(const __nv_bfloat162*)&n, *(const __nv_bfloat162*)&scale, *(const __nv_bfloat162*)&bias);
  return *(const unsigned*)&both;
}
#else
// What two codes stand for, by a word of scale and bias.
__device__ __forceinline__ unsigned affine_pair(unsigned codes, unsigned scaling) {
  const float scale = __uint_as_float(scaling << 16), bias = __uint_as_float(scaling & 0xFFFF0000u);
  const float low = (float)(codes & 255), high = (float)(codes >> 16);
  const __nv_bfloat162 both = __floats2bfloat162_rn(fmaf(low, scale, bias), fmaf(high, scale, bias));
  return *(const unsigned*)&both;
}
#endif
#endif
#if INTERLEAVED && GROUP == 32
// Both scales of 64 columns, powers of two, as bfloat16.
__device__ __forceinline__ unsigned joined_scales(unsigned scales, unsigned) {
  const FloatScale low = float_scale(scales & 255), high = float_scale(scales >> 8);
  return __byte_perm(*(const unsigned*)&low, *(const unsigned*)&high, 0x5410);
}
__device__ __forceinline__ FloatScale scale_of(unsigned scales, int slice) {
  return halves(__byte_perm(scales, 0, slice < 2 ? 0x1010 : 0x3232));
}
#else
// The scales of 64 columns as lanes share them; of integers a scale and a bias, of those of 4 bits times 2^65 and 2^-64.
__device__ __forceinline__ unsigned joined_scales(unsigned scales, unsigned biases) {
  const unsigned both = scales | biases << 16;
#if BITS == 4 && !FLOATS
  const unsigned factors = 0x1F806000u;
  const __nv_bfloat162 scaled = __hmul2(*(const __nv_bfloat162*)&both, *(const __nv_bfloat162*)&factors);
  return *(const unsigned*)&scaled;
#else
  return both;
#endif
}
#if INTERLEAVED
__device__ __forceinline__ FloatScale scale_of(unsigned scales, int slice) { return slice_scale(scales, slice); }
#endif
#endif
