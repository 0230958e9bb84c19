// Products of few rows with codes in tiles. Included by what is compiled for AVX-512 with VNNI.
#pragma once

#include "integers.h"

namespace {

// A product of few rows with codes in tiles, which are read once, from the first to the last, and decoded in
// registers. The sums are those of `IntegerProduct`.
template <int size, int rows, bool table> class FewByTiles {
public:
    FewByTiles(const Weight& w, const Rows& r)
        : w_(w), rows_(r), arranged_((const uint8_t*)aligned((float*)r.arranged)) {}

    void run(int64_t begin, int64_t end) const {
        const int64_t groups = w_.depth / size;
        const uint8_t* codes = (const uint8_t*)w_.values + begin * w_.depth / 2;
        for (int64_t column = begin; column < end; column += kTile) {
            __m512 sums[rows];
            for (__m512& each : sums) each = _mm512_setzero_ps();
            const uint8_t* digits = arranged_;
            for (int64_t group = 0; group < groups; group++) {
                add(codes, digits, column * groups + group * kTile, sums);
                codes += size / 8 * kUnit;
                digits += rows * (kDigits * size + 8);
            }
            for (int row = 0; row < rows; row++) write_row(w_, rows_, sums[row], row, column, kTile);
        }
    }

private:
    // A group. `at`: the number of its first scale.
    void add(const uint8_t* codes, const uint8_t* digits, int64_t at, __m512* sums) const {
        constexpr int kChains = rows <= 2 ? 2 : 1;  // of sums that do not wait for each other
        constexpr int kBetween = rows * size;       // bytes between the digits of a number
        __m512i own[kChains][rows][kDigits] = {};
#pragma GCC unroll 16
        for (int word = 0; word < size / 8; word++) {
            const __m512i words = _mm512_loadu_si512(codes + word * kUnit);
            _mm_prefetch((const char*)codes + word * kUnit + kAhead, _MM_HINT_T0);
            const __m512i even = units_.even(words), odd = units_.odd(words);
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++) {
                const uint8_t* x = digits + row * size + word * 8;
#pragma GCC unroll 3
                for (int digit = 0; digit < kDigits; digit++) {
                    dot(own[0][row][digit], even, x + digit * kBetween);
                    dot(own[kChains - 1][row][digit], odd, x + digit * kBetween + 4);
                }
            }
        }
        const Accumulator add(Sixteen(w_, at, at + kScaled * kTile, lanes(kTile)));
        const float* scales = (const float*)(digits + kDigits * kBetween);
        for (int row = 0; row < rows; row++) {
            __m512i* sum = own[0][row];
            if constexpr (kChains > 1)
                for (int digit = 0; digit < kDigits; digit++)
                    sum[digit] = _mm512_add_epi32(sum[digit], own[1][row][digit]);
            sums[row] = add(sum[0], sum[1], sum[2], scales + row, rows, sums[row]);
        }
    }

    const Weight& w_;
    const Rows& rows_;
    const uint8_t* arranged_;
    Nibbles<table> units_;
};

template <int size, bool table>
void few_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    switch (rows.count) {
        case 1: return FewByTiles<size, 1, table>(w, rows).run(begin, end);
        case 2: return FewByTiles<size, 2, table>(w, rows).run(begin, end);
        case 3: return FewByTiles<size, 3, table>(w, rows).run(begin, end);
        default: return FewByTiles<size, 4, table>(w, rows).run(begin, end);
    }
}

inline void multiply_few_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    if (w.storage == Storage::nvfp4) return few_by_tiles<16, true>(w, rows, begin, end);
    if (w.storage == Storage::mxfp4) return few_by_tiles<32, true>(w, rows, begin, end);
    switch (w.group) {
        case 32: return few_by_tiles<32, false>(w, rows, begin, end);
        case 64: return few_by_tiles<64, false>(w, rows, begin, end);
        default: return few_by_tiles<128, false>(w, rows, begin, end);
    }
}

}  // namespace
