// Sums of codes by the integers of one row, by the instructions that there are. All are exact.
//
// `clear` comes before all. `add` takes a unit (see units.h) and four bytes of each part, `between` bytes apart.
// `gather` follows `kUnits` units at the latest. `first`: nothing was added before; where `kGathers`, since the last
// `gather`.
#pragma once

#include <type_traits>

#include "digits.h"

namespace quire::QUIRE_ISA {

QUIRE_INLINE int four_bytes(const uint8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return four;
}

// Adds now: GCC would first make all the products of a loop, more than there are registers for, and add them as a
// tree.
QUIRE_INLINE I kept(I sum) {
#if defined(__AVX512F__)
    asm("" : "+v"(sum));
#elif defined(__AVX2__)
    asm("" : "+x"(sum));
#endif
    return sum;
}

// The same pointer. GCC would keep an address for each row from group to group, more than there are registers for.
template <class T> QUIRE_INLINE T* afresh(T* pointer) {
    asm("" : "+r"(pointer));
    return pointer;
}

// Sums of products of neighbours of 16 bits. `a` may be read from memory as it is multiplied: GCC knows it of the second
// operand alone.
QUIRE_INLINE I word_products(I a, I b) {
#if defined(__AVX512F__)
    return _mm512_madd_epi16(b, a);
#elif defined(__AVX2__)
    return _mm256_madd_epi16(a, b);
#else
    const auto upper = [](I x) { return x >> 16; };
    const auto lower = [](I x) { return (I)((U)x << 16) >> 16; };
    return lower(a) * lower(b) + upper(a) * upper(b);
#endif
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)

QUIRE_INLINE I dot(I sum, I codes, I digits) {
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sum, codes, digits);
#elif defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, codes, digits);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (I)vusdotq_s32((int32x4_t)sum, (uint8x16_t)codes, (int8x16_t)digits);
#else
    return (I)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)digits);
#endif
}

template <int most, int digits> struct ByteSums : ByteParts<digits> {
    static constexpr bool kWaits = true;  // for the sum before: two chains of sums are faster than one
    static constexpr bool kGathers = false;
    static constexpr bool kAddsFirst = true;  // the first unit, too, to zeros
    static constexpr int kUnits = 8;
    static constexpr int kRows = W == 4 ? 2 : 4;  // whose sums stay in registers beside a unit's codes
    static constexpr int kTiles = 1;              // of columns that share a read of rows
    static constexpr bool kReadsUnits = false;    // from memory as it multiplies: a row's numbers stay in a register
    IntLanes digit[digits];

    QUIRE_INLINE void clear() { QUIRE_UNROLLED for (IntLanes& each : digit) each = all_ints(0); }
    QUIRE_INLINE void add(const IntLanes& unit, const uint8_t* parts, int64_t between, bool) {
        QUIRE_UNROLLED for (int d = 0; d < digits; d++) {
            const I four = set_ints(four_bytes(parts + d * between));
            digit[d] = by_part<IntLanes>([&](int i) { return dot(digit[d].part[i], unit.part[i], four); });
        }
    }
    QUIRE_INLINE void gather(bool) {}
    QUIRE_INLINE IntLanes whole() const {
        if constexpr (digits == 1) return digit[0];
        return quire::QUIRE_ISA::add(shift_left<8>(digit[digits - 1]), digit[0]);
    }
};

#elif defined(__AVX2__)

// Sums of neighbours' products of bytes, in 16 bits.
QUIRE_INLINE I byte_products(I codes, I digits) {
#if defined(__AVX512F__)
    return _mm512_maddubs_epi16(codes, digits);
#else
    return _mm256_maddubs_epi16(codes, digits);
#endif
}
QUIRE_INLINE I add_words(I a, I b) {
#if defined(__AVX512F__)
    return _mm512_add_epi16(a, b);
#else
    return _mm256_add_epi16(a, b);
#endif
}

template <int most, int digits> struct ByteSums : ByteParts<digits> {
    static constexpr bool kWaits = false, kGathers = true, kAddsFirst = false;
    static constexpr int kUnits = 2 * most * 128 * 8 < 1 << 15 ? 8 : 4;  // whose products 16 bits hold
    static constexpr int kRows = W == 16 || digits == 1 ? 4 : 2, kTiles = W == 16 ? 2 : 1;
    static constexpr bool kReadsUnits = false;
    IntLanes some[digits], sums;

    QUIRE_INLINE void clear() {}
    QUIRE_INLINE void add(const IntLanes& unit, const uint8_t* parts, int64_t between, bool first) {
        QUIRE_UNROLLED for (int d = 0; d < digits; d++) {
            const I four = set_ints(four_bytes(parts + d * between));
            some[d] = by_part<IntLanes>([&](int i) {
                const I products = byte_products(unit.part[i], four);
                return kept(first ? products : add_words(some[d].part[i], products));
            });
        }
    }
    QUIRE_INLINE void gather(bool first) {
        QUIRE_UNROLLED for (int d = 0; d < digits; d++) {
            const I factor = set_ints(d ? 256 * 0x00010001 : 0x00010001);
            sums = by_part<IntLanes>([&](int i) {
                const I own = word_products(some[d].part[i], factor);
                return first && d == 0 ? own : add_ints(sums.part[i], own);
            });
        }
    }
    QUIRE_INLINE IntLanes whole() const { return sums; }
};

#else

template <int most, int digits> struct ByteSums : ByteParts<digits> {};

#endif

// Integers of any number of digits, so that there is one such code.
struct WordSums : Words {
    static constexpr bool kWaits = false, kGathers = false, kAddsFirst = false;
    static constexpr int kUnits = W == 16 ? 4 : 16;
    static constexpr int kRows = W == 16 ? 8 : W == 8 ? 6 : kByInstruction ? 2 : 1, kTiles = W == 16 ? 2 : 1;
    static constexpr bool kReadsUnits = W >= 8;
    IntLanes sums;

    QUIRE_INLINE void clear() {}
    QUIRE_INLINE void add(const IntLanes& unit, const uint8_t* parts, int64_t, bool first) {
        const I two = set_ints(four_bytes(parts));
        sums = by_part<IntLanes>([&](int i) {
            const I products = word_products(unit.part[i], two);
            return kept(first ? products : add_ints(sums.part[i], products));
        });
    }
    QUIRE_INLINE void gather(bool) {}
    QUIRE_INLINE IntLanes whole() const { return sums; }
};

// `few`: see `few_by_digits`.
template <int most, int digits, bool few = false>
using PartSums =
    std::conditional_t<(most <= kMostByBytes<few ? 1 : digits>), ByteSums<most, digits>, WordSums>;

// Calls `use` with a number in [1, most], known to the compiler.
template <int most, class Use> QUIRE_INLINE void with_known(int number, const Use& use) {
    if constexpr (most > 1) {
        if (number < most) return with_known<most - 1>(number, use);
    }
    use(std::integral_constant<int, most>());
}

// Calls `use` with a number of rows, at most `most` and known to the compiler, and the first of them: as few calls as
// cover `rows` rows, of about as many each.
template <int most, class Use> QUIRE_INLINE void in_passes(int rows, const Use& use) {
    const int passes = (rows + most - 1) / most;
    for (int pass = 0; pass < passes; pass++) {
        const int first = rows * pass / passes, past = rows * (pass + 1) / passes;
        with_known<most>(past - first, [&](auto count) __attribute__((always_inline)) { use(count, first); });
    }
}

// Sums of a group of `size` codes a column of `tiles` tiles by the digits of `rows` rows, as arranged.
template <int size, int rows, class Sums, int tiles = 1> class GroupSums {
    static constexpr int kChains = Sums::kWaits && rows <= 2 ? 2 : 1;  // of sums that do not wait for each other
    static constexpr int kAll = size / Sums::kCodes;  // units
    static constexpr int kTogether = std::min(kAll, kByInstruction ? Sums::kUnits : 4);  // words' units, whole

public:
    // `units.get(tile, i)` gives a tile's unit `i` of those to come; it is called with numbers in turn, and
    // `units.advance(count)` after some of them.
    template <class Units> QUIRE_INLINE void add(Units units, const uint8_t* parts, int64_t between) {
        each_sum([](Sums& own) __attribute__((always_inline)) { own.clear(); });
        if constexpr (!Sums::kAddsFirst) add_some(units, parts, between, true);
        for (int done = Sums::kAddsFirst ? 0 : kTogether; done < kAll; done += kTogether)
            add_some(units, parts, between, false);
    }
    // Adds a row's sums to `to`. `scales`: of the rows, and `block` floats later their sums of integers.
    QUIRE_INLINE FloatLanes accumulated(const Accumulator& add_to, int tile, int row, const float* scales, int block,
                                    const FloatLanes& to) const {
        IntLanes whole = sums_[0][row][tile].whole();
        if constexpr (kChains > 1) whole = quire::QUIRE_ISA::add(whole, sums_[1][row][tile].whole());
        return add_to(whole, scales + row, block, to);
    }

private:
    template <class Use> QUIRE_INLINE void each_sum(const Use& use) {
        QUIRE_UNROLLED for (auto& chain : sums_)
            QUIRE_UNROLLED for (auto& row : chain)
                QUIRE_UNROLLED for (Sums& own : row) use(own);
    }
    template <class Units>
    QUIRE_INLINE void add_some(Units& units, const uint8_t*& parts, int64_t between, bool begins) {
        QUIRE_UNROLLED for (int i = 0; i < kTogether; i++) {
            IntLanes unit[tiles];
            QUIRE_UNROLLED for (int tile = 0; tile < tiles; tile++) unit[tile] = units.get(tile, i);
            QUIRE_UNROLLED for (int row = 0; row < rows; row++) {
                const uint8_t* from = parts + row * size * Sums::kWidth + i * 4;
                QUIRE_UNROLLED for (int tile = 0; tile < tiles; tile++)
                    sums_[i % kChains][row][tile].add(unit[tile], from, between,
                                                      i < kChains && (begins || Sums::kGathers));
            }
        }
        each_sum([begins](Sums& own) __attribute__((always_inline)) { own.gather(begins); });
        units.advance(kTogether);
        parts += kTogether * 4;
    }

    Sums sums_[kChains][rows][tiles];
};

}  // namespace quire::QUIRE_ISA
