// Rows of x as integers, for products with packed weights.
//
// A group of a row of x becomes integers times a scale. An integer has one or two digits, which are signed bytes: 256
// times the high one and the low one. The largest integer of a group is `kLargest` or its negative: an error of at most
// 2^-16 of the group's largest number with two digits, 2^-8 with one. Where vectors do not multiply bytes, integers are
// words of 16 bits. Codes are unsigned bytes, so a group's sums of codes by integers are exact in any order: every
// instruction set gets the same. What they are as floats is added group by group, in one order and with the same
// roundings for any number of rows.
#pragma once

#include "lanes.h"

namespace quire::QUIRE_ISA {

template <int digits> constexpr int kLargest = digits == 1 ? 127 : 127 * 256 + 127;

// The largest code that vectors multiply by digits. Larger ones are multiplied by integers of 16 bits.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
template <int digits> constexpr int kMostByBytes = 255;  // four products of bytes are added to 32 bits
#elif defined(__ARM_FEATURE_DOTPROD)
template <int digits> constexpr int kMostByBytes = 127;  // likewise, but codes are signed
#elif defined(__AVX2__)
template <int digits> constexpr int kMostByBytes = digits == 1 ? 24 : 0;  // some products are added to 16 bits
#else
template <int digits> constexpr int kMostByBytes = 0;
#endif
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool kByInstruction = true;
#else
constexpr bool kByInstruction = false;
#endif

// How the parts of a row's integers lie: [kParts, rows, group], `kWidth` bytes each. `kCodes`: of a column, that meet
// four bytes of a part.
template <int digits> struct ByteParts {
    static constexpr int kParts = digits, kWidth = 1, kCodes = 4, kLargest = QUIRE_ISA::kLargest<digits>;
};
// Whole integers. Of four neighbours the third stands before the second.
struct Words {
    static constexpr int kParts = 1, kWidth = 2, kCodes = 2;
};
template <int digits> struct WordParts : Words {
    static constexpr int kLargest = QUIRE_ISA::kLargest<digits>;
};

inline bool in_integers(const Weight& w) {
    return w.storage == Storage::affine || w.storage == Storage::mxfp4 || w.storage == Storage::nvfp4;
}
inline bool in_nibbles(const Weight& w) { return w.bits == 4; }
// Whether rows are so few that they are multiplied in digits even where more rows are multiplied in words: a row in
// words takes fewer instructions, but codes of 4 bits take more to unpack.
inline bool few_by_digits(const Weight& w, int64_t count) { return w.tiled && in_nibbles(w) && count <= 2; }
template <int digits> bool in_words(const Weight& w, int64_t count) {
    const int most = few_by_digits(w, count) ? kMostByBytes<1> : kMostByBytes<digits>;
    return most < (in_nibbles(w) ? 24 : 255);  // E2M1's codes: to 24
}
// Calls `use` with the form in which `count` rows meet a weight.
template <int digits, class Use> auto for_parts(const Weight& w, int64_t count, const Use& use) {
    return in_words<digits>(w, count) ? use(WordParts<digits>()) : use(ByteParts<digits>());
}

// Rows lie in blocks of 16; a block that is the only one has no more rows than there are. For each group of
// a block: the parts, then each row's scale, and each row's sum of integers.
inline int block_rows(int64_t first, int64_t count) {
    return first == 0 && count < kTile ? (int)count : kTile;
}
template <class Parts> int64_t group_bytes(int group, int rows) {
    return rows * (Parts::kParts * Parts::kWidth * group + 8);
}
template <class Parts> int64_t block_bytes(const Weight& w, int rows) {
    return w.depth / w.group * group_bytes<Parts>(w.group, rows);
}

template <int digits> int64_t integer_floats(const Weight& w, int64_t count) {
    const int64_t blocks = (count + kTile - 1) / kTile;
    const int rows = block_rows(0, count);
    const auto bytes = [&](auto parts) { return block_bytes<decltype(parts)>(w, rows); };
    return 16 + blocks * for_parts<digits>(w, count, bytes) / 4;
}

// Sixteen integers of a row in parts. `between`: bytes between parts.
template <int digits>
void store_parts(const IntLanes& whole, ByteParts<digits>, const uint8_t* order, int64_t between, uint8_t* to) {
    store_lowest_bytes(to, whole, order);
    if (digits == 1) return;
    // The low digit is signed: where it is below 0, the high one is one more than the bits above it.
    store_lowest_bytes(to + between, shift_right<8>(add(whole, all_ints(128))), order);
}
template <int digits>
void store_parts(const IntLanes& whole, WordParts<digits>, const uint8_t* order, int64_t, uint8_t* to) {
    store_lowest_words(to, whole, order);
}

// One group of one row of a block.
template <class Parts>
void arrange_group(const float* x, int group, const uint8_t* order, int row, int rows, uint8_t* to) {
    I most = set_ints(0);
    for (int at = 0; at < group; at += W)
        most = max_ints(most, bit_and(load_ints(x + at), set_ints(0x7fffffff)));
    const int bits = largest_int(most);
    const bool finite = bits >> 23 < 255;
    float largest;
    std::memcpy(&largest, &bits, 4);
    largest = std::max(largest, 0x1p-100f);  // so that its inverse is finite
    const F inverse = set(finite ? Parts::kLargest / largest : 0.0f);
    const int64_t between = (int64_t)rows * group * Parts::kWidth;
    I sum = set_ints(0);
    for (int at = 0; at < group; at += kTile) {
        const IntLanes whole = by_part<IntLanes>([&](int i) {
            const I integers = to_ints(round(mul(load(x + at + i * W), inverse)));
            sum = add_ints(sum, integers);
            return integers;
        });
        store_parts(whole, Parts(), order, between, to + (row * group + at) * Parts::kWidth);
    }
    float* scales = (float*)(to + Parts::kParts * between);
    scales[row] = finite ? largest / Parts::kLargest : __builtin_nanf("");
    scales[rows + row] = (float)sum_ints(sum);
}

// Fills a row of a block that has fewer rows than there is room for.
template <class Parts> void arrange_absent(int group, int row, int rows, uint8_t* to) {
    const int64_t bytes = (int64_t)group * Parts::kWidth;
    for (int part = 0; part < Parts::kParts; part++) std::memset(to + (part * rows + row) * bytes, 0, bytes);
    float* scales = (float*)(to + Parts::kParts * rows * bytes);
    scales[row] = scales[rows + row] = 0.0f;
}

template <class Parts>
void arrange_rows(const Weight& w, const Source& x, int64_t count, int64_t begin, int64_t end, const uint8_t* order,
                  float* arranged) {
    const int rows = block_rows(0, count);
    const int64_t bytes = group_bytes<Parts>(w.group, rows);
    const auto each_group = [&](int64_t row, const auto& use) {
        uint8_t* to = (uint8_t*)aligned(arranged) + row / kTile * block_bytes<Parts>(w, rows);
        for (int64_t at = 0; at < w.depth; at += w.group, to += bytes) use(at, (int)(row % kTile), to);
    };
    for (int64_t row = begin; row < end; row++) {
        const float* from = row_of(x, row);
        each_group(row, [&](int64_t at, int number, uint8_t* to) {
            arrange_group<Parts>(from + at, w.group, order, number, rows, to);
        });
    }
    if (end < count || rows < kTile) return;
    for (int64_t row = count; row % kTile != 0; row++)
        each_group(row, [&](int64_t, int number, uint8_t* to) { arrange_absent<Parts>(w.group, number, rows, to); });
}

template <int digits>
void arrange_integers(const Weight& w, const Source& x, int64_t count, int64_t begin, int64_t end, float* arranged) {
    // Of a word's eight nibbles, those in low halves of bytes come first; of four bytes, those that share words.
    static const uint8_t orders[2][2][kTile] = {{{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                                 {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15}},
                                                {{0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15},
                                                 {0, 4, 2, 6, 1, 5, 3, 7, 8, 12, 10, 14, 9, 13, 11, 15}}};
    const uint8_t* order = orders[in_nibbles(w)][in_words<digits>(w, count)];
    for_parts<digits>(w, count, [&](auto parts) {
        arrange_rows<decltype(parts)>(w, x, count, begin, end, order, arranged);
    });
}

// How a group's sums of codes by digits are added to a row's sums.
struct Accumulator {
    FloatLanes scales, biases;  // of the group, one a column

    // `row`: the row's scale, and `rows` floats later its sum of integers.
    QUIRE_INLINE FloatLanes operator()(const IntLanes& own, const float* row, int rows, const FloatLanes& sums) const {
        const FloatLanes offset = mul(biases, all(row[rows]));
        return fma(fma(to_floats(own), scales, offset), all(row[0]), sums);
    }
};

}  // namespace quire::QUIRE_ISA
