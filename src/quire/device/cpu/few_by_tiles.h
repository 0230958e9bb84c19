// Products with codes in tiles, a few rows at a time.
#pragma once

#include "integers.h"

namespace quire::QUIRE_ISA {

constexpr int kFewByVectors = 4;  // rows for which AMX's tiles are no faster
constexpr int64_t kByTiles = 16;  // rows above which codes are decoded to memory once for all

// Some rows of a block by codes in tiles, which are decoded in registers. The sums are those of `IntegerProduct`.
template <int size, int rows, class Units> class FewByTiles {
    using Parts = PartSums<Units::kMost>;
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
        GroupSums<size, rows, Units::kMost> own;
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
template <int size, class Units>
void product_by_tiles(const Weight& w, const Rows& rows, int64_t begin, int64_t end) {
    constexpr int kFew = kRowsAtOnce<Units::kMost>;
    const int block = block_rows(0, rows.count);
    const auto* arranged = (const uint8_t*)aligned((float*)rows.arranged);
    const auto few = [&](auto count, int64_t row, int64_t column) {
        const uint8_t* parts = arranged + row / kTile * block_bytes(w, block);
        FloatLanes sums[count];
        FewByTiles<size, count, Units>(w, parts, block, (int)(row % kTile)).tile(column, sums);
        for (int r = 0; r < count; r++) write_row(w, rows, sums[r], row + r, column, kTile);
    };
    for (int64_t column = begin; column < end; column += kTile) {
        for (int64_t row = 0; row < rows.count; row += kFew) {
            switch (std::min<int64_t>(kFew, rows.count - row)) {
                case 1: few(std::integral_constant<int, 1>(), row, column); break;
                case 2: few(std::integral_constant<int, std::min(2, kFew)>(), row, column); break;
                case 3: few(std::integral_constant<int, std::min(3, kFew)>(), row, column); break;
                default: few(std::integral_constant<int, kFew>(), row, column);
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

// Columns of a product in integers, by vectors.
inline void multiply_integers(const Weight& w, const Rows& rows, int64_t begin, int64_t end, float* scratch) {
    if (w.tiled && rows.count <= kByTiles) return multiply_by_tiles(w, rows, begin, end);
    for_codes(w, [&](auto size, auto most) {
        IntegerProduct<ByVectors<size, most>, size>(w, rows, scratch).run(begin, end);
    });
}
inline int64_t integer_scratch_floats() { return IntegerProduct<ByVectors<16, 255>, 16>::scratch_floats(); }

// Products in integers by the instructions that the including file is compiled for; other products are those of
// the kernels that `base` gives.
template <const Kernels* (*base)()> struct IntegerProducts {
    static int64_t arranged_floats(const Weight& w, int64_t count) {
        return in_integers(w) ? integer_floats(w, count) : base()->arranged_floats(w, count);
    }
    static void arrange(const Weight& w, const Source& x, int64_t count, int64_t begin, int64_t end, float* arranged) {
        (in_integers(w) ? arrange_integers : base()->arrange)(w, x, count, begin, end, arranged);
    }
    static int64_t arranged_together(const Weight& w) { return in_integers(w) ? 1 : base()->arranged_together(w); }
    static void product(const Weight& w, const Rows& rows, int64_t begin, int64_t end, float* scratch) {
        (in_integers(w) ? multiply_integers : base()->product)(w, rows, begin, end, scratch);
    }
    static int64_t scratch_floats(const Weight& w) {
        return in_integers(w) ? integer_scratch_floats() : base()->scratch_floats(w);
    }
    static Kernels kernels(const char* name) {
        return with_products(*base(), name, {arranged_floats, arrange, arranged_together, product, scratch_floats,
                                              reads_tiles});
    }
};

}  // namespace quire::QUIRE_ISA
