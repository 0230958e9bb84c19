// Levels of a codebook from codes of 2 to 4 bits. A code stands in the highest bits of a field of 4; what is
// below it does not matter. Levels are whole numbers up to 127, and those of fields c and 15 - c differ in sign:
// so do the highest bits of their Gray codes, and nothing else. The other three are a place in a table.
struct Levels { unsigned low, high; };  // eight bytes

template <int EACH_BITS>
__device__ __forceinline__ Levels levels_of(const float* levels) {
  unsigned words[2] = {};
  #pragma unroll
  for (int n = 0; n < 8; n++)
    words[n / 4] |= (unsigned)levels[(15 - (n ^ n >> 1 ^ n >> 2)) >> (4 - EACH_BITS)] << n % 4 * 8;
  return {words[0], words[1]};
}
// The next three are one instruction each; in C++ the compiler makes them several.
// Each field's place in the table.
__device__ __forceinline__ unsigned places_of(unsigned codes) {
  unsigned to;
  asm("lop3.b32 %0, %1, %2, 0x77777777, 0x28;" : "=r"(to) : "r"(codes), "r"(codes >> 1));
  return to;
}
// What stands in a table of eight bytes at the lower four of `places`.
__device__ __forceinline__ unsigned bytes_at(unsigned low, unsigned high, unsigned places) {
  unsigned to;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(to) : "r"(low), "r"(high), "r"(places));
  return to;
}
// The bits of x that are in `mask`, and those of y that are not.
__device__ __forceinline__ unsigned chosen(unsigned x, unsigned y, unsigned mask) {
  unsigned to;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(to) : "r"(x), "r"(y), "r"(mask));
  return to;
}
// Eight codes of a run as fields, see `code_at`.
template <int EACH_BITS>
__device__ __forceinline__ unsigned fields(const unsigned* run, int n) {
  if (EACH_BITS == 4) return run[n];
  if (EACH_BITS == 2) return n % 2 ? run[n / 2] : run[n / 2] << 2;
  const int word = n * 24 / 32, by = n * 24 % 32;
  unsigned x = by ? run[word] >> (by - 1) : run[word] << 1;
  if (by + 24 > 32) x |= run[word + 1] << (33 - by);
  x = chosen(x, x << 4, 0x0000FFFFu);
  x = chosen(x, x << 2, 0x00FF00FFu);
  return chosen(x, x << 1, 0x0F0F0F0Fu);
}
// Four codes of each of two tokens' runs as fields: two of the first, two of the second, and again.
template <int EACH_BITS>
__device__ __forceinline__ unsigned fields_across(const unsigned* a, const unsigned* b, int n) {
  if (EACH_BITS == 2) {
    const unsigned x = __byte_perm(a[n / 4], b[n / 4], n / 2 % 2 ? 0x7362 : 0x5140);
    return n % 2 ? x : x << 2;
  }
  return __byte_perm(fields<EACH_BITS>(a, n / 2), fields<EACH_BITS>(b, n / 2), n % 2 ? 0x7362 : 0x5140);
}
// The levels of fields 0 and 2, 1 and 3, 4 and 6, 5 and 7 side by side: float16, times 2^-24, of which a
// whole number's bits are those of a byte.
__device__ __forceinline__ void level_pairs(unsigned codes, Levels of, unsigned* to) {
  const unsigned places = places_of(codes);
  const unsigned low = bytes_at(of.low, of.high, places), high = bytes_at(of.low, of.high, places >> 16);
  const unsigned even = ~(codes << 4) & 0x80808080u, odd = ~codes & 0x80808080u;  // signs
  to[0] = __byte_perm(low, even, 0x5240);
  to[1] = __byte_perm(low, odd, 0x5341);
  to[2] = __byte_perm(high, even, 0x7260);
  to[3] = __byte_perm(high, odd, 0x7361);
}
