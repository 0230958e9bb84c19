// Rows of x as integers, for products with packed weights.
//
// A group of a row of x becomes integers below 2^22 times a power of two. An integer is a high part times `kBase`
// and a lower part, which is 256 times a middle part and the rest; all three are signed bytes (digits), and the lower
// part has 16 bits. Codes are unsigned bytes, so a group's sums of codes by parts are exact in any order: every
// instruction set gets the same. What they are as floats is added group by group, in one order and with the same
// roundings for any number of rows.
#pragma once

#include "lanes.h"

namespace quire::QUIRE_ISA {

constexpr int kBase = 254 * 256;  // so that a middle part is at most 127
constexpr int kDigits = 3;

// What vectors multiply by codes of which the largest is `most`: parts of one byte, or of two.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kMostByBytes = 255;  // four products of bytes are added to 32 bits
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kMostByBytes = 127;  // likewise, but codes are signed
#elif defined(__AVX2__)
constexpr int kMostByBytes = 24;   // two products of bytes are added to 16 bits
#else
constexpr int kMostByBytes = 255;  // no such instruction is used
#endif
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool kByInstruction = true;
#else
constexpr bool kByInstruction = false;
#endif

// How the parts of a row lie: [kParts, rows, group], `kWidth` bytes each.
struct ByteParts {
    static constexpr int kParts = kDigits, kWidth = 1, kBytes = 3;
};
// Lower and high parts. Of four neighbours, which meet a unit's codes, the third stands before the second.
struct WordParts {
    static constexpr int kParts = 2, kWidth = 2, kBytes = 4;
};

inline bool in_integers(const Weight& w) {
    return w.storage == Storage::affine || w.storage == Storage::mxfp4 || w.storage == Storage::nvfp4;
}
inline bool in_nibbles(const Weight& w) { return w.bits == 4; }
inline bool in_words(const Weight& w) { return w.bits > 4 && kMostByBytes < 255; }

// Rows lie in blocks of 16; a block that is the only one has no more rows than there are. For each group of
// a block: the parts, then each row's scale, and each row's sum of integers.
inline int block_rows(int64_t first, int64_t count) {
    return first == 0 && count < kTile ? (int)count : kTile;
}
inline int64_t group_bytes(const Weight& w, int rows) {
    return rows * ((in_words(w) ? WordParts::kBytes : ByteParts::kBytes) * w.group + 8);
}
inline int64_t block_bytes(const Weight& w, int rows) { return w.depth / w.group * group_bytes(w, rows); }

inline int64_t integer_floats(const Weight& w, int64_t count) {
    const int64_t blocks = (count + kTile - 1) / kTile;
    return 16 + blocks * block_bytes(w, block_rows(0, count)) / 4;  // 16: aligned
}

inline float power_of_two(int biased_exponent) {
    const uint32_t bits = (uint32_t)biased_exponent << 23;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline FloatLanes high_parts(const FloatLanes& whole) {
    return by_part<FloatLanes>([&](int i) { return round(mul(whole.part[i], set(1.0f / kBase))); });
}

// Sixteen integers of a row, which are floats without fractions, in parts. `between`: bytes between parts.
inline void store_parts(const FloatLanes& whole, ByteParts, const uint8_t* order, int64_t between, uint8_t* to) {
    const FloatLanes high = high_parts(whole);
    const IntLanes lower = to_ints(fma(high, all(-(float)kBase), whole));
    store_lowest_bytes(to, lower, order);
    // The rest is signed: where it is below 0, the middle part is one more than the bits above it.
    store_lowest_bytes(to + between, shift_right<8>(add(lower, all_ints(128))), order);
    store_lowest_bytes(to + 2 * between, to_ints(high), order);
}
inline void store_parts(const FloatLanes& whole, WordParts, const uint8_t*, int64_t between, uint8_t* to) {
    const FloatLanes high = high_parts(whole);
    store_lowest_words(to, to_ints(fma(high, all(-(float)kBase), whole)));
    store_lowest_words(to + between, to_ints(high));
}

// One group of one row of a block.
template <class Parts>
void arrange_group(const float* x, int group, const uint8_t* order, int row, int rows, uint8_t* to) {
    I most = set_ints(0);
    for (int at = 0; at < group; at += W)
        most = max_ints(most, bit_and(load_ints(x + at), set_ints(0x7fffffff)));
    const int largest = largest_int(most) >> 23;  // exponent
    const int exponent = std::max(largest, 22);
    const bool finite = largest < 255;
    const F inverse = set(finite ? power_of_two(275 - exponent) : 0.0f);
    const int64_t between = (int64_t)rows * group * Parts::kWidth;
    I sum = set_ints(0);
    for (int at = 0; at < group; at += kTile) {
        const FloatLanes whole = by_part<FloatLanes>([&](int i) {
            const F rounded = round(mul(load(x + at + i * W), inverse));
            sum = add_ints(sum, to_ints(rounded));
            return rounded;
        });
        store_parts(whole, Parts(), order, between, to + (row * group + at) * Parts::kWidth);
    }
    float* scales = (float*)(to + Parts::kParts * between);
    scales[row] = finite ? power_of_two(exponent - 21) : __builtin_nanf("");
    scales[rows + row] = (float)sum_ints(sum);
}

// Fills a row of a block that has fewer rows than there is room for.
template <class Parts> void arrange_absent(int group, int row, int rows, uint8_t* to) {
    const int64_t bytes = (int64_t)group * Parts::kWidth;
    for (int part = 0; part < Parts::kParts; part++) std::memset(to + (part * rows + row) * bytes, 0, bytes);
    float* scales = (float*)(to + Parts::kParts * rows * bytes);
    scales[row] = scales[rows + row] = 0.0f;
}

inline void arrange_integers(const Weight& w, const Source& x, int64_t count, int64_t begin, int64_t end,
                             float* arranged) {
    // Of a word's eight nibbles, those in low halves of bytes come first.
    static const uint8_t by_halves[kTile] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
    static const uint8_t in_turn[kTile] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const uint8_t* order = in_nibbles(w) ? by_halves : in_turn;
    const int rows = block_rows(0, count);
    const int64_t bytes = group_bytes(w, rows);
    const auto block_of = [&](int64_t row) { return (uint8_t*)aligned(arranged) + row / kTile * block_bytes(w, rows); };
    const auto each_group = [&](int64_t row, const auto& use) {
        uint8_t* to = block_of(row);
        for (int64_t at = 0; at < w.depth; at += w.group, to += bytes) use(at, (int)(row % kTile), to);
    };
    for (int64_t row = begin; row < end; row++) {
        const float* from = row_of(x, row);
        each_group(row, [&](int64_t at, int number, uint8_t* to) {
            (in_words(w) ? arrange_group<WordParts> : arrange_group<ByteParts>)(from + at, w.group, order, number, rows, to);
        });
    }
    if (end < count || rows < kTile) return;
    for (int64_t row = count; row % kTile != 0; row++) {
        each_group(row, [&](int64_t, int number, uint8_t* to) {
            (in_words(w) ? arrange_absent<WordParts> : arrange_absent<ByteParts>)(w.group, number, rows, to);
        });
    }
}

// How a group's sums of codes by digits are added to a row's sums.
struct Accumulator {
    FloatLanes scales, biases;  // of the group, one a column

    // `row`: the row's scale, and `rows` floats later its sum of integers. `lower`: the sums by lower parts.
    QUIRE_INLINE FloatLanes operator()(const IntLanes& lower, const IntLanes& high, const float* row, int rows,
                                   const FloatLanes& sums) const {
        const FloatLanes whole = fma(to_floats(high), all((float)kBase), to_floats(lower));
        const FloatLanes offset = mul(biases, all(row[rows]));
        return fma(fma(whole, scales, offset), all(row[0]), sums);
    }
};

}  // namespace quire::QUIRE_ISA
