// Sums of codes by the parts of one row, by the instructions that there are. All are exact.
//
// Sums are undefined until `clear`. `add` takes a unit (four codes of each of sixteen columns) and four of each part,
// `between` bytes apart. After at most `kUnits` units sums must `settle`.
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

template <int most> struct ByteSums : ByteParts {
    static constexpr int kUnits = 1 << 10;
    static constexpr bool kWaits = true;  // for the sum before: two chains of sums are faster than one
    IntLanes digit[kDigits];

    QUIRE_INLINE void clear() { QUIRE_UNROLLED for (IntLanes& each : digit) each = all_ints(0); }
    QUIRE_INLINE void add(const IntLanes& unit, const uint8_t* parts, int64_t between) {
        QUIRE_UNROLLED for (int d = 0; d < kDigits; d++) {
            const I four = set_ints(four_bytes(parts + d * between));
            digit[d] = by_part<IntLanes>([&](int i) { return dot(digit[d].part[i], unit.part[i], four); });
        }
    }
    QUIRE_INLINE void settle() {}
    QUIRE_INLINE IntLanes lower() const { return quire::QUIRE_ISA::add(shift_left<8>(digit[1]), digit[0]); }
    QUIRE_INLINE IntLanes high() const { return digit[2]; }
};

#elif defined(__AVX2__)

QUIRE_INLINE I add_pairs(I a, I b) {
#if defined(__AVX512F__)
    return kept(_mm512_add_epi16(a, b));
#else
    return kept(_mm256_add_epi16(a, b));
#endif
}
QUIRE_INLINE I pair_products(I codes, I digits) {
#if defined(__AVX512F__)
    return _mm512_maddubs_epi16(codes, digits);
#else
    return _mm256_maddubs_epi16(codes, digits);
#endif
}
template <int most> struct ByteSums : ByteParts {
    static constexpr int kUnits = most <= 15 ? 8 : 4;  // 2 * 128 * 15 * 8 is below 2^15
    static constexpr bool kWaits = false;
    IntLanes pairs[kDigits];
    IntLanes settled[2];

    QUIRE_INLINE void clear() {
        QUIRE_UNROLLED for (IntLanes& each : pairs) each = all_ints(0);
        settled[0] = settled[1] = all_ints(0);
    }
    QUIRE_INLINE void add(const IntLanes& unit, const uint8_t* parts, int64_t between) {
        QUIRE_UNROLLED for (int d = 0; d < kDigits; d++) {
            const I four = set_ints(four_bytes(parts + d * between));
            pairs[d] = by_part<IntLanes>([&](int i) { return add_pairs(pairs[d].part[i], pair_products(unit.part[i], four)); });
        }
    }
    QUIRE_INLINE void settle() {
        const I ones = set_ints(0x00010001), above = set_ints(0x01000100);
        settled[0] = by_part<IntLanes>([&](int i) {
            const I lower = add_ints(word_products(pairs[0].part[i], ones), word_products(pairs[1].part[i], above));
            return add_ints(settled[0].part[i], lower);
        });
        settled[1] = by_part<IntLanes>(
            [&](int i) { return add_ints(settled[1].part[i], word_products(pairs[2].part[i], ones)); });
        QUIRE_UNROLLED for (int d = 0; d < kDigits; d++) pairs[d] = all_ints(0);
    }
    QUIRE_INLINE IntLanes lower() const { return settled[0]; }
    QUIRE_INLINE IntLanes high() const { return settled[1]; }
};

#else

template <int most> struct ByteSums : ByteParts {
    static constexpr int kUnits = 1 << 10;
    static constexpr bool kWaits = false;
    IntLanes sums[2];

    QUIRE_INLINE void clear() { sums[0] = sums[1] = all_ints(0); }
    QUIRE_INLINE void add(const IntLanes& unit, const uint8_t* parts, int64_t between) {
        QUIRE_UNROLLED for (int at = 0; at < 4; at++) {
            const auto digit = [&](int d) { return (int)(int8_t)parts[d * between + at]; };
            const I lower = set_ints(digit(0) + 256 * digit(1)), high = set_ints(digit(2));
            QUIRE_UNROLLED for (int i = 0; i < kVectors; i++) {
                const I codes = bit_and((I)((U)unit.part[i] >> (8 * at)), set_ints(255));
                sums[0].part[i] += codes * lower;
                sums[1].part[i] += codes * high;
            }
        }
    }
    QUIRE_INLINE void settle() {}
    QUIRE_INLINE IntLanes lower() const { return sums[0]; }
    QUIRE_INLINE IntLanes high() const { return sums[1]; }
};
#endif

// Lower and high parts of two bytes each.
struct WordSums : WordParts {
    static constexpr int kUnits = 1 << 10;
    static constexpr bool kWaits = false;
    IntLanes sums[2];

    QUIRE_INLINE void clear() { sums[0] = sums[1] = all_ints(0); }
    QUIRE_INLINE void add(const IntLanes& unit, const uint8_t* parts, int64_t between) {
        const IntLanes bytes = all_ints(0x00ff00ff);
        const IntLanes codes[2] = {bit_and(unit, bytes), bit_and(shift_right<8>(unit), bytes)};
        QUIRE_UNROLLED for (int part = 0; part < 2; part++) {
            QUIRE_UNROLLED for (int pair = 0; pair < 2; pair++) {
                const I two = set_ints(four_bytes(parts + part * between + 4 * pair));
                sums[part] = by_part<IntLanes>([&](int i) {
                    return kept(add_ints(sums[part].part[i], word_products(codes[pair].part[i], two)));
                });
            }
        }
    }
    QUIRE_INLINE void settle() {}
    QUIRE_INLINE IntLanes lower() const { return sums[0]; }
    QUIRE_INLINE IntLanes high() const { return sums[1]; }
};

template <int most> using PartSums = std::conditional_t<(most <= kMostByBytes), ByteSums<most>, WordSums>;

// Rows whose sums stay in registers beside a unit's codes.
template <int most> constexpr int kRowsAtOnce = W == 16 ? 4 : kByInstruction ? 2 : 1;

// Sums of a group of `size` codes a column by the digits of `rows` rows, as arranged.
template <int size, int rows, int most> class GroupSums {
    using Sums = PartSums<most>;
    static constexpr int kChains = Sums::kWaits && rows <= 2 ? 2 : 1;  // of sums that do not wait for each other
    static constexpr int kTogether = std::min(size / 4, kByInstruction ? 8 : 2);  // units

public:
    // `unit_of(n)` gives unit n; it is called with numbers in turn.
    template <class UnitOf> QUIRE_INLINE void add(const UnitOf& unit_of, const uint8_t* parts, int64_t between) {
        QUIRE_UNROLLED for (auto& chain : sums_)
            QUIRE_UNROLLED for (Sums& own : chain) own.clear();
        for (int first = 0; first < size / 4; first += kTogether) {
#pragma GCC unroll 8
            for (int i = 0; i < kTogether; i++) {
                const IntLanes unit = unit_of(first, i);
#pragma GCC unroll 4
                for (int row = 0; row < rows; row++) {
                    Sums& own = sums_[i % kChains][row];
                    own.add(unit, parts + (row * size + (first + i) * 4) * Sums::kWidth, between);
                    if ((i + 1) % Sums::kUnits == 0 || i + 1 == kTogether) own.settle();
                }
            }
        }
    }
    // Adds a row's sums to `to`. `scales`: of the rows, and `block` floats later their sums of integers.
    QUIRE_INLINE FloatLanes accumulated(const Accumulator& add_to, int row, const float* scales, int block,
                                    const FloatLanes& to) const {
        IntLanes lower = sums_[0][row].lower(), high = sums_[0][row].high();
        if constexpr (kChains > 1) {
            lower = quire::QUIRE_ISA::add(lower, sums_[1][row].lower());
            high = quire::QUIRE_ISA::add(high, sums_[1][row].high());
        }
        return add_to(lower, high, scales + row, block, to);
    }

private:
    Sums sums_[kChains][rows];
};

}  // namespace quire::QUIRE_ISA
