// Sixteen lanes, one for each column of a tile, in as many vectors as the instruction set needs.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

constexpr int kTile = 16;
constexpr int kVectors = kTile / W;

struct FloatLanes {
    F part[kVectors];
};
struct IntLanes {
    I part[kVectors];
};

// Calls `use` with the number of each vector; what it returns are the lanes.
template <class Lanes, class Use> QUIRE_INLINE Lanes by_part(const Use& use) {
    Lanes lanes;
    QUIRE_UNROLLED for (int i = 0; i < kVectors; i++) lanes.part[i] = use(i);
    return lanes;
}

QUIRE_INLINE FloatLanes load_floats(const float* p) {
    return by_part<FloatLanes>([=](int i) { return load(p + i * W); });
}
QUIRE_INLINE void store_floats(float* p, const FloatLanes& x) {
    QUIRE_UNROLLED for (int i = 0; i < kVectors; i++) store(p + i * W, x.part[i]);
}
QUIRE_INLINE FloatLanes all(float x) {
    return by_part<FloatLanes>([x = set(x)](int) { return x; });
}
QUIRE_INLINE FloatLanes mul(const FloatLanes& a, const FloatLanes& b) {
    return by_part<FloatLanes>([&](int i) { return mul(a.part[i], b.part[i]); });
}
QUIRE_INLINE FloatLanes add(const FloatLanes& a, const FloatLanes& b) {
    return by_part<FloatLanes>([&](int i) { return add(a.part[i], b.part[i]); });
}
QUIRE_INLINE FloatLanes fma(const FloatLanes& a, const FloatLanes& b, const FloatLanes& c) {
    return by_part<FloatLanes>([&](int i) { return fma(a.part[i], b.part[i], c.part[i]); });
}

QUIRE_INLINE IntLanes load_lanes(const void* p) {
    return by_part<IntLanes>([=](int i) { return load_ints((const uint8_t*)p + i * W * 4); });
}
QUIRE_INLINE void store_lanes(void* p, const IntLanes& x) {
    QUIRE_UNROLLED for (int i = 0; i < kVectors; i++) store_ints((uint8_t*)p + i * W * 4, x.part[i]);
}
QUIRE_INLINE IntLanes all_ints(int x) {
    return by_part<IntLanes>([x = set_ints(x)](int) { return x; });
}
QUIRE_INLINE IntLanes add(const IntLanes& a, const IntLanes& b) {
    return by_part<IntLanes>([&](int i) { return add_ints(a.part[i], b.part[i]); });
}
QUIRE_INLINE IntLanes bit_and(const IntLanes& a, const IntLanes& b) {
    return by_part<IntLanes>([&](int i) { return bit_and(a.part[i], b.part[i]); });
}
template <int n> QUIRE_INLINE IntLanes shift_left(const IntLanes& x) {
    return by_part<IntLanes>([&](int i) { return shift_left<n>(x.part[i]); });
}
template <int n> QUIRE_INLINE IntLanes shift_right(const IntLanes& x) {
    return by_part<IntLanes>([&](int i) { return shift_right<n>(x.part[i]); });
}
QUIRE_INLINE IntLanes to_ints(const FloatLanes& x) {
    return by_part<IntLanes>([&](int i) { return to_ints(x.part[i]); });
}
QUIRE_INLINE FloatLanes to_floats(const IntLanes& x) {
    return by_part<FloatLanes>([&](int i) { return to_float(x.part[i]); });
}

// Shifts each word of 16 bits to the right.
template <int n> QUIRE_INLINE I shift_words(I x) {
#if defined(__AVX512F__)
    return _mm512_srli_epi16(x, n);
#elif defined(__AVX2__)
    return _mm256_srli_epi16(x, n);
#else
    return bit_and(shift_right<n>(x), set_ints((0xffff >> n) * 0x00010001));
#endif
}
template <int n> QUIRE_INLINE IntLanes shift_words(const IntLanes& x) {
    return by_part<IntLanes>([&](int i) { return shift_words<n>(x.part[i]); });
}

// Sixteen numbers of `type` from number `at` on.
QUIRE_INLINE FloatLanes load_numbers(Storage type, const void* from, int64_t at) {
    if (type == Storage::float32) return load_floats((const float*)from + at);
    const uint16_t* p = (const uint16_t*)from + at;
    if (type == Storage::bfloat16) return by_part<FloatLanes>([=](int i) { return load_bf16(p + i * W); });
    return by_part<FloatLanes>([=](int i) { return load_f16(p + i * W); });
}
// As many as there are, and zeros.
inline FloatLanes load_numbers(Storage type, const void* from, int64_t at, int count) {
    if (count == kTile) return load_numbers(type, from, at);
    float some[kTile] = {0};
    const int bytes = type == Storage::float32 ? 4 : 2;
    std::memcpy(some, (const char*)from + at * bytes, count * bytes);
    return load_numbers(type, some, 0);
}

QUIRE_INLINE IntLanes load_bytes(const uint8_t* p, int count) {
    uint8_t some[kTile] = {0};
    std::memcpy(some, p, count);
    return by_part<IntLanes>([&](int i) { return widen_bytes(some + i * W, W); });
}

// The lowest byte of each lane; byte i is that of lane `order[i]`.
inline void store_lowest_bytes(uint8_t* to, const IntLanes& x, const uint8_t* order) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm512_cvtepi32_epi8(x.part[0]);
    _mm_storeu_si128((__m128i*)to, _mm_shuffle_epi8(bytes, _mm_loadu_si128((const __m128i*)order)));
#elif defined(__AVX2__)
    const __m256i low = _mm256_set1_epi32(255);
    const __m256i words =
        _mm256_packus_epi32(_mm256_and_si256(x.part[0], low), _mm256_and_si256(x.part[1], low));
    const __m256i in_order = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i bytes =
        _mm_packus_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1));
    _mm_storeu_si128((__m128i*)to, _mm_shuffle_epi8(bytes, _mm_loadu_si128((const __m128i*)order)));
#else
    for (int i = 0; i < kTile; i++) to[i] = (uint8_t)x.part[order[i] / W][order[i] % W];
#endif
}

// The lower 16 bits of each lane; word i is that of lane `order[i]`, the same in either eight.
inline void store_lowest_words(uint8_t* to, const IntLanes& x, const uint8_t* order) {
#if defined(__AVX2__)
    const __m128i firsts = _mm_add_epi8(_mm_loadl_epi64((const __m128i*)order), _mm_loadl_epi64((const __m128i*)order));
    const __m128i bytes = _mm_unpacklo_epi8(firsts, _mm_add_epi8(firsts, _mm_set1_epi8(1)));
#if defined(__AVX512F__)
    const __m256i words = _mm512_cvtepi32_epi16(x.part[0]);
#else
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.part[0], x.part[1]), 0xd8);
#endif
    _mm256_storeu_si256((__m256i*)to, _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(bytes)));
#else
    for (int i = 0; i < kTile; i++) {
        const int16_t word = (int16_t)x.part[order[i] / W][order[i] % W];
        std::memcpy(to + 2 * i, &word, 2);
    }
#endif
}

// A square of W x W words.
inline void transpose_square(I* x) {
#if defined(__AVX512F__)
    I y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
        x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
    }
#elif defined(__AVX2__)
    I y[8];
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        x[i] = _mm256_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm256_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm256_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm256_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        y[i] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x20);
        y[i + 4] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x31);
    }
    std::copy(y, y + 8, x);
#else
    for (int i = 0; i < W; i++)
        for (int j = 0; j < i; j++) {
            const int32_t word = x[i][j];
            x[i][j] = x[j][i];
            x[j][i] = word;
        }
#endif
}

inline void transpose(IntLanes* x) {  // 16 x 16 words
    for (int i = 0; i < kVectors; i++) {
        for (int j = i; j < kVectors; j++) {
            I upper[W], lower[W];
            for (int k = 0; k < W; k++) {
                upper[k] = x[i * W + k].part[j];
                lower[k] = x[j * W + k].part[i];
            }
            transpose_square(upper);
            if (i != j) transpose_square(lower);
            for (int k = 0; k < W; k++) {
                if (i != j) x[i * W + k].part[j] = lower[k];
                x[j * W + k].part[i] = upper[k];
            }
        }
    }
}

inline const float* row_of(const Source& x, int64_t row) {
    return x.values + (x.places ? x.places[row] : row) * x.stride;
}

// Columns [column, column + width), 16 at most, of one row of a product.
inline void write_row(const Weight& w, const Rows& rows, const FloatLanes& sums, int64_t row, int64_t column,
                      int64_t width) {
    float* to = rows.out + (rows.places ? rows.places[row] : row) * rows.stride + column;
    const FloatLanes y = w.offsets ? add(sums, load_numbers(Storage::float32, w.offsets, column, (int)width))
                               : add(sums, all(0.0f));
    if (width == kTile) return store_floats(to, y);
    float some[kTile];
    store_floats(some, y);
    std::memcpy(to, some, width * 4);
}

inline float* aligned(float* p) { return (float*)(((uintptr_t)p + 63) / 64 * 64); }

}  // namespace quire::QUIRE_ISA
