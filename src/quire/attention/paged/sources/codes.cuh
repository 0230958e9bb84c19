// Codes as operands. A lane's eight neighbours are one word of 4-bit codes, or two of 8-bit codes.
struct Words { unsigned x, y; };

template <int BITS>
__device__ __forceinline__ Words read_words(const unsigned* from) {
  if (BITS == 4) return {*from, 0};
  const uint2 both = *(const uint2*)from;
  return {both.x, both.y};
}

__device__ __forceinline__ float2 halves(unsigned two) {
  return __half22float2(*(const __half2*)&two);
}
__device__ __forceinline__ unsigned times(unsigned pair, float2 by) {
#if BF16
  const float2 x = __bfloat1622float2(*(const __nv_bfloat162*)&pair);
#else
  const float2 x = __half22float2(*(const __half2*)&pair);
#endif
  return pack(x.x * by.x, x.y * by.y);
}
__device__ __forceinline__ unsigned sixteenfold(unsigned pair) {
  return times(pair, make_float2(16.f, 16.f));
}
// Pair i of a lane's eight codes as 128 + n: numbers first_of(i) and second_of(i). Of 8 bits, the
// half of each that begins at bit `from`.
template <int BITS>
__device__ __forceinline__ unsigned codes_of(Words words, int i, int from) {
  const unsigned word = BITS == 8 && i >= 2 ? words.y : words.x;
  const int shift = BITS == 4 ? 4 * i : 8 * (i & 1) + from;
  return ((word >> shift) & 0x000F000Fu) | 0x43004300u;
}
template <int BITS> __device__ __forceinline__ constexpr int first_of(int i) {
  return BITS == 4 ? i : 4 * (i / 2) + i % 2;
}
template <int BITS> __device__ __forceinline__ constexpr int second_of(int i) {
  return BITS == 4 ? i + 4 : 4 * (i / 2) + i % 2 + 2;
}
