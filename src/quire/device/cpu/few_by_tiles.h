// Products with codes in tiles, a few rows at a time.
#pragma once

#include "integers.h"

namespace quire::QUIRE_ISA {

constexpr int kFewByVectors = 4;  // rows for which AMX's tiles are no faster
// The most rows by which codes are decoded in registers, by every few rows anew, and not once to memory.
inline int64_t most_by_tiles(const Weight& w) {
    if (W == 4 || w.storage != Storage::affine) return 16;
    return W == 16 ? INT64_MAX : 48;
}
constexpr int64_t kRowsPassing = 64;  // rows that pass over a tile of columns before the next tile

// Rows [first, first + count) of a block of `rows`, as arranged.
template <int count> struct SomeRows {
    static constexpr int kCount = count;
    const uint8_t* parts;
    int rows, first;
};
// All rows of a block: where their parts lie is known to the compiler.
template <int count> struct AllRows {
    static constexpr int kCount = count, rows = count, first = 0;
    const uint8_t* parts;
};

// Some rows of a block by codes in tiles, which are decoded in registers. The sums are those of `IntegerProduct`.
template <int size, class Block, class Units, class Parts> class FewByTiles {
    static constexpr int kUnitsInWord = 32 / Units::kBits / Parts::kCodes, rows = Block::kCount;

public:
    FewByTiles(const Weight& w, const Block& block) : w_(w), block_(block) {}

    // Sums of a tile of columns.
    void tile(int64_t column, FloatLanes* sums) const {
        const int64_t groups = w_.depth / size;
        const uint8_t* codes = (const uint8_t*)w_.values + column * w_.depth * Units::kBits / 8;
        const uint8_t* parts = block_.parts;
        for (int row = 0; row < rows; row++) sums[row] = all(0.0f);
        for (int64_t group = 0; group < groups; group++) {
            add_group(codes, parts, column * groups + group * kTile, sums);
            codes += size / Parts::kCodes / kUnitsInWord * kUnit;
            parts += group_bytes<Parts>(size, block_.rows);
        }
    }

private:
    // `at`: the number of the group's first scale.
    QUIRE_INLINE void add_group(const uint8_t* codes, const uint8_t* parts, int64_t at, FloatLanes* sums) const {
        GroupSums<size, rows, Parts> own;
        IntLanes words;
        const auto unit_of = [&](int first, int i) __attribute__((always_inline)) {
            if (i % kUnitsInWord == 0) {
                const uint8_t* word = codes + (first + i) / kUnitsInWord * kUnit;
                words = load_lanes(word);
                prefetch(word + kAhead);
            }
            return units_.template get<Parts::kCodes>(words, i % kUnitsInWord);
        };
        const int64_t between = block_.rows * size * Parts::kWidth;
        own.add(unit_of, parts + block_.first * size * Parts::kWidth, between);
        const SixteenScales scaled(w_, at, at + kScaled * kTile, kTile);
        const float* scales = (const float*)(parts + Parts::kParts * between) + block_.first;
        for (int row = 0; row < rows; row++)
            sums[row] = own.accumulated(scaled.accumulator(), row, scales, block_.rows, sums[row]);
    }

    const Weight& w_;
    Block block_;
    Units units_;
};

// A tile of columns of a product by the rows of a block.
template <int size, class Units, class Parts, class Block>
void tile_by_rows(const Weight& w, const Rows& rows, int64_t column, int64_t row, const Block& block) {
    FloatLanes sums[Block::kCount];
    FewByTiles<size, Block, Units, Parts>(w, block).tile(column, sums);
    for (int r = 0; r < Block::kCount; r++) write_row(w, rows, sums[r], row + r, column, kTile);
}

// A product with codes in tiles: a tile's codes stay in the cache while the rows pass, a few at a time.
template <int size, class Units, class Parts>
void product_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    const int block = block_rows(0, rows.count);
    const auto* arranged = (const uint8_t*)aligned((float*)rows.arranged);
    const auto pass = [&](int64_t column, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row += kTile) {
            const uint8_t* parts = arranged + row / kTile * block_bytes<Parts>(w, block);
            in_passes<Parts::kRows>((int)std::min<int64_t>(kTile, end - row), [&](auto count, int first) {
                const SomeRows<count> some{parts, block, first};
                tile_by_rows<size, Units, Parts>(w, rows, column, row + first, some);
            });
        }
    };
    for (int64_t row = 0; row < rows.count; row += kRowsPassing)
        for (int64_t column = begin; column < end; column += kTile)
            pass(column, row, std::min(rows.count, row + kRowsPassing));
}

// The same for one row or two.
template <int size, class Units, class Parts>
void few_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    const auto* parts = (const uint8_t*)aligned((float*)rows.arranged);
    for (int64_t column = begin; column < end; column += kTile) {
        if (rows.count == 1) {
            tile_by_rows<size, Units, Parts>(w, rows, column, 0, AllRows<1>{parts});
        } else {
            tile_by_rows<size, Units, Parts>(w, rows, column, 0, AllRows<2>{parts});
        }
    }
}

// `few`: see `few_by_digits`.
template <class Units, int digits, bool few, int size>
void group_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    using Parts = PartSums<Units::kMost, digits, few>;
    if constexpr (few) {
        few_by_tiles<size, Units, Parts>(w, rows, begin, end);
    } else {
        product_by_tiles<size, Units, Parts>(w, rows, begin, end);
    }
}

template <class Units, int digits, bool few>
void affine_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    switch (w.group) {
        case 32: return group_by_tiles<Units, digits, few, 32>(w, rows, begin, end);
        case 64: return group_by_tiles<Units, digits, few, 64>(w, rows, begin, end);
        default: return group_by_tiles<Units, digits, few, 128>(w, rows, begin, end);
    }
}

template <int digits, bool few>
void nibbles_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    if (w.storage == Storage::nvfp4) return group_by_tiles<Nibbles<true>, digits, few, 16>(w, rows, begin, end);
    if (w.storage == Storage::mxfp4) return group_by_tiles<Nibbles<true>, digits, few, 32>(w, rows, begin, end);
    affine_by_tiles<Nibbles<false>, digits, few>(w, rows, begin, end);
}

template <int digits>
void multiply_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    if (few_by_digits(w, rows.count)) return nibbles_by_tiles<digits, true>(w, rows, begin, end);
    (in_nibbles(w) ? nibbles_by_tiles<digits, false> : affine_by_tiles<Bytes, digits, false>)(w, rows, begin, end);
}

// Columns of a product in integers, by vectors.
template <int digits>
void multiply_integers(const Weight& w, const Rows& rows, int64_t begin, int64_t end, float* scratch) {
    const bool decoded_at_once = digits == 1 && !in_words<digits>(w, rows.count);  // nearly for nothing
    if (w.tiled && (decoded_at_once || rows.count <= most_by_tiles(w)))
        return multiply_by_tiles<digits>(w, rows, begin, end);
    for_codes<digits>(w, [&](auto size, auto most) {
        IntegerProduct<ByVectors<size, most, digits>, size>(w, rows, scratch).run(begin, end);
    });
}
inline int64_t integer_scratch_floats() { return IntegerProduct<ByVectors<16, 255, 2>, 16>::scratch_floats(); }

// Products in integers of so many digits by the instructions that the including file is compiled for; other products
// are those of the kernels that `base` gives.
template <const Kernels* (*base)(), int digits> struct IntegerProducts {
    static int64_t arranged_floats(const Weight& w, int64_t count) {
        return in_integers(w) ? integer_floats<digits>(w, count) : base()->arranged_floats(w, count);
    }
    static void arrange(const Weight& w, const Source& x, int64_t count, int64_t begin, int64_t end, float* arranged) {
        (in_integers(w) ? arrange_integers<digits> : base()->arrange)(w, x, count, begin, end, arranged);
    }
    static int64_t arranged_together(const Weight& w) { return in_integers(w) ? 1 : base()->arranged_together(w); }
    static void product(const Weight& w, const Rows& rows, int64_t begin, int64_t end, float* scratch) {
        (in_integers(w) ? multiply_integers<digits> : base()->product)(w, rows, begin, end, scratch);
    }
    static int64_t scratch_floats(const Weight& w) {
        return in_integers(w) ? integer_scratch_floats() : base()->scratch_floats(w);
    }
    static constexpr Products kProducts = {arranged_floats, arrange, arranged_together, product, scratch_floats,
                                           reads_tiles};
};

template <const Kernels* (*base)()> Kernels integer_kernels(const char* name) {
    return with_products(*base(), name, IntegerProducts<base, 2>::kProducts, IntegerProducts<base, 1>::kProducts);
}

}  // namespace quire::QUIRE_ISA
