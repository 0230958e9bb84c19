// Products with codes in tiles, a few rows at a time.
#pragma once

#include "integers.h"

namespace quire::QUIRE_ISA {

constexpr int kFewByVectors = 4;  // rows for which AMX's tiles are no faster
// The most rows by which codes are decoded in registers, by every few rows anew, and not once to memory.
inline int64_t most_by_tiles(const Weight& w) {
    if (W == 4 || w.storage != Storage::affine) return 16;
    if (kMostByBytes<2> == 0) return W == 16 ? 16 : 8;
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

// Units of words of codes in tiles that lie `between` bytes apart. Fetches later words into the cache.
template <int tiles, class Units, int codes> class PackedUnits {
    static constexpr int kInWord = 32 / Units::kBits / codes;

public:
    QUIRE_INLINE PackedUnits(const uint8_t* first, int64_t between) : next_(first), between_(between) {}
    QUIRE_INLINE IntLanes get(int tile, int i) {
        if (i % kInWord == 0) {
            const uint8_t* word = next_ + tile * between_ + i / kInWord * kUnit;
            words_[tile] = load_lanes(word);
            prefetch(word + kAhead);
        }
        return units_.template get<codes>(words_[tile], i % kInWord);
    }
    QUIRE_INLINE void advance(int count) { next_ += count / kInWord * kUnit; }

private:
    const uint8_t* next_;
    int64_t between_;
    Units units_;
    IntLanes words_[tiles];
};

// Some rows of a block by codes in `tiles` tiles, which are decoded in registers. The sums are those of
// `IntegerProduct`.
template <int size, int tiles, class Block, class Units, class Parts> class FewByTiles {
    static constexpr int rows = Block::kCount;

public:
    using Sums = FloatLanes[tiles][rows];
    FewByTiles(const Weight& w, const Block& block)
        : w_(w), block_(block), tile_bytes_(w.depth * kTile * Units::kBits / 8) {}

    // Sums of tiles of columns.
    void add_up(int64_t column, Sums& sums) const {
        const int64_t groups = w_.depth / size;
        const uint8_t* codes = (const uint8_t*)w_.values + column / kTile * tile_bytes_;
        const uint8_t* parts = block_.parts;
        for (auto& tile : sums)
            for (FloatLanes& row : tile) row = all(0.0f);
        for (int64_t group = 0; group < groups; group++) {
            add_group(codes, parts, column * groups + group * kTile, sums);
            codes += size * Units::kBits / 32 * kUnit;
            parts += group_bytes<Parts>(size, block_.rows);
        }
    }

private:
    // `at`: the number of the group's first scale.
    QUIRE_INLINE void add_group(const uint8_t* codes, const uint8_t* parts, int64_t at, Sums& sums) const {
        GroupSums<size, rows, Parts, tiles> own;
        const int64_t between = block_.rows * size * Parts::kWidth;
        own.add(PackedUnits<tiles, Units, Parts::kCodes>(codes, tile_bytes_), parts + block_.first * size * Parts::kWidth, between);
        const float* scales = afresh((const float*)(parts + Parts::kParts * between) + block_.first);
        QUIRE_UNROLLED for (int tile = 0; tile < tiles; tile++, at += w_.depth / size * kTile) {
            const SixteenScales scaled(w_, at, at + kScaled * kTile, kTile);
            QUIRE_UNROLLED for (int row = 0; row < rows; row++) {
                FloatLanes& to = sums[tile][row];
                to = own.accumulated(scaled.accumulator(), tile, row, scales, block_.rows, to);
            }
        }
    }

    const Weight& w_;
    Block block_;
    int64_t tile_bytes_;  // of codes
};

// Tiles of columns of a product by the rows of a block.
template <int size, int tiles, class Units, class Parts, class Block>
void tiles_by_rows(const Weight& w, const Rows& rows, int64_t column, int64_t row, const Block& block) {
    FloatLanes sums[tiles][Block::kCount];
    FewByTiles<size, tiles, Block, Units, Parts>(w, block).add_up(column, sums);
    for (int tile = 0; tile < tiles; tile++)
        for (int r = 0; r < Block::kCount; r++) write_row(w, rows, sums[tile][r], row + r, column + tile * kTile, kTile);
}

// Calls `use` with a number of tiles, known to the compiler, and the first of their columns: `most` tiles, and at the
// end those that are left.
template <int most, class Use> QUIRE_INLINE void by_tiles(int64_t begin, int64_t end, const Use& use) {
    for (; begin + most * kTile <= end; begin += most * kTile) use(std::integral_constant<int, most>(), begin);
    if constexpr (most > 1) by_tiles<most - 1>(begin, end, use);
}

// A product with codes in tiles: tiles' codes stay in the cache while the rows pass, a few at a time.
template <int size, class Units, class Parts>
void product_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    const int block = block_rows(0, rows.count);
    const auto* arranged = (const uint8_t*)aligned((float*)rows.arranged);
    const auto pass = [&](auto tiles, int64_t column, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row += kTile) {
            const uint8_t* parts = arranged + row / kTile * block_bytes<Parts>(w, block);
            in_passes<Parts::kRows>((int)std::min<int64_t>(kTile, end - row), [&](auto count, int first) {
                const SomeRows<count> some{parts, block, first};
                tiles_by_rows<size, tiles, Units, Parts>(w, rows, column, row + first, some);
            });
        }
    };
    for (int64_t row = 0; row < rows.count; row += kRowsPassing)
        by_tiles<Parts::kTiles>(begin, end, [&](auto tiles, int64_t column) {
            pass(tiles, column, row, std::min(rows.count, row + kRowsPassing));
        });
}

// The same for one row or two.
template <int size, class Units, class Parts>
void few_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    const auto* parts = (const uint8_t*)aligned((float*)rows.arranged);
    by_tiles<Parts::kTiles>(begin, end, [&](auto tiles, int64_t column) {
        if (rows.count == 1) {
            tiles_by_rows<size, tiles, Units, Parts>(w, rows, column, 0, AllRows<1>{parts});
        } else {
            tiles_by_rows<size, tiles, Units, Parts>(w, rows, column, 0, AllRows<2>{parts});
        }
    });
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
        IntegerProduct<ByVectors<size, PartSums<most, digits>>, size>(w, rows, scratch).run(begin, end);
    });
}
inline int64_t integer_scratch_floats() { return IntegerProduct<ByVectors<16, PartSums<255, 2>>, 16>::scratch_floats(); }

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
