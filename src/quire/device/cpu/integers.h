// Products with packed weights in integers. Included by what is compiled for AVX-512 with VNNI and VBMI.
//
// A group of a row of x becomes integers below 2^22 times a power of two, each of three signed bytes (digits).
// Codes are unsigned bytes, so a group's sums of codes by digits are exact in any order: VNNI and AMX get the
// same. What they are as floats is added group by group, in one order and with the same roundings for any
// number of rows.
//
// Sixteen columns are multiplied together, one a lane: a "unit" is four codes of each, 64 bytes.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "tiles.h"
#include "units.h"

namespace {  // compiled for each instruction set that includes it

using namespace quire;
using quire::tiles::aligned;
using quire::tiles::kSum;
using quire::tiles::kTile;
using quire::tiles::lanes;
using quire::tiles::row_of;
using quire::tiles::transpose;
using quire::tiles::write_row;

constexpr int kDigits = 3;
constexpr int64_t kSpan = 128;        // depth that is decoded at once: at least a group
constexpr int64_t kSpanBytes = kSpan * kTile;
constexpr int64_t kScaled = 16;       // groups whose scales are read at once
constexpr int kTogether = 4;          // tiles of columns that share a read of x
constexpr int64_t kRowsTogether = 256;
constexpr int kFewByTiles = 4;        // rows that meet codes in tiles while these are in registers

inline bool in_integers(const Weight& w) {
    return w.storage == Storage::affine || w.storage == Storage::mxfp4 || w.storage == Storage::nvfp4;
}
inline bool in_nibbles(const Weight& w) { return w.bits == 4; }
inline bool reads_tiles(Storage storage, int bits) {
    return storage != Storage::mxfp8 && (bits == 4 || bits == 8);
}

// -- rows of x --------------------------------------------------------------------------------------

// Rows lie in blocks of 16; a block that is the only one has no more rows than there are. For each group of
// a block: the digits [kDigits, rows, group], then each row's scale, and each row's sum of integers.
inline int block_rows(int64_t first, int64_t count) {
    return first == 0 && count < kTile ? (int)count : kTile;
}
inline int64_t group_bytes(const Weight& w, int rows) { return rows * (kDigits * w.group + 8); }
inline int64_t block_bytes(const Weight& w, int rows) { return w.depth / w.group * group_bytes(w, rows); }

inline int64_t integer_floats(const Weight& w, int64_t count) {
    const int64_t blocks = (count + kTile - 1) / kTile;
    return 16 + blocks * block_bytes(w, block_rows(0, count)) / 4;  // 16: aligned
}

// One group of one row of a block.
inline void to_digits(const float* x, int group, __m128i order, int row, int rows, uint8_t* to) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    for (int at = 0; at < group; at += kTile)
        most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(x + at), magnitude));
    const int largest = (int)(_mm512_reduce_max_epu32(most) >> 23);  // exponent
    const int exponent = std::max(largest, 22);
    const auto power = [](int biased) {
        const uint32_t bits = (uint32_t)biased << 23;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    };
    const bool finite = largest < 255;
    const __m512 inverse = _mm512_set1_ps(finite ? power(275 - exponent) : 0.0f);
    const __m512i offset = _mm512_set1_epi32(0x808080);
    __m512i sum = _mm512_setzero_si512();
    for (int at = 0; at < group; at += kTile) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + at), inverse));
        sum = _mm512_add_epi32(sum, whole);
        __m512i digits = _mm512_xor_si512(_mm512_add_epi32(whole, offset), offset);
        for (int digit = 0; digit < kDigits; digit++) {
            const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(digits), order);
            _mm_storeu_si128((__m128i*)(to + (digit * rows + row) * group + at), bytes);
            digits = _mm512_srli_epi32(digits, 8);
        }
    }
    float* scales = (float*)(to + kDigits * rows * group);
    scales[row] = finite ? power(exponent - 21) : __builtin_nanf("");
    scales[rows + row] = (float)_mm512_reduce_add_epi32(sum);
}

inline void arrange_integers(const Weight& w, const Source& x, int64_t begin, int64_t end, float* arranged) {
    const int rows = block_rows(begin, end);
    auto* block = (uint8_t*)aligned(arranged) + begin / kTile * block_bytes(w, rows);
    // Of a word's eight nibbles, those in low halves of bytes come first.
    const __m128i order = in_nibbles(w)
                              ? _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
                              : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int64_t bytes = group_bytes(w, rows);
    for (; begin < end; begin += kTile, block += block_bytes(w, rows)) {
        const int present = (int)std::min<int64_t>(kTile, end - begin);
        if (present < rows) std::memset(block, 0, block_bytes(w, rows));
        for (int row = 0; row < present; row++) {
            const float* from = row_of(x, begin + row);
            for (int64_t at = 0; at < w.depth; at += w.group)
                to_digits(from + at, w.group, order, row, rows, block + at / w.group * bytes);
        }
    }
}

// -- weights ----------------------------------------------------------------------------------------

// `count` columns from `column` on of a weight whose rows of memory are `stride` bytes: 64 bytes of each, or
// fewer at the end, from byte `at` on. Fetches the next columns' into the cache.
inline void load_columns(const uint8_t* values, int64_t stride, int count, int bytes, __m512i* to) {
    const uint8_t* next = values + kTile * stride;
    if (count == kTile && bytes == 64) {
        for (int c = 0; c < kTile; c++, values += stride, next += stride) {
            to[c] = _mm512_loadu_si512(values);
            _mm_prefetch((const char*)next, _MM_HINT_T1);
        }
        return;
    }
    const __mmask64 present = ~0ull >> (64 - bytes);
    for (int c = 0; c < kTile; c++, values += stride, next += stride) {
        to[c] = c < count ? _mm512_maskz_loadu_epi8(present, values) : _mm512_setzero_si512();
        _mm_prefetch((const char*)next, _MM_HINT_T1);
    }
}

// How codes become unsigned bytes.
class Decoder {
public:
    explicit Decoder(const Weight& w)
        : w_(w), stride_(w.depth * w.bits / 8), nibbles_(in_nibbles(w)), table_(w.storage != Storage::affine) {
        alignas(64) uint8_t spread[64], shifts[64];
        for (int i = 0; i < 64; i++) {
            spread[i] = (uint8_t)std::min(i / 8 * w.bits + std::min(i % 8, w.bits - 1), 63);
            shifts[i] = (uint8_t)(i % 8 * w.bits);
        }
        spread_ = _mm512_load_si512(spread);
        shifts_ = _mm512_load_si512(shifts);
        mask_ = _mm512_set1_epi8((char)((1 << w.bits) - 1));
    }

    // Depth [at, at + kSpan), or to the end, of columns: units to `to`.
    void operator()(int64_t column, int count, int64_t at, uint8_t* to) const {
        const int64_t depth = std::min(kSpan, w_.depth - at);
        const uint8_t* from = (const uint8_t*)w_.values + column * stride_;
        if (nibbles_) {
            table_ ? nibbles<true>(from, count, at, depth, to) : nibbles<false>(from, count, at, depth, to);
            return;
        }
        if (w_.tiled) {  // whose words are units
            for (int64_t done = 0; done < depth; done += 4 * kTile)
                bytes(from + (at + done) * kTile, (int)(depth - done) / 4, to + done * kTile);
            return;
        }
        from += at * w_.bits / 8;
        for (int64_t done = 0; done < depth; done += 64) {
            const int64_t codes = std::min<int64_t>(64, depth - done);
            others(from + done * w_.bits / 8, count, codes, to + done * kTile);
        }
    }

private:
    template <bool table>
    void nibbles(const uint8_t* from, int count, int64_t at, int64_t depth, uint8_t* to) const {
        const Nibbles<table> units;
        __m512i words[kTile];
        if (w_.tiled) {
            load_tile(from + at / 8 * kUnit, (int)depth / 8, words);
        } else {
            load_columns(from + at / 2, stride_, count, (int)depth / 2, words);
            transpose(words);
        }
        for (int i = 0; i < kTile; i++) {
            _mm512_store_si512(to + 2 * i * kUnit, units.get(words[i], 0));
            _mm512_store_si512(to + (2 * i + 1) * kUnit, units.get(words[i], 1));
        }
    }

    static void bytes(const uint8_t* from, int count, uint8_t* to) {
        __m512i words[kTile];
        load_tile(from, count, words);
        for (int i = 0; i < kTile; i++) _mm512_store_si512(to + i * kUnit, words[i]);
    }

    // Codes of any number of bits, `codes` of each column, at most 64.
    void others(const uint8_t* from, int count, int64_t codes, uint8_t* to) const {
        __m512i bytes[kTile];
        load_columns(from, stride_, count, (int)codes * w_.bits / 8, bytes);
        for (__m512i& each : bytes) {
            const __m512i packs = _mm512_permutexvar_epi8(spread_, each);
            each = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts_, packs), mask_);
        }
        transpose(bytes);
        for (int i = 0; i < kTile; i++) _mm512_store_si512(to + i * kUnit, bytes[i]);
    }

    const Weight& w_;
    int64_t stride_;
    bool nibbles_, table_;
    __m512i spread_, shifts_, mask_;
};

// Sixteen scales and biases, or fewer.
struct Sixteen {
    __m512 scales, biases;

    // Those from number `at` on, as they lie in memory. Fetches those from `next` on into the cache.
    Sixteen(const Weight& w, int64_t at, int64_t next, __mmask16 present) {
        if (w.storage == Storage::affine) {
            scales = load(w, w.scales, at, next, present);
            biases = load(w, w.biases, at, next, present);
            return;
        }
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(present, (const uint8_t*)w.scales + at));
        const __m512 scale = w.storage == Storage::mxfp4 ? power_of_two(bytes) : e4m3(bytes);
        scales = _mm512_mul_ps(scale, _mm512_set1_ps(0.5f));
        biases = _mm512_mul_ps(scale, _mm512_set1_ps(-6.0f));
    }

private:
    static __m512 load(const Weight& w, const void* from, int64_t at, int64_t next, __mmask16 present) {
        if (w.scale_type == Storage::float32) {
            _mm_prefetch((const char*)from + next * 4, _MM_HINT_T1);
            return _mm512_maskz_loadu_ps(present, (const float*)from + at);
        }
        _mm_prefetch((const char*)from + next * 2, _MM_HINT_T1);
        const __m256i halves = _mm256_maskz_loadu_epi16(present, (const uint16_t*)from + at);
        return w.scale_type == Storage::bfloat16 ? (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)
                                                 : _mm512_cvtph_ps(halves);
    }
    static __m512 power_of_two(__m512i bytes) { return (__m512)_mm512_slli_epi32(bytes, 23); }
    static __m512 e4m3(__m512i bytes) {
        const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(bytes, _mm512_set1_epi32(0x80)), 24);
        const __m512i rest = _mm512_slli_epi32(_mm512_and_si512(bytes, _mm512_set1_epi32(0x7f)), 20);
        return _mm512_mul_ps((__m512)_mm512_or_si512(sign, rest), _mm512_set1_ps(0x1p120f));
    }
};

// Scales and biases of groups: [kScaled, kTile].
struct Scales {
    alignas(64) float scales[kScaled * kTile], biases[kScaled * kTile];

    // Of `count` columns, from a group on.
    void read(const Weight& w, int64_t column, int count, int64_t group) {
        const int64_t groups = w.depth / w.group, some = std::min(kScaled, groups - group);
        if (w.tiled) return read_tile(w, column * groups + group * kTile, some);
        const int64_t first = column * groups + group;
        __m512i s[kTile], b[kTile];
        for (int c = 0; c < kTile; c++) s[c] = b[c] = _mm512_setzero_si512();
        for (int c = 0; c < count; c++) {
            const int64_t at = first + c * groups;
            const Sixteen own(w, at, at + kTile * groups, lanes(some));
            s[c] = (__m512i)own.scales;
            b[c] = (__m512i)own.biases;
        }
        transpose(s);
        transpose(b);
        for (int g = 0; g < kScaled; g++) {
            _mm512_store_si512(scales + g * kTile, s[g]);
            _mm512_store_si512(biases + g * kTile, b[g]);
        }
    }

private:
    void read_tile(const Weight& w, int64_t at, int64_t groups) {
        for (int g = 0; g < groups; g++, at += kTile) {
            const Sixteen own(w, at, at + kScaled * kTile, lanes(kTile));
            _mm512_store_ps(scales + g * kTile, own.scales);
            _mm512_store_ps(biases + g * kTile, own.biases);
        }
    }
};

// -- products ---------------------------------------------------------------------------------------

// One group, of `size`, of a block of rows by tiles of columns.
template <int size> struct Group {
    const uint8_t* codes;  // tile t's units at codes + t * kSpanBytes
    const Scales* scales;  // tile t's at scales[t], in row `number`
    int number, tiles;
    const uint8_t* digits;  // as arranged
    int rows;
    float* sums;  // [tiles, kTile rows, kTile columns]

    const float* row_scales() const { return (const float*)(digits + kDigits * rows * size); }
};

// A row's sums of a group, from those of its digits.
struct Accumulator {
    __m512 scales, biases;
    template <int size>
    Accumulator(const Group<size>& g, int tile)
        : scales(_mm512_load_ps(g.scales[tile].scales + g.number * kTile)),
          biases(_mm512_load_ps(g.scales[tile].biases + g.number * kTile)) {}
    explicit Accumulator(const Sixteen& from) : scales(from.scales), biases(from.biases) {}

    void operator()(__m512i low, __m512i middle, __m512i high, const float* row, int rows, float* sums) const {
        _mm512_store_ps(sums, (*this)(low, middle, high, row, rows, _mm512_load_ps(sums)));
    }
    __m512 operator()(__m512i low, __m512i middle, __m512i high, const float* row, int rows, __m512 sums) const {
        const __m512i lower = _mm512_add_epi32(_mm512_slli_epi32(middle, 8), low);
        const __m512 whole =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(65536.0f), _mm512_cvtepi32_ps(lower));
        const __m512 offset = _mm512_mul_ps(biases, _mm512_set1_ps(row[rows]));
        const __m512 value = _mm512_fmadd_ps(whole, scales, offset);
        return _mm512_fmadd_ps(value, _mm512_set1_ps(row[0]), sums);
    }
};

template <int size> struct Vnni {
    static constexpr int64_t kScratch = 0;  // floats
    explicit Vnni(float*) {}
    void begin(int) const {}
    void end() const {}

    void operator()(const Group<size>& g) const {
        for (int tile = 0; tile < g.tiles; tile++) {
            int row = 0;
            for (; row + 4 <= g.rows; row += 4) multiply<4>(g, tile, row);
            for (; row + 2 <= g.rows; row += 2) multiply<2>(g, tile, row);
            if (row < g.rows) multiply<1>(g, tile, row);
        }
    }

private:
    template <int rows> static void multiply(const Group<size>& g, int tile, int first) {
        constexpr int kChains = rows == 1 ? 2 : 1;  // of sums that do not wait for each other
        __m512i sums[kChains][rows][kDigits] = {};
        const uint8_t* codes = g.codes + tile * kSpanBytes;
        const uint8_t* x = g.digits + first * size;
        const int64_t between = g.rows * size;
        for (int at = 0; at < size; at += 4 * kChains) {
#pragma GCC unroll 2
            for (int chain = 0; chain < kChains; chain++) {
                const int here = at + 4 * chain;
                const __m512i unit = _mm512_load_si512(codes + here * kTile);
#pragma GCC unroll 4
                for (int row = 0; row < rows; row++) {
#pragma GCC unroll 3
                    for (int digit = 0; digit < kDigits; digit++) {
                        int32_t four;
                        std::memcpy(&four, x + row * size + here + digit * between, 4);
                        __m512i& sum = sums[chain][row][digit];
                        sum = _mm512_dpbusd_epi32(sum, unit, _mm512_set1_epi32(four));
                    }
                }
            }
        }
        const Accumulator add(g, tile);
        for (int row = 0; row < rows; row++) {
            __m512i* own = sums[0][row];
            if constexpr (kChains > 1)
                for (int digit = 0; digit < kDigits; digit++)
                    own[digit] = _mm512_add_epi32(own[digit], sums[1][row][digit]);
            add(own[0], own[1], own[2], g.row_scales() + first + row, g.rows,
                g.sums + tile * kSum + (first + row) * kTile);
        }
    }
};

// A product with a weight whose groups are `size`; `Multiply` adds up each.
template <template <int> class Multiply, int size> class IntegerProduct {
public:
    static int64_t scratch_floats() {
        return 16 + kRowsTogether * kTogether * kTile + kTogether * (kSpanBytes + (int64_t)sizeof(Scales)) / 4 +
               Multiply<size>::kScratch;
    }
    IntegerProduct(const Weight& w, const Rows& rows, float* scratch)
        : w_(w), rows_(rows), decode_(w), block_(block_rows(0, rows.count)),
          block_bytes_(block_bytes(w, block_)), arranged_((const uint8_t*)aligned((float*)rows.arranged)),
          sums_(aligned(scratch)), scales_((Scales*)(sums_ + kRowsTogether * kTogether * kTile)),
          codes_((uint8_t*)(scales_ + kTogether)), multiply_((float*)(codes_ + kTogether * kSpanBytes)) {}

    void run(int64_t begin, int64_t end) const {
        multiply_.begin(block_);
        const int64_t together = (rows_.count > kTile ? kTogether : 1) * kTile;
        for (int64_t column = begin; column < end; column += together)
            for (int64_t row = 0; row < rows_.count; row += kRowsTogether)
                columns(column, std::min(together, end - column), row);
        multiply_.end();
    }

private:
    void columns(int64_t column, int64_t width, int64_t row) const {
        const int tiles = (int)((width + kTile - 1) / kTile);
        const int64_t count = std::min(kRowsTogether, rows_.count - row), blocks = (count + kTile - 1) / kTile;
        std::memset(sums_, 0, blocks * tiles * kSum * 4);
        for (int64_t group = 0; group < w_.depth / size; group++) {
            const int64_t at = group * size;
            for (int tile = 0; tile < tiles; tile++) {
                const int64_t first = column + tile * kTile;
                const int present = (int)std::min<int64_t>(kTile, width - tile * kTile);
                if (group % kScaled == 0) scales_[tile].read(w_, first, present, group);
                if (at % kSpan == 0) decode_(first, present, at, codes_ + tile * kSpanBytes);
            }
            const uint8_t* x = arranged_ + row / kTile * block_bytes_ + group * block_ * (kDigits * size + 8);
            for (int64_t b = 0; b < blocks; b++, x += block_bytes_)
                multiply_(Group<size>{codes_ + at % kSpan * kTile, scales_, (int)(group % kScaled), tiles, x, block_,
                                      sums_ + b * tiles * kSum});
        }
        for (int64_t r = 0; r < count; r++) {
            for (int tile = 0; tile < tiles; tile++) {
                const __m512 sums = _mm512_load_ps(sums_ + (r / kTile * tiles + tile) * kSum + r % kTile * kTile);
                write_row(w_, rows_, sums, row + r, column + tile * kTile, std::min<int64_t>(kTile, width - tile * kTile));
            }
        }
    }

    const Weight& w_;
    const Rows& rows_;
    Decoder decode_;
    int block_;  // rows of a block
    int64_t block_bytes_;
    const uint8_t* arranged_;
    float* sums_;  // [blocks, tiles, kTile rows, kTile columns]
    Scales* scales_;
    uint8_t* codes_;
    Multiply<size> multiply_;
};

template <template <int> class Multiply>
void multiply_integers(const Weight& w, const Rows& rows, int64_t begin, int64_t end, float* scratch) {
    switch (w.group) {
        case 16: return IntegerProduct<Multiply, 16>(w, rows, scratch).run(begin, end);
        case 32: return IntegerProduct<Multiply, 32>(w, rows, scratch).run(begin, end);
        case 64: return IntegerProduct<Multiply, 64>(w, rows, scratch).run(begin, end);
        default: return IntegerProduct<Multiply, 128>(w, rows, scratch).run(begin, end);
    }
}

}  // namespace
