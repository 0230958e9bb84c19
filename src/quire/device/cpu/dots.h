// Sums of codes by the integers of one row, by the instructions that there are. All are exact.
//
// Sums are undefined until `clear`. `add` takes a unit (four codes of each of sixteen columns) and four of each part,
// `between` bytes apart. `gather` follows `kUnits` units at the latest.
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

// Sums of products of neighbours of 16 bits.
QUIRE_INLINE I word_products(I a, I b) {
#if defined(__AVX512F__)
    return _mm512_madd_epi16(a, b);
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
    static constexpr int kUnits = 8;
    IntLanes digit[digits];

    QUIRE_INLINE void clear() { QUIRE_UNROLLED for (IntLanes& each : digit) each = all_ints(0); }
    QUIRE_INLINE void add(const IntLanes& unit, const uint8_t* parts, int64_t between) {
        QUIRE_UNROLLED for (int d = 0; d < digits; d++) {
            const I four = set_ints(four_bytes(parts + d * between));
            digit[d] = by_part<IntLanes>([&](int i) { return dot(digit[d].part[i], unit.part[i], four); });
        }
    }
    QUIRE_INLINE void gather() {}
    QUIRE_INLINE IntLanes whole() const {
        if constexpr (digits == 1) return digit[0];
        return quire::QUIRE_ISA::add(shift_left<8>(digit[digits - 1]), digit[0]);
    }
};

#elif defined(__AVX2__)

// Sums of neighbours' products of bytes, in 16 bits.
QUIRE_INLINE I add_byte_products(I sums, I codes, I digits) {
#if defined(__AVX512F__)
    return _mm512_add_epi16(sums, _mm512_maddubs_epi16(codes, digits));
#else
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, digits));
#endif
}

template <int most, int digits> struct ByteSums : ByteParts<digits> {
    static constexpr bool kWaits = false;
    static constexpr int kUnits = 2 * most * 128 * 8 < 1 << 15 ? 8 : 4;  // whose products 16 bits hold
    IntLanes some[digits], sums[digits];

    QUIRE_INLINE void clear() {
        QUIRE_UNROLLED for (int d = 0; d < digits; d++) some[d] = sums[d] = all_ints(0);
    }
    QUIRE_INLINE void add(const IntLanes& unit, const uint8_t* parts, int64_t between) {
        QUIRE_UNROLLED for (int d = 0; d < digits; d++) {
            const I four = set_ints(four_bytes(parts + d * between));
            some[d] = by_part<IntLanes>([&](int i) {
                return kept(add_byte_products(some[d].part[i], unit.part[i], four));
            });
        }
    }
    QUIRE_INLINE void gather() {
        const I ones = set_ints(0x00010001);
        QUIRE_UNROLLED for (int d = 0; d < digits; d++) {
            sums[d] = by_part<IntLanes>([&](int i) {
                return add_ints(sums[d].part[i], word_products(some[d].part[i], ones));
            });
            some[d] = all_ints(0);
        }
    }
    QUIRE_INLINE IntLanes whole() const {
        if constexpr (digits == 1) return sums[0];
        return quire::QUIRE_ISA::add(shift_left<8>(sums[digits - 1]), sums[0]);
    }
};

#else

template <int most, int digits> struct ByteSums : ByteParts<digits> {};

#endif

template <int digits> struct WordSums : WordParts<digits> {
    static constexpr bool kWaits = false;
    static constexpr int kUnits = 8;
    using Unit = typename WordParts<digits>::Unit;
    IntLanes sums;

    QUIRE_INLINE void clear() { sums = all_ints(0); }
    QUIRE_INLINE void add(const Unit& unit, const uint8_t* parts, int64_t) {
        QUIRE_UNROLLED for (int half = 0; half < 2; half++) {
            const I two = set_ints(four_bytes(parts + 4 * half));
            sums = by_part<IntLanes>([&](int i) {
                return kept(add_ints(sums.part[i], word_products(unit.half[half].part[i], two)));
            });
        }
    }
    QUIRE_INLINE void gather() {}
    QUIRE_INLINE IntLanes whole() const { return sums; }
};

// `few`: see `few_by_digits`.
template <int most, int digits, bool few = false>
using PartSums =
    std::conditional_t<(most <= kMostByBytes<few ? 1 : digits>), ByteSums<most, digits>, WordSums<digits>>;

// Rows whose sums stay in registers beside a unit's codes.
template <class Sums> constexpr int kRowsAtOnce = W == 16 || (W == 8 && Sums::kParts == 1) ? 4 : kByInstruction ? 2 : 1;

// Sums of a group of `size` codes a column by the digits of `rows` rows, as arranged.
template <int size, int rows, class Sums> class GroupSums {
    static constexpr int kChains = Sums::kWaits && rows <= 2 ? 2 : 1;  // of sums that do not wait for each other
    static constexpr int kTogether = std::min(size / 4, kByInstruction ? Sums::kUnits : 2);  // units

public:
    // `unit_of(n)` gives unit n; it is called with numbers in turn.
    template <class UnitOf> QUIRE_INLINE void add(const UnitOf& unit_of, const uint8_t* parts, int64_t between) {
        QUIRE_UNROLLED for (auto& chain : sums_)
            QUIRE_UNROLLED for (Sums& own : chain) own.clear();
        for (int first = 0; first < size / 4; first += kTogether) {
#pragma GCC unroll 8
            for (int i = 0; i < kTogether; i++) {
                const typename Sums::Unit unit = unit_of(first, i);
#pragma GCC unroll 4
                for (int row = 0; row < rows; row++) {
                    Sums& own = sums_[i % kChains][row];
                    own.add(unit, parts + (row * size + (first + i) * 4) * Sums::kWidth, between);
                }
            }
            QUIRE_UNROLLED for (auto& chain : sums_)
                QUIRE_UNROLLED for (Sums& own : chain) own.gather();
        }
    }
    // Adds a row's sums to `to`. `scales`: of the rows, and `block` floats later their sums of integers.
    QUIRE_INLINE FloatLanes accumulated(const Accumulator& add_to, int row, const float* scales, int block,
                                    const FloatLanes& to) const {
        IntLanes whole = sums_[0][row].whole();
        if constexpr (kChains > 1) whole = quire::QUIRE_ISA::add(whole, sums_[1][row].whole());
        return add_to(whole, scales + row, block, to);
    }

private:
    Sums sums_[kChains][rows];
};

}  // namespace quire::QUIRE_ISA
