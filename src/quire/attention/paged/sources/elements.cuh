// Codes of single tokens, of 2 to 8 bits, from shared memory to operands of tensor cores.

// BYTES of a run of codes, by the widest loads that are aligned.
template <int BYTES>
__device__ __forceinline__ void read_run(const unsigned char* from, unsigned* to) {
  constexpr int EACH = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : BYTES % 2 == 0 ? 2 : 1;
  #pragma unroll
  for (int n = 0; n < BYTES / EACH; n++) {
    if (EACH == 16) {
      const uint4 x = ((const uint4*)from)[n];
      to[n * 4] = x.x; to[n * 4 + 1] = x.y; to[n * 4 + 2] = x.z; to[n * 4 + 3] = x.w;
    } else if (EACH == 8) {
      const uint2 x = ((const uint2*)from)[n];
      to[n * 2] = x.x; to[n * 2 + 1] = x.y;
    } else {
      const unsigned x = EACH == 4 ? ((const unsigned*)from)[n] : EACH == 2 ? ((const unsigned short*)from)[n] : from[n];
      const int at = n * EACH / 4, by = n * EACH % 4 * 8;
      to[at] = by ? to[at] | x << by : x;
    }
  }
}
// Number `at` of fields of so many bits.
template <int EACH_BITS>
__device__ __forceinline__ unsigned field(const unsigned* words, int at) {
  const int bit = at * EACH_BITS, word = bit / 32, by = bit % 32;
  unsigned x = words[word] >> by;
  if (by + EACH_BITS > 32) x |= words[word + 1] << (32 - by);
  return x & ((1u << EACH_BITS) - 1);
}
// Fields of a codebook's codes come EACH at a time; of 2 bits the even codes, then the odd ones.
template <int EACH_BITS, int EACH> __device__ __forceinline__ constexpr int code_at(int n) {
  return CODEBOOK && EACH_BITS == 2 ? n / (2 * EACH) * (2 * EACH) + n % EACH * 2 + n / EACH % 2 : n;
}
// Of a run, pair p is the codes first_code(p) and second_code(p), side by side.
template <int EACH_BITS> __device__ __forceinline__ constexpr int first_code(int p) {
  if (CODEBOOK) return code_at<EACH_BITS, 8>(p / 4 * 8 + p % 4 / 2 * 4 + p % 2);
  return EACH_BITS == 4 ? p / 4 * 8 + p % 4 : 2 * p;
}
template <int EACH_BITS> __device__ __forceinline__ constexpr int second_code(int p) {
  if (CODEBOOK) return code_at<EACH_BITS, 8>(p / 4 * 8 + p % 4 / 2 * 4 + p % 2 + 2);
  return EACH_BITS == 4 ? first_code<EACH_BITS>(p) + 4 : 2 * p + 1;
}
// Affine codes n as float16 numbers 1024 + n; of 4 bits, those of odd p count sixteen times.
template <int EACH_BITS>
__device__ __forceinline__ unsigned neighbours(const unsigned* run, int p) {
  if (EACH_BITS == 4) return raised16(run[p / 4] >> p % 4 / 2 * 8, p % 2 ? 0x00F000F0u : 0x000F000Fu);
  return field<EACH_BITS>(run, 2 * p) | field<EACH_BITS>(run, 2 * p + 1) << 16 | 0x64006400u;
}
// Code e of two tokens' runs, side by side; likewise.
template <int EACH_BITS>
__device__ __forceinline__ unsigned across(const unsigned* a, const unsigned* b, int e) {
  if (EACH_BITS == 4) {
    const unsigned both = __byte_perm(a[e / 8], b[e / 8], e % 8 < 4 ? 0x5410 : 0x7632);
    return raised16(both >> e % 4 / 2 * 8, e % 2 ? 0x00F000F0u : 0x000F000Fu);
  }
  return field<EACH_BITS>(a, e) | field<EACH_BITS>(b, e) << 16 | 0x64006400u;
}
__device__ __forceinline__ unsigned minus16(unsigned x, unsigned y) {
  unsigned to;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(to) : "r"(x), "r"(y));
  return to;
}
__device__ __forceinline__ unsigned fused16(unsigned x, unsigned y, unsigned z) {
  unsigned to;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(to) : "r"(x), "r"(y), "r"(z));
  return to;
}
// What two codes n, or 16 * n, stand for: 1024 + n less 1024 is exactly n.
__device__ __forceinline__ unsigned affine16(unsigned codes, bool sixteen, unsigned scales, unsigned biases) {
  const unsigned n = sixteen ? fused16(codes, 0x2C002C00u, 0xD400D400u) : minus16(codes, 0x64006400u);
  return fused16(n, scales, biases);
}
__device__ __forceinline__ unsigned side_by_side(const __half* low, const __half* high) {
  return *(const unsigned short*)low | (unsigned)*(const unsigned short*)high << 16;
}
