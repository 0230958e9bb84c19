// Products with codes in tiles, a few rows at a time. Included by what is compiled for AVX-512 with VNNI.
#pragma once

#include "integers.h"

namespace {

constexpr int64_t kPassing = 64;  // rows whose digits stay in the cache while columns pass

// Adds the products of four codes a lane with four digits, which are read by the same instruction. Only for
// unrolled code: in a loop the compiler would store all sums in each turn, lest the digits lie among them.
inline void dot(__m512i& sum, __m512i codes, const uint8_t* digits) {
    using Four = int32_t __attribute__((may_alias, aligned(1)));
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const Four*)digits));
}

// Some rows of a block by codes in tiles, which are decoded in registers. The sums are those of `IntegerProduct`.
template <int size, int rows, class Units> class FewByTiles {
    static constexpr int kWord = 32 / Units::kBits;  // codes

public:
    // `block`: the rows of the block, as arranged; `first`: the number of the first row there.
    FewByTiles(const Weight& w, const uint8_t* digits, int block, int first)
        : w_(w), digits_(digits + first * size), between_(block * size), block_(block), first_(first) {}

    // Sums of a tile of columns.
    void tile(int64_t column, __m512* sums) const {
        const int64_t groups = w_.depth / size;
        const uint8_t* codes = (const uint8_t*)w_.values + column * w_.depth * Units::kBits / 8;
        const uint8_t* digits = digits_;
        for (int row = 0; row < rows; row++) sums[row] = _mm512_setzero_ps();
        for (int64_t group = 0; group < groups; group++) {
            add(codes, digits, column * groups + group * kTile, sums);
            codes += size / kWord * kUnit;
            digits += kDigits * between_ + block_ * 8;
        }
    }

private:
    // A group. `at`: the number of its first scale.
    void add(const uint8_t* codes, const uint8_t* digits, int64_t at, __m512* sums) const {
        constexpr int kChains = rows <= 2 ? 2 : 1;  // of sums that do not wait for each other
        __m512i own[kChains][rows][kDigits] = {};
        const uint8_t* const x[kDigits] = {digits, digits + between_, digits + 2 * between_};
#pragma GCC unroll 32
        for (int word = 0; word < size / kWord; word++) {
            const __m512i words = _mm512_loadu_si512(codes + word * kUnit);
            _mm_prefetch((const char*)codes + word * kUnit + kAhead, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int unit = 0; unit < kWord / 4; unit++) {
                const __m512i four = units_.get(words, unit);
                const int at = word * kWord + unit * 4;
                auto& sum = own[(word * kWord / 4 + unit) % kChains];
#pragma GCC unroll 4
                for (int row = 0; row < rows; row++)
#pragma GCC unroll 3
                    for (int digit = 0; digit < kDigits; digit++)
                        dot(sum[row][digit], four, x[digit] + row * size + at);
            }
        }
        const Accumulator add(Sixteen(w_, at, at + kScaled * kTile, lanes(kTile)));
        const float* scales = (const float*)(digits - first_ * size + kDigits * between_) + first_;
        for (int row = 0; row < rows; row++) {
            __m512i* sum = own[0][row];
            if constexpr (kChains > 1)
                for (int digit = 0; digit < kDigits; digit++)
                    sum[digit] = _mm512_add_epi32(sum[digit], own[1][row][digit]);
            sums[row] = add(sum[0], sum[1], sum[2], scales + row, block_, sums[row]);
        }
    }

    const Weight& w_;
    const uint8_t* digits_;
    int64_t between_;  // bytes between the digits of a number
    int block_, first_;
    Units units_;
};

// A product with codes in tiles: a tile's codes stay in the cache while the rows pass, a few at a time.
template <int size, class Units>
void product_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    const int block = block_rows(0, rows.count);
    const auto* arranged = (const uint8_t*)aligned((float*)rows.arranged);
    const auto few = [&](auto count, int64_t row, int64_t column) {
        const uint8_t* digits = arranged + row / kTile * block_bytes(w, block);
        __m512 sums[count];
        FewByTiles<size, count, Units>(w, digits, block, (int)(row % kTile)).tile(column, sums);
        for (int r = 0; r < count; r++) write_row(w, rows, sums[r], row + r, column, kTile);
    };
    for (int64_t first = 0; first < rows.count; first += kPassing) {
        const int64_t past = std::min(rows.count, first + kPassing);
        for (int64_t column = begin; column < end; column += kTile) {
            for (int64_t row = first; row < past; row += kFewByTiles) {
                switch (past - row) {
                    case 1: few(std::integral_constant<int, 1>(), row, column); break;
                    case 2: few(std::integral_constant<int, 2>(), row, column); break;
                    case 3: few(std::integral_constant<int, 3>(), row, column); break;
                    default: few(std::integral_constant<int, kFewByTiles>(), row, column);
                }
            }
        }
    }
}

template <class Units>
void affine_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    switch (w.group) {
        case 32: return product_by_tiles<32, Units>(w, rows, begin, end);
        case 64: return product_by_tiles<64, Units>(w, rows, begin, end);
        default: return product_by_tiles<128, Units>(w, rows, begin, end);
    }
}

inline void multiply_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    if (w.storage == Storage::nvfp4) return product_by_tiles<16, Nibbles<true>>(w, rows, begin, end);
    if (w.storage == Storage::mxfp4) return product_by_tiles<32, Nibbles<true>>(w, rows, begin, end);
    w.bits == 4 ? affine_by_tiles<Nibbles<false>>(w, rows, begin, end) : affine_by_tiles<Bytes>(w, rows, begin, end);
}

}  // namespace
