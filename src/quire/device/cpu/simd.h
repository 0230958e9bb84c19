// One vector of floats for the instruction set that the including file is compiled for.
//
// Kernels are written once against these names and compiled once for each instruction set, inside a
// namespace of its own. `W` is the number of floats in a vector. Every operation is spelled out, so
// that a sum is rounded alike wherever it is computed: no contraction is left to the compiler.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#if defined(__AVX512BF16__)
#define QUIRE_ISA amx
#elif defined(__AVX512VNNI__)
#define QUIRE_ISA vnni
#else
#define QUIRE_ISA avx512
#endif
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#if defined(__AVXVNNI__)
#define QUIRE_ISA avxvnni
#else
#define QUIRE_ISA avx2
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define QUIRE_ISA i8mm
#elif defined(__ARM_FEATURE_DOTPROD)
#define QUIRE_ISA dotprod
#else
#define QUIRE_ISA neon
#endif
#else
#define QUIRE_ISA scalar
#endif

// A loop over the sums of a register tile, outside the loop that adds them up. GCC unrolls such loops too late,
// and sums whose index it does not know are stored in each round of the inner loop.
#if defined(__clang__)
#define QUIRE_UNROLLED _Pragma("unroll")
#else
#define QUIRE_UNROLLED _Pragma("GCC unroll 16")
#endif

#define QUIRE_INLINED __attribute__((always_inline))
#define QUIRE_INLINE inline QUIRE_INLINED

namespace quire::QUIRE_ISA {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

constexpr int W = 16;
constexpr int kTileRows = 4, kTileCols = 6;  // of a product's register tile: 24 sums of 32 registers
constexpr int kFewRows = 8;                  // rows beside which codes are decoded in registers
constexpr int kRowsInTurns = 17;             // rows that may do so in turns: a token and 16 drafts
using F = __m512;
using I = __m512i;

inline F zero() { return _mm512_setzero_ps(); }
inline F set(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps((1u << n) - 1u, p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline void store_first(float* p, F x, int n) { _mm512_mask_storeu_ps(p, (1u << n) - 1u, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F pow2i(F n) {  // 2 to an integral power
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline F permute(F table, I lanes) { return _mm512_permutexvar_ps(lanes, table); }
inline float sum(F x) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
// Four vectors' sums at once, each added in the order of `sum`: a third of the instructions.
inline void sum_four(const F* x, float* sums) {
    const auto halves = [](F a, F b) {
        return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const F low = halves(x[0], x[1]), high = halves(x[2], x[3]);
    F y = add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
    y = add(y, _mm512_shuffle_ps(y, y, 0xee));
    y = add(y, _mm512_shuffle_ps(y, y, 0x55));
    const I firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, y)));
}
inline float largest(F x) { return _mm512_reduce_max_ps(x); }

inline I load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline I load_first_ints(const void* p, int n) { return _mm512_maskz_loadu_epi32((1u << n) - 1u, p); }
inline I gather_ints(const uint8_t* p, int bytes_apart) {
    const I lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_i32gather_epi32(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(bytes_apart)), p, 1);
}
inline I set_ints(int x) { return _mm512_set1_epi32(x); }
inline I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
inline I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
template <int n> inline I shift_right(I x) { return _mm512_srli_epi32(x, n); }
template <int n> inline I shift_left(I x) { return _mm512_slli_epi32(x, n); }
inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline I to_ints(F x) { return _mm512_cvtps_epi32(x); }  // rounded
inline I as_ints(F x) { return _mm512_castps_si512(x); }
inline I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
inline I add_ints(I a, I b) { return _mm512_add_epi32(a, b); }
inline I max_ints(I a, I b) { return _mm512_max_epi32(a, b); }
inline int sum_ints(I x) { return _mm512_reduce_add_epi32(x); }
inline int largest_int(I x) { return _mm512_reduce_max_epi32(x); }
inline void store_ints(void* p, I x) { _mm512_storeu_si512(p, x); }
inline I permute_bytes(I table, I places) { return _mm512_shuffle_epi8(table, places); }
inline F as_float(I x) { return _mm512_castsi512_ps(x); }
inline I widen_bytes(const uint8_t* p, int n) {
    return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8((1u << n) - 1u, p));
}
inline F load_bf16(const uint16_t* p) {
    return as_float(shift_left<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))));
}
inline F load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
// Table entries 0 to 15 by the low four bits of each lane; higher bits are not looked at.
struct Table16 {
    F low;
    explicit Table16(const float* entries) : low(load(entries)) {}
    F operator()(I lanes) const { return permute(low, lanes); }
};

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int W = 8;
constexpr int kTileRows = 3, kTileCols = 4;
constexpr int kFewRows = 4;
constexpr int kRowsInTurns = kFewRows;
using F = __m256;
using I = __m256i;

inline I first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline F zero() { return _mm256_setzero_ps(); }
inline F set(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline F load_first(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline void store_first(float* p, F x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F pow2i(F n) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F permute(F table, I lanes) { return _mm256_permutevar8x32_ps(table, lanes); }
inline float sum(F x) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
// Four vectors' sums at once, each added in the order of `sum`: half of the instructions.
inline void sum_four(const F* x, float* sums) {
    const auto halves = [](F a, F b) { return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)); };
    const F low = halves(x[0], x[1]), high = halves(x[2], x[3]);
    F y = add(_mm256_shuffle_ps(low, high, 0x44), _mm256_shuffle_ps(low, high, 0xee));
    y = add(y, _mm256_shuffle_ps(y, y, 0xb1));
    _mm_storeu_ps(sums, _mm256_castps256_ps128(permute(y, _mm256_setr_epi32(0, 4, 2, 6, 0, 0, 0, 0))));
}
inline float largest(F x) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}

inline I load_ints(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline I load_first_ints(const void* p, int n) {
    return _mm256_maskload_epi32((const int*)p, first_lanes(n));
}
inline I gather_ints(const uint8_t* p, int bytes_apart) {
    const I lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_i32gather_epi32(
        (const int*)p, _mm256_mullo_epi32(lanes, _mm256_set1_epi32(bytes_apart)), 1);
}
inline I set_ints(int x) { return _mm256_set1_epi32(x); }
inline I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
inline I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
template <int n> inline I shift_right(I x) { return _mm256_srli_epi32(x, n); }
template <int n> inline I shift_left(I x) { return _mm256_slli_epi32(x, n); }
inline F to_float(I x) { return _mm256_cvtepi32_ps(x); }
inline I to_ints(F x) { return _mm256_cvtps_epi32(x); }  // rounded
inline I as_ints(F x) { return _mm256_castps_si256(x); }
inline I bit_xor(I a, I b) { return _mm256_xor_si256(a, b); }
inline I add_ints(I a, I b) { return _mm256_add_epi32(a, b); }
inline I max_ints(I a, I b) { return _mm256_max_epi32(a, b); }
inline int sum_ints(I x) {
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
inline int largest_int(I x) {
    __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
inline void store_ints(void* p, I x) { _mm256_storeu_si256((__m256i*)p, x); }
inline I permute_bytes(I table, I places) { return _mm256_shuffle_epi8(table, places); }
inline F as_float(I x) { return _mm256_castsi256_ps(x); }
inline I widen_bytes(const uint8_t* p, int n) {
    uint8_t bytes[8] = {0};
    std::memcpy(bytes, p, n);
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes));
}
inline F load_bf16(const uint16_t* p) {
    return as_float(shift_left<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p))));
}
inline F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
struct Table16 {
    F low, high;
    explicit Table16(const float* entries) : low(load(entries)), high(load(entries + 8)) {}
    F operator()(I lanes) const {
        const F upper = as_float(_mm256_slli_epi32(lanes, 28));  // bit 3 to the sign
        return _mm256_blendv_ps(permute(low, lanes), permute(high, lanes), upper);
    }
};

#else  // NEON, or nothing: GCC's and Clang's vectors of four

constexpr int W = 4;
constexpr int kTileRows = 4, kTileCols = 4;
constexpr int kFewRows = 4;
constexpr int kRowsInTurns = kFewRows;
typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));

inline F zero() { return F{0, 0, 0, 0}; }
inline F set(float x) { return F{x, x, x, x}; }
inline F load(const float* p) { F x; std::memcpy(&x, p, sizeof x); return x; }
inline F load_first(const float* p, int n) { F x = zero(); std::memcpy(&x, p, n * 4); return x; }
inline void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
inline void store_first(float* p, F x, int n) { std::memcpy(p, &x, n * 4); }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F max(F a, F b) { return a > b ? a : b; }
inline F min(F a, F b) { return a < b ? a : b; }
#if defined(__aarch64__)
inline F fma(F a, F b, F c) {
    return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
inline F round(F x) { return (F)vrndnq_f32((float32x4_t)x); }
#else
inline F fma(F a, F b, F c) {
    for (int i = 0; i < 4; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
}
inline F round(F x) {
    for (int i = 0; i < 4; i++) x[i] = std::nearbyint(x[i]);
    return x;
}
#endif
inline F pow2i(F n) { return (F)((__builtin_convertvector(n, I) + 127) << 23); }
inline float sum(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float largest(F x) { return std::fmax(std::fmax(x[0], x[2]), std::fmax(x[1], x[3])); }

inline I load_ints(const void* p) { I x; std::memcpy(&x, p, sizeof x); return x; }
inline I load_first_ints(const void* p, int n) {
    I x = {0, 0, 0, 0};
    std::memcpy(&x, p, n * 4);
    return x;
}
inline I gather_ints(const uint8_t* p, int bytes_apart) {
    I x;
    for (int i = 0; i < 4; i++) {
        int32_t word;
        std::memcpy(&word, p + i * bytes_apart, 4);
        x[i] = word;
    }
    return x;
}
inline I set_ints(int x) { return I{x, x, x, x}; }
inline I bit_and(I a, I b) { return a & b; }
inline I bit_or(I a, I b) { return a | b; }
template <int n> inline I shift_right(I x) { return (I)((U)x >> n); }
template <int n> inline I shift_left(I x) { return x << n; }
inline F to_float(I x) { return __builtin_convertvector(x, F); }
inline I to_ints(F x) { return __builtin_convertvector(round(x), I); }
inline I as_ints(F x) { return (I)x; }
inline I bit_xor(I a, I b) { return a ^ b; }
inline I add_ints(I a, I b) { return a + b; }
inline I max_ints(I a, I b) { return a > b ? a : b; }
inline int sum_ints(I x) { return x[0] + x[1] + x[2] + x[3]; }
inline int largest_int(I x) { return std::max(std::max(x[0], x[1]), std::max(x[2], x[3])); }
inline void store_ints(void* p, I x) { std::memcpy(p, &x, sizeof x); }
// Bytes of a table of 16 by places below 16.
inline I permute_bytes(I table, I places) {
    typedef uint8_t B __attribute__((vector_size(16)));
#if defined(__aarch64__)
    return (I)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)places);
#else
    B from = (B)table, at = (B)places, to;
    for (int i = 0; i < 16; i++) to[i] = from[at[i]];
    return (I)to;
#endif
}
inline F as_float(I x) { return (F)x; }
inline I widen_bytes(const uint8_t* p, int n) {
    I x = {0, 0, 0, 0};
    for (int i = 0; i < n; i++) x[i] = p[i];
    return x;
}
inline F permute(F table, I lanes) {
    return F{table[lanes[0] & 3], table[lanes[1] & 3], table[lanes[2] & 3], table[lanes[3] & 3]};
}
inline F load_bf16(const uint16_t* p) {
    I x;
    for (int i = 0; i < 4; i++) x[i] = (int32_t)p[i] << 16;
    return (F)x;
}
inline F load_f16(const uint16_t* p) {
    F x;
    for (int i = 0; i < 4; i++) {
        // Exponent and fraction moved into a float's places, then rescaled: exact, subnormals too.
        const uint32_t bits = (uint32_t)(p[i] & 0x7fff) << 13 | (uint32_t)(p[i] & 0x8000) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        x[i] = value * 0x1p112f;
    }
    return x;
}
struct Table16 {
    float entries[16];
    explicit Table16(const float* from) { std::memcpy(entries, from, sizeof entries); }
    F operator()(I lanes) const {
        return F{entries[lanes[0] & 15], entries[lanes[1] & 15], entries[lanes[2] & 15],
                 entries[lanes[3] & 15]};
    }
};

#endif

// Fetch the cache line at `p` into the first cache or the second. GCC takes a function that only fetches for one without
// effect and drops its calls, unless it is inlined before.
QUIRE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
QUIRE_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

// The sums of `count` vectors.
template <int count> inline void sum_each(const F* x, float* sums) {
    int i = 0;
#if defined(__AVX2__)
    QUIRE_UNROLLED for (; i + 4 <= count; i += 4) sum_four(x + i, sums + i);
#endif
    QUIRE_UNROLLED for (; i < count; i++) sums[i] = sum(x[i]);
}

// Eight codes of `bits` bits, the lowest first, to a byte each.
template <int bits> inline uint64_t spread_to_bytes(uint64_t codes) {
#if defined(__BMI2__)
    constexpr uint64_t mask = ((1u << bits) - 1) * 0x0101010101010101u;
    return _pdep_u64(codes, mask);
#else
    uint64_t bytes = 0;
    for (int i = 0; i < 8; i++) bytes |= (codes >> (bits * i) & ((1u << bits) - 1)) << (8 * i);
    return bytes;
#endif
}

constexpr float kLog2E = 1.44269504088896341f;

// 2 to the power of x, to about one unit in the last place, for x of at most 126; below -126 it is 0.
inline F exp2(F x) {
    x = max(x, set(-127.0f));
    const F whole = round(x);
    const F part = sub(x, whole);  // in [-0.5, 0.5]
    // Minimax polynomial of 2^part of degree six (relative error 2e-8).
    F y = set(1.535336188319500e-4f);
    y = fma(y, part, set(1.339887440266574e-3f));
    y = fma(y, part, set(9.618437357674640e-3f));
    y = fma(y, part, set(5.550332471162809e-2f));
    y = fma(y, part, set(2.402264791363012e-1f));
    y = fma(y, part, set(6.931472028550421e-1f));
    y = fma(y, part, set(1.0f));
    return mul(y, pow2i(whole));
}

}  // namespace quire::QUIRE_ISA
