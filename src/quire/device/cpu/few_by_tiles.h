// Products with codes in tiles, a few rows at a time.
#pragma once

#include "integers.h"

namespace quire::QUIRE_ISA {

constexpr int kFewByVectors = 4;  // rows for which AMX's tiles are no faster
constexpr int64_t kByTiles = 16;    // rows above which words are multiplied by codes that were decoded to memory
constexpr int64_t kRowsPassing = 64;  // rows that pass over a tile of columns before the next tile

// Some rows of a block by codes in tiles, which are decoded in registers. The sums are those of `IntegerProduct`.
template <int size, int rows, class Units, class Parts> class FewByTiles {
    static constexpr int kUnitsInWord = 8 / Units::kBits;

public:
    // `block`: the rows of the block, as arranged; `first`: the number of the first row there.
    FewByTiles(const Weight& w, const uint8_t* parts, int block, int first)
        : w_(w), parts_(parts), between_(block * size * Parts::kWidth), block_(block), first_(first) {}

    // Sums of a tile of columns.
    void tile(int64_t column, FloatLanes* sums) const {
        const int64_t groups = w_.depth / size;
        const uint8_t* codes = (const uint8_t*)w_.values + column * w_.depth * Units::kBits / 8;
        const uint8_t* parts = parts_;
        for (int row = 0; row < rows; row++) sums[row] = all(0.0f);
        for (int64_t group = 0; group < groups; group++) {
            add_group(codes, parts, column * groups + group * kTile, sums);
            codes += size / 4 / kUnitsInWord * kUnit;
            parts += Parts::kParts * between_ + block_ * 8;
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
            return Parts::unit(units_.get(words, i % kUnitsInWord));
        };
        own.add(unit_of, parts + first_ * size * Parts::kWidth, between_);
        const SixteenScales scaled(w_, at, at + kScaled * kTile, kTile);
        const float* scales = (const float*)(parts + Parts::kParts * between_) + first_;
        for (int row = 0; row < rows; row++)
            sums[row] = own.accumulated(scaled.accumulator(), row, scales, block_, sums[row]);
    }

    const Weight& w_;
    const uint8_t* parts_;
    int64_t between_;  // bytes between the parts of a number
    int block_, first_;
    Units units_;
};

// A product with codes in tiles: a tile's codes stay in the cache while the rows pass, a few at a time.
template <int size, class Units, int digits>
void product_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    using Parts = PartSums<Units::kMost, digits>;
    constexpr int kFew = kRowsAtOnce<Parts>;
    const int block = block_rows(0, rows.count);
    const auto* arranged = (const uint8_t*)aligned((float*)rows.arranged);
    const auto few = [&](auto count, int64_t row, int64_t column) {
        const uint8_t* parts = arranged + row / kTile * block_bytes<Parts>(w, block);
        FloatLanes sums[count];
        FewByTiles<size, count, Units, Parts>(w, parts, block, (int)(row % kTile)).tile(column, sums);
        for (int r = 0; r < count; r++) write_row(w, rows, sums[r], row + r, column, kTile);
    };
    const auto pass = [&](int64_t column, int64_t first, int64_t past) {
        for (int64_t row = first; row < past; row += kFew) {
            switch (std::min<int64_t>(kFew, past - row)) {
                case 1: few(std::integral_constant<int, 1>(), row, column); break;
                case 2: few(std::integral_constant<int, std::min(2, kFew)>(), row, column); break;
                case 3: few(std::integral_constant<int, std::min(3, kFew)>(), row, column); break;
                default: few(std::integral_constant<int, kFew>(), row, column);
            }
        }
    };
    for (int64_t row = 0; row < rows.count; row += kRowsPassing)
        for (int64_t column = begin; column < end; column += kTile)
            pass(column, row, std::min(rows.count, row + kRowsPassing));
}

template <class Units, int digits>
void affine_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    switch (w.group) {
        case 32: return product_by_tiles<32, Units, digits>(w, rows, begin, end);
        case 64: return product_by_tiles<64, Units, digits>(w, rows, begin, end);
        default: return product_by_tiles<128, Units, digits>(w, rows, begin, end);
    }
}

template <int digits>
void multiply_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    if (w.storage == Storage::nvfp4) return product_by_tiles<16, Nibbles<true>, digits>(w, rows, begin, end);
    if (w.storage == Storage::mxfp4) return product_by_tiles<32, Nibbles<true>, digits>(w, rows, begin, end);
    (w.bits == 4 ? affine_by_tiles<Nibbles<false>, digits> : affine_by_tiles<Bytes, digits>)(w, rows, begin, end);
}

// Columns of a product in integers, by vectors.
template <int digits>
void multiply_integers(const Weight& w, const Rows& rows, int64_t begin, int64_t end, float* scratch) {
    const bool decoded_at_once = digits == 1 && !in_words<digits>(w);  // nearly for nothing
    if (w.tiled && (decoded_at_once || rows.count <= kByTiles))
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
