// Codes in tiles as units: see integers.h. Included by what is compiled for AVX-512 with VNNI.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "tiles.h"

namespace {

using quire::tiles::kTile;

constexpr int kUnit = 64;         // bytes: four codes of each of 16 columns
constexpr int64_t kAhead = 4096;  // bytes that are fetched before they are read

// The first words of a tile of codes, 16 at most. Fetches what follows into the cache.
inline void load_tile(const uint8_t* from, int words, __m512i* to) {
    for (int i = 0; i < kTile; i++, from += kUnit) {
        to[i] = i < words ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
        _mm_prefetch((const char*)from + kAhead, _MM_HINT_T0);
    }
}

// The units of a word of each column. Of eight nibbles, those in low halves of bytes come first; `table`: they are
// E2M1.
template <bool table> struct Nibbles {
    static constexpr int kBits = 4;
    __m512i get(__m512i words, int unit) const {
        const __m512i codes = _mm512_and_si512(unit ? _mm512_srli_epi32(words, 4) : words, low_);
        return table ? _mm512_shuffle_epi8(doubled_, codes) : codes;
    }

private:
    const __m512i low_ = _mm512_set1_epi8(15);
    const __m512i doubled_ = _mm512_broadcast_i32x4(  // and 12 more
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
};

struct Bytes {
    static constexpr int kBits = 8;
    __m512i get(__m512i words, int) const { return words; }
};

}  // namespace
