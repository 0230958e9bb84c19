// Codes as operands of tensor cores, in float16: a code n is 1024 + n there, exactly.

// Adds a product of 16 codes' rows [16, 16] and 8 columns of numbers [16, 8].
__device__ __forceinline__ void product16(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                          unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ unsigned pack16(float low, float high) {
  unsigned to;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(to) : "f"(high), "f"(low));
  return to;
}
__device__ __forceinline__ unsigned times16(unsigned x, unsigned y) {
  unsigned to;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(to) : "r"(x), "r"(y));
  return to;
}
__device__ __forceinline__ float2 halves(unsigned two) {
  return __half22float2(*(const __half2*)&two);
}
// The codes of 4 bits that `mask` keeps of each half, or sixteen times them, as float16 numbers.
__device__ __forceinline__ unsigned raised16(unsigned bits, unsigned mask) {
  unsigned up;  // the compiler alone makes two operations of this one
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(up) : "r"(bits), "r"(mask), "r"(0x64006400u));
  return up;
}
// Eight neighbouring codes, the lowest bits first: one word of 4 bits each, two of 8.
struct Words { unsigned x, y; };

// Codes i of two runs of eight, side by side. Of 4 bits, those of odd i count sixteen times.
template <int BITS>
__device__ __forceinline__ void pairs(Words a, Words b, unsigned* to) {
  if (BITS == 4) {
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const unsigned both = __byte_perm(a.x, b.x, half ? 0x7632 : 0x5410);
      to[4 * half] = raised16(both, 0x000F000Fu);
      to[4 * half + 1] = raised16(both, 0x00F000F0u);
      to[4 * half + 2] = raised16(both >> 8, 0x000F000Fu);
      to[4 * half + 3] = raised16(both >> 8, 0x00F000F0u);
    }
  } else if (BITS == 8) {
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const unsigned u = half ? a.y : a.x, v = half ? b.y : b.x;
      const unsigned low = __byte_perm(u, v, 0x5140), high = __byte_perm(u, v, 0x7362);
      to[4 * half] = __byte_perm(low, 0x64646464u, 0x4140);
      to[4 * half + 1] = __byte_perm(low, 0x64646464u, 0x4342);
      to[4 * half + 2] = __byte_perm(high, 0x64646464u, 0x4140);
      to[4 * half + 3] = __byte_perm(high, 0x64646464u, 0x4342);
    }
  } else {
    constexpr int EACH = 16 / BITS;  // whole codes in 16 bits
    constexpr unsigned MASK = ((1u << BITS) - 1) * 0x00010001u;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
      const int bit = i / EACH * EACH * BITS;
      const unsigned u = (unsigned)(((unsigned long long)a.y << 32 | a.x) >> bit);
      const unsigned v = (unsigned)(((unsigned long long)b.y << 32 | b.x) >> bit);
      to[i] = (__byte_perm(u, v, 0x5410) >> i % EACH * BITS & MASK) | 0x64006400u;
    }
  }
}
// A tile of a product has the codes first_of(t) of eight runs, and the second ones after them.
__device__ __forceinline__ constexpr int first_of(int t) { return 4 * (t & 1) + (t >> 1); }
__device__ __forceinline__ constexpr int second_of(int t) { return first_of(t) + 2; }
template <int BITS> __device__ __forceinline__ constexpr float weight_of(int t) {
  return BITS == 4 && t >= 2 ? 0.0625f : 1.f;
}
// Bytes of a row of codes that are copied at a time.
template <int ROW> __device__ __forceinline__ constexpr int chunk_of() { return ROW % 16 ? 8 : 16; }
// Where a chunk of a row stands in shared memory, so that the lanes of a load, which read four
// neighbouring rows, meet in no bank. Only rows of 4 and 8 bits are as long as those that are turned.
template <int ROW>
__device__ __forceinline__ int place_of_chunk(int row, int chunk) {
  const int turn = row & 3;
  return row * ROW + (chunk ^ (ROW == 64 ? turn >> 1 << 1 : ROW == 128 ? turn << 1 : 0)) * chunk_of<ROW>();
}
template <int ROW>
__device__ __forceinline__ void copy_chunk(unsigned char* codes, int row, int chunk, const unsigned char* from) {
  if (chunk_of<ROW>() == 16) copy_ahead(codes + place_of_chunk<ROW>(row, chunk), from);
  else copy_few_ahead(codes + place_of_chunk<ROW>(row, chunk), from, 8);
}
template <int ROW, int BITS>
__device__ __forceinline__ Words words_at(const unsigned char* codes, int row, int run) {
  if (BITS == 4 || BITS == 8) {
    const unsigned char* from = codes + place_of_chunk<ROW>(row, run * BITS / 16) + run * BITS % 16;
    if (BITS == 4) return {*(const unsigned*)from, 0};
    const uint2 both = *(const uint2*)from;
    return {both.x, both.y};
  }
  // A run begins at any byte, and lies in two words, of which the second may be behind the row's end.
  const unsigned* from = (const unsigned*)(codes + row * ROW) + run * BITS / 4;
  const unsigned long long both = BITS == 2 ? from[0] : (unsigned long long)from[1] << 32 | from[0];
  const unsigned long long own = both >> run * BITS % 4 * 8;
  return {(unsigned)own, (unsigned)(own >> 32)};
}
// Where eight scales of values stand in shared memory, so that lanes that read those of every eighth token
// meet in no bank. A token has GROUPS of them.
template <int GROUPS>
__device__ __forceinline__ int place_of_eight(int eight) { return eight ^ (eight >> 3 & (GROUPS - 1)); }
