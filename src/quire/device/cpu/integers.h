// Products with packed weights in integers: see digits.h.
//
// Sixteen columns are multiplied together, one a lane: see units.h.
#pragma once

#include "dots.h"
#include "units.h"

namespace quire::QUIRE_ISA {

constexpr int64_t kSpan = 128;        // depth that is decoded at once: at least a group
template <class Parts> constexpr int64_t kSpanBytes = kSpan * kTile * Parts::kWidth;
constexpr int64_t kSum = kTile * kTile;  // floats of a block's sums for a tile of columns
constexpr int64_t kScaled = 16;       // groups whose scales are read at once
constexpr int kTogether = 4;          // tiles of columns that share a read of x
constexpr int64_t kRowsKept = 256;    // whose sums are kept while columns pass

// -- weights ----------------------------------------------------------------------------------------

// `count` columns from `column` on of a weight whose rows of memory are `stride` bytes: 64 bytes of each, or
// fewer at the end, from byte `at` on. Fetches the next columns' into the cache.
inline void load_columns(const uint8_t* values, int64_t stride, int count, int bytes, IntLanes* to) {
    const uint8_t* next = values + kTile * stride;
    for (int c = 0; c < kTile; c++, values += stride, next += stride) {
        if (c < count && bytes == 64) {
            to[c] = load_lanes(values);
        } else {
            uint8_t some[64] = {0};
            if (c < count) std::memcpy(some, values, bytes);
            to[c] = load_lanes(some);
        }
        prefetch_far(next);
    }
}

// How codes become units.
template <class Parts> class Decoder {
public:
    explicit Decoder(const Weight& w)
        : w_(w), stride_(w.depth * w.bits / 8), table_(w.storage != Storage::affine), spread_(w.bits) {}

    // Depth [at, at + kSpan), or to the end, of columns: units to `to`.
    void operator()(int64_t column, int count, int64_t at, uint8_t* to) const {
        const int64_t depth = std::min(kSpan, w_.depth - at);
        const uint8_t* from = (const uint8_t*)w_.values + column * stride_;
        if (in_nibbles(w_)) {
            table_ ? nibbles<true>(from, count, at, depth, to) : nibbles<false>(from, count, at, depth, to);
            return;
        }
        if (w_.tiled) return store_words(Bytes(), from + at * kTile, depth / 4, to);
        for (int64_t done = 0; done < depth; done += 64, to += 64 * kTile * Parts::kWidth) {
            const int64_t codes = std::min<int64_t>(64, depth - done);
            others(from + (at + done) * w_.bits / 8, count, codes, to);
        }
    }

private:
    static constexpr int kCodes = Parts::kCodes;

    // Stores the units of a word of each column.
    template <class Units> static void store(const Units& units, const IntLanes& words, uint8_t*& to) {
        for (int unit = 0; unit < 32 / Units::kBits / kCodes; unit++, to += kUnit)
            store_lanes(to, units.template get<kCodes>(words, unit));
    }

    // Stores the units of words of a tile. Fetches later words into the cache.
    template <class Units> static void store_words(const Units& units, const uint8_t* from, int64_t count, uint8_t* to) {
        for (const uint8_t* end = from + count * kUnit; from < end; from += kUnit) {
            store(units, load_lanes(from), to);
            prefetch(from + kAhead);
        }
    }

    template <bool table>
    void nibbles(const uint8_t* from, int count, int64_t at, int64_t depth, uint8_t* to) const {
        const Nibbles<table> units;
        if (w_.tiled) return store_words(units, from + at / 8 * kUnit, depth / 8, to);
        IntLanes words[kTile];
        load_columns(from + at / 2, stride_, count, (int)depth / 2, words);
        transpose(words);
        for (const IntLanes& each : words) store(units, each, to);
    }

    // Codes of any number of bits, `codes` of each column, at most 64.
    void others(const uint8_t* from, int count, int64_t codes, uint8_t* to) const {
        IntLanes bytes[kTile];
        load_columns(from, stride_, count, (int)codes * w_.bits / 8, bytes);
        if (w_.bits < 8)
            for (IntLanes& each : bytes) each = spread_(each);
        transpose(bytes);
        for (const IntLanes& each : bytes) store(Bytes(), each, to);
    }

    const Weight& w_;
    int64_t stride_;
    bool table_;
    Spread spread_;
};

// Sixteen scales and biases, or fewer.
class SixteenScales {
public:
    // Those from number `at` on, as they lie in memory. Fetches those from `next` on into the cache.
    QUIRE_INLINE SixteenScales(const Weight& w, int64_t at, int64_t next, int present) {
        if (w.storage == Storage::affine) {
            scales_ = load_them(w, w.scales, at, next, present);
            biases_ = w.biases ? load_them(w, w.biases, at, next, present) : mul(scales_, all(w.bias_factor));
            return;
        }
        const IntLanes bytes = load_bytes((const uint8_t*)w.scales + at, present);
        const FloatLanes scale = w.storage == Storage::mxfp4 ? powers_of_two(bytes) : e4m3(bytes);
        scales_ = mul(scale, all(0.5f));
        biases_ = mul(scale, all(-6.0f));
    }
    const FloatLanes& scales() const { return scales_; }
    const FloatLanes& biases() const { return biases_; }
    Accumulator accumulator() const { return {scales_, biases_}; }

private:
    QUIRE_INLINE static FloatLanes load_them(const Weight& w, const void* from, int64_t at, int64_t next, int present) {
        prefetch_far((const char*)from + next * (w.scale_type == Storage::float32 ? 4 : 2));
        return present == kTile ? load_numbers(w.scale_type, from, at) : load_numbers(w.scale_type, from, at, present);
    }
    static FloatLanes powers_of_two(const IntLanes& bytes) {
        return by_part<FloatLanes>([&](int i) { return as_float(shift_left<23>(bytes.part[i])); });
    }
    static FloatLanes e4m3(const IntLanes& bytes) {
        return by_part<FloatLanes>([&](int i) {
            const I sign = shift_left<24>(bit_and(bytes.part[i], set_ints(0x80)));
            const I rest = shift_left<20>(bit_and(bytes.part[i], set_ints(0x7f)));
            return mul(as_float(bit_or(sign, rest)), set(0x1p120f));
        });
    }

    FloatLanes scales_, biases_;
};

// Scales and biases of groups: [kScaled, kTile].
class Scales {
public:
    // Of `count` columns, from a group on.
    void read(const Weight& w, int64_t column, int count, int64_t group) {
        const int64_t groups = w.depth / w.group;
        const int some = (int)std::min(kScaled, groups - group);
        if (w.tiled) return read_tile(w, column * groups + group * kTile, some);
        const int64_t first = column * groups + group;
        IntLanes s[kTile], b[kTile];
        for (int c = 0; c < kTile; c++) s[c] = b[c] = all_ints(0);
        for (int c = 0; c < count; c++) {
            const int64_t at = first + c * groups;
            const SixteenScales own(w, at, at + kTile * groups, some);
            s[c] = by_part<IntLanes>([&](int i) { return as_ints(own.scales().part[i]); });
            b[c] = by_part<IntLanes>([&](int i) { return as_ints(own.biases().part[i]); });
        }
        transpose(s);
        transpose(b);
        for (int g = 0; g < kScaled; g++) {
            store_lanes(scales_ + g * kTile, s[g]);
            store_lanes(biases_ + g * kTile, b[g]);
        }
    }
    // For group `number` of those that were read.
    Accumulator accumulator(int number) const {
        return {load_floats(scales_ + number * kTile), load_floats(biases_ + number * kTile)};
    }

private:
    void read_tile(const Weight& w, int64_t at, int groups) {
        for (int g = 0; g < groups; g++, at += kTile) {
            const SixteenScales own(w, at, at + kScaled * kTile, kTile);
            store_floats(scales_ + g * kTile, own.scales());
            store_floats(biases_ + g * kTile, own.biases());
        }
    }

    alignas(64) float scales_[kScaled * kTile], biases_[kScaled * kTile];
};

// -- products ---------------------------------------------------------------------------------------

// One group, of `size`, of a block of rows by tiles of columns.
template <int size> struct Group {
    const uint8_t* codes;  // tile t's units at codes + t * kSpanBytes<Parts>
    const Scales* scales;  // tile t's at scales[t], in row `number`
    int number, tiles;
    const uint8_t* parts;  // as arranged
    int rows, present;     // of the block, and those of them that are no padding
    float* sums;           // [tiles, kTile rows, kTile columns]

    Accumulator accumulator(int tile) const { return scales[tile].accumulator(number); }
    template <class Parts> const float* row_scales() const {  // as arranged
        return (const float*)(parts + Parts::kParts * Parts::kWidth * rows * size);
    }
    // Goes on to the next group of the span.
    template <class Parts> void advance() {
        codes += size * kTile * Parts::kWidth;
        parts += group_bytes<Parts>(size, rows);
        number++;
    }
};

// Units of tiles that lie `between` bytes apart.
struct StoredUnits {
    const uint8_t* next;
    int64_t between;
    QUIRE_INLINE IntLanes get(int tile, int i) const { return load_lanes(next + tile * between + i * kUnit); }
    QUIRE_INLINE void advance(int count) { next += count * kUnit; }
};

// Multiplies by vectors. `Sums`: how codes by parts are added up.
template <int size, class Sums> struct ByVectors {
    using Parts = Sums;
    static constexpr int64_t kScratch = 0;  // floats
    static constexpr int kAlone = Parts::kReadsUnits ? 8 : kTile;
    explicit ByVectors(float*) {}
    void begin(int) const {}
    void end() const {}

    // Adds `count` groups from `g` on.
    void operator()(const Group<size>& g, int count) const {
        if constexpr (Parts::kReadsUnits) {
            with_known<kTogether>(g.tiles, [&](auto tiles) {
                for (int row = 0; row < g.present; row++) add<1, tiles>(g, count, 0, row);
            });
        } else {
            in_passes<Parts::kRows>(g.present, [&](auto rows, int first) {
                for (int tile = 0; tile < g.tiles; tile++) add<rows, 1>(g, count, tile, first);
            });
        }
    }

private:
    template <int rows, int tiles>
    QUIRE_INLINE static void add(Group<size> g, int count, int tile, int first) {
        for (int i = 0; i < count; i++, g.template advance<Parts>()) multiply<rows, tiles>(g, tile, first);
    }
    template <int rows, int tiles>
    QUIRE_INLINE static void multiply(const Group<size>& g, int tile, int first) {
        GroupSums<size, rows, Parts, tiles> own;
        own.add(StoredUnits{g.codes + tile * kSpanBytes<Parts>, kSpanBytes<Parts>},
                g.parts + first * size * Parts::kWidth, g.rows * size * Parts::kWidth);
        const float* scales = g.template row_scales<Parts>() + first;
        QUIRE_UNROLLED for (int t = 0; t < tiles; t++) {
            const Accumulator add_to = g.accumulator(tile + t);
            QUIRE_UNROLLED for (int row = 0; row < rows; row++) {
                float* sums = g.sums + (tile + t) * kSum + (first + row) * kTile;
                store_floats(sums, own.accumulated(add_to, t, row, scales, g.rows, load_floats(sums)));
            }
        }
    }
};

// A product with a weight whose groups are `size`; `Multiply` adds them up. Up to `Multiply::kAlone` rows meet one tile
// of columns at a time.
template <class Multiply, int size> class IntegerProduct {
    using Parts = typename Multiply::Parts;

public:
    static int64_t scratch_floats() {
        return 16 + kRowsKept * kTogether * kTile + kTogether * (kSpanBytes<Parts> + (int64_t)sizeof(Scales)) / 4 +
               Multiply::kScratch;
    }
    IntegerProduct(const Weight& w, const Rows& rows, float* scratch)
        : w_(w), rows_(rows), decode_(w), block_(block_rows(0, rows.count)),
          block_bytes_(block_bytes<Parts>(w, block_)), arranged_((const uint8_t*)aligned((float*)rows.arranged)),
          sums_(aligned(scratch)), scales_((Scales*)(sums_ + kRowsKept * kTogether * kTile)),
          codes_((uint8_t*)(scales_ + kTogether)), multiply_((float*)(codes_ + kTogether * kSpanBytes<Parts>)) {}

    void run(int64_t begin, int64_t end) const {
        multiply_.begin(block_);
        const int64_t together = (rows_.count > Multiply::kAlone ? kTogether : 1) * kTile;
        for (int64_t column = begin; column < end; column += together)
            for (int64_t row = 0; row < rows_.count; row += kRowsKept)
                columns(column, std::min(together, end - column), row);
        multiply_.end();
    }

private:
    void columns(int64_t column, int64_t width, int64_t row) const {
        const int tiles = (int)((width + kTile - 1) / kTile);
        const int64_t count = std::min(kRowsKept, rows_.count - row), blocks = (count + kTile - 1) / kTile;
        std::memset(sums_, 0, blocks * tiles * kSum * 4);
        constexpr int64_t kGroups = kSpan / size;  // of a span
        for (int64_t group = 0; group < w_.depth / size; group += kGroups) {
            for (int tile = 0; tile < tiles; tile++) {
                const int64_t first = column + tile * kTile;
                const int present = (int)std::min<int64_t>(kTile, width - tile * kTile);
                if (group % kScaled == 0) scales_[tile].read(w_, first, present, group);
                decode_(first, present, group * size, codes_ + tile * kSpanBytes<Parts>);
            }
            const int some = (int)std::min(kGroups, w_.depth / size - group);
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t first = row + b * kTile;
                const uint8_t* x = arranged_ + first / kTile * block_bytes_ + group * group_bytes<Parts>(size, block_);
                const int present = (int)std::min<int64_t>(block_, rows_.count - first);
                multiply_(Group<size>{codes_, scales_, (int)(group % kScaled), tiles, x, block_, present,
                                      sums_ + b * tiles * kSum}, some);
            }
        }
        for (int64_t r = 0; r < count; r++) {
            for (int tile = 0; tile < tiles; tile++) {
                const FloatLanes sums = load_floats(sums_ + (r / kTile * tiles + tile) * kSum + r % kTile * kTile);
                write_row(w_, rows_, sums, row + r, column + tile * kTile, std::min<int64_t>(kTile, width - tile * kTile));
            }
        }
    }

    const Weight& w_;
    const Rows& rows_;
    Decoder<Parts> decode_;
    int block_;  // rows of a block
    int64_t block_bytes_;
    const uint8_t* arranged_;
    float* sums_;  // [blocks, tiles, kTile rows, kTile columns]
    Scales* scales_;
    uint8_t* codes_;
    Multiply multiply_;
};

// Calls `use` with the size of a weight's groups.
template <class Use> auto for_group(const Weight& w, const Use& use) {
    switch (w.group) {
        case 16: return use(std::integral_constant<int, 16>());
        case 32: return use(std::integral_constant<int, 32>());
        case 64: return use(std::integral_constant<int, 64>());
        default: return use(std::integral_constant<int, 128>());
    }
}

// Calls `use` with the size of a weight's groups and its largest code, both as the vectors are compiled for.
template <int digits, class Use> void for_codes(const Weight& w, const Use& use) {
    using std::integral_constant;
    for_group(w, [&](auto size) {
        if constexpr (kMostByBytes<digits> >= 24 && kMostByBytes<digits> < 255) {
            if (in_nibbles(w)) return use(size, integral_constant<int, 24>());
        }
        use(size, integral_constant<int, 255>());
    });
}

}  // namespace quire::QUIRE_ISA
