// Of kernels of products. OFFSETS: a row of W may have one, which is added to its products. FIRST: x has
// a row for TOP pairs of row and expert, y one for each pair. JOINED makes an element of y from the
// products with all matrices. X_ROW and Y_ROW are elements from one row to the next. FLOATS: codes are
// floats, e2m1 in 4 bits and e4m3 in 8, and so are scales: powers of two (e8m0), or e4m3 of groups of 16. With
// WIDE_SCALES they are float32 (1), or bfloat16 of groups of 16 (2).
#ifndef FLOATS
#define FLOATS 0
#endif
#ifndef WIDE_SCALES
#define WIDE_SCALES 0
#endif
// Whether the scales of 64 columns are two words, not one.
#define TWO_WORDS (FLOATS ? WIDE_SCALES == 2 : GROUP == 32)
#if WIDE_SCALES == 1
typedef float Scale;
#elif FLOATS && !WIDE_SCALES
typedef unsigned char Scale;
#else
typedef T Scale;
#endif
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
// An address in shared memory.
typedef unsigned Place;
__device__ __forceinline__ Place place_of(const void* shared) { return (Place)__cvta_generic_to_shared(shared); }
template <typename V>
__device__ __forceinline__ V shared_at(Place place) { return *(const V*)__cvta_shared_to_generic(place); }
__device__ __forceinline__ void copy_of_line(Place to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
// Keeps the compiler from computing a value again at each use.
__device__ __forceinline__ void keep(int& value) { asm("" : "+r"(value)); }
__device__ __forceinline__ void keep(Place& place) { asm("" : "+r"(place)); }
template <typename V>
__device__ __forceinline__ void keep(const V*& value) { asm("" : "+l"(value)); }
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Two 4-bit codes of a word, four apart, as bfloat16 numbers 128 + n.
__device__ __forceinline__ unsigned raised(unsigned word, int shift) {
  unsigned up;  // the compiler alone makes two operations of this one
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(up) : "r"(word >> shift), "n"(0x000F000F), "r"(0x43004300));
  return up;
}
// Eight numbers in their order, of pairs (j, j + 4).
__device__ __forceinline__ uint4 in_order(const unsigned* pair) {
  return make_uint4(__byte_perm(pair[0], pair[1], 0x5410), __byte_perm(pair[2], pair[3], 0x5410),
                    __byte_perm(pair[0], pair[1], 0x7632), __byte_perm(pair[2], pair[3], 0x7632));
}
// What the eight codes of a word stand for, in their order.
__device__ __forceinline__ uint4 numbers(unsigned word, __nv_bfloat162 scale, __nv_bfloat162 bias) {
  const __nv_bfloat162 base = __float2bfloat162_rn(128.f);
  unsigned pair[4];
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    const unsigned up = raised(word, 4 * j);
    const __nv_bfloat162 n = __hsub2(*(const __nv_bfloat162*)&up, base);
    const __nv_bfloat162 number = __hfma2(n, scale, bias);
    pair[j] = *(const unsigned*)&number;
  }
  return in_order(pair);
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
#if FLOATS
__device__ __forceinline__ __nv_bfloat162 halves(unsigned bits) { return *(const __nv_bfloat162*)&bits; }
// Two numbers of e4m3 in bits 8 to 15 and 24 to 31, times 2^-120: their exponents begin so much later than bfloat16's.
__device__ __forceinline__ __nv_bfloat162 small_e4m3(unsigned codes) {
  return halves((codes & 0x80008000u) | (codes >> 4 & 0x07F007F0u));
}
__device__ __forceinline__ __nv_bfloat162 of_e4m3(unsigned codes) {
  return __hmul2(small_e4m3(codes), halves(0x7B807B80u));
}
// Two numbers of e2m1, times 2^-126. Their codes are in bits 0 to 3 and 16 to 19, or 4 to 7 and 20 to 23 with HIGH.
// One copy of a code has its sign in place, another one the rest.
template <int HIGH>
__device__ __forceinline__ __nv_bfloat162 small_e2m1(unsigned codes) {
  return halves((codes & 0x000F000Fu << 4 * HIGH) * (0x1040u >> 4 * HIGH) & 0x81C081C0u);
}
#if WIDE_SCALES == 1
#define SUM_FACTOR 1.f
// Scales are words in memory; products with them are rounded once.
typedef float FloatScale;
__device__ __forceinline__ FloatScale float_scale(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned scaled(__nv_bfloat162 small, FloatScale scale) {
  const __nv_bfloat162 number = __hmul2(small, halves(0x7B807B80u));
  const unsigned bits = *(const unsigned*)&number;
  const float low = __uint_as_float(bits << 16), high = __uint_as_float(bits & 0xFFFF0000u);
  const __nv_bfloat162 both = __floats2bfloat162_rn(low * scale, high * scale);
  return *(const unsigned*)&both;
}
#else
// Scales make up for the small exponents of codes but for 2^-64, so that they are numbers of bfloat16; sums are
// multiplied by the rest. Scales are exact from 2^-53 to 2^65; with larger ones of e8m0, sums are no numbers.
#define SUM_FACTOR 0x1p64f
// The scale of a group, twice.
typedef __nv_bfloat162 FloatScale;
__device__ __forceinline__ FloatScale float_scale(unsigned code) {
#if WIDE_SCALES
  return __hmul2(halves(code * 0x10001u), halves(0x5E805E80u));
#elif GROUP == 16
  return __hmul2(of_e4m3(code * 0x1000100u), halves(0x5E805E80u));
#else
  constexpr unsigned BEFORE = BITS == 4 ? 62 : 56;
  return halves(min(code, 255 - BEFORE) * 0x800080u + BEFORE * 0x800080u);
#endif
}
#if WIDE_SCALES
__device__ __forceinline__ FloatScale float_scale(T scale) { return float_scale(bits_of(scale)); }
#endif
__device__ __forceinline__ unsigned scaled(__nv_bfloat162 small, FloatScale scale) {
  const __nv_bfloat162 both = __hmul2(small, scale);
  return *(const unsigned*)&both;
}
#endif
// The scale of the 16 columns from `slice` times 16 on, of the word that has it.
__device__ __forceinline__ FloatScale slice_scale(unsigned scales, int slice) {
#if WIDE_SCALES == 1
  return float_scale(scales);
#elif WIDE_SCALES
  return float_scale(scales >> slice % 2 * 16 & 0xFFFFu);
#else
  return float_scale(scales >> slice * 16 / GROUP * 8 & 255);
#endif
}
// All scales of 64 columns; of 32 where they are in bfloat16.
#if WIDE_SCALES || GROUP == 16
typedef unsigned Scales;
#else
typedef unsigned short Scales;
#endif
// What the eight e2m1 codes of a word stand for, in pairs (j, j + 4).
__device__ __forceinline__ uint4 float_pairs(unsigned word, FloatScale scale) {
  const unsigned rest = word >> 8;
  return make_uint4(scaled(small_e2m1<0>(word), scale), scaled(small_e2m1<1>(word), scale),
                    scaled(small_e2m1<0>(rest), scale), scaled(small_e2m1<1>(rest), scale));
}
// The same in their order.
__device__ __forceinline__ uint4 float_numbers(unsigned word, FloatScale scale) {
  const uint4 pairs = float_pairs(word, scale);
  const unsigned pair[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
  return in_order(pair);
}
__device__ __forceinline__ unsigned e4m3_pair(unsigned codes) {
  const __nv_bfloat162 both = of_e4m3(codes);
  return *(const unsigned*)&both;
}
// Eight numbers of e4m3, in their order.
__device__ __forceinline__ uint4 e4m3_numbers(uint2 codes) {
  return make_uint4(e4m3_pair(__byte_perm(codes.x, 0, 0x1404)), e4m3_pair(__byte_perm(codes.x, 0, 0x3424)),
                    e4m3_pair(__byte_perm(codes.y, 0, 0x1404)), e4m3_pair(__byte_perm(codes.y, 0, 0x3424)));
}
// What eight e4m3 codes stand for, in their order.
__device__ __forceinline__ uint4 float_numbers(uint2 codes, FloatScale scale) {
  return make_uint4(scaled(small_e4m3(__byte_perm(codes.x, 0, 0x1404)), scale),
                    scaled(small_e4m3(__byte_perm(codes.x, 0, 0x3424)), scale),
                    scaled(small_e4m3(__byte_perm(codes.y, 0, 0x1404)), scale),
                    scaled(small_e4m3(__byte_perm(codes.y, 0, 0x3424)), scale));
}
#else
#define SUM_FACTOR 1.f
#endif
// The quotients, 0 beside infinity, are right to two units of the last place: a whole division takes longer than
// all else here.
__device__ __forceinline__ float gated(float gate, float up) {
#if GELU
  const float y = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return __fdividef(gate, 1.f + __expf(-2.f * y)) * up;
#else
  return __fdividef(gate, 1.f + __expf(-gate)) * up;
#endif
}
