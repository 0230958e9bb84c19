// Codes in tiles as units: four codes of each of 16 columns, a byte each, or two, 16 bits each.
#pragma once

#include "lanes.h"

namespace quire::QUIRE_ISA {

constexpr int kUnit = 64;         // bytes
constexpr int64_t kAhead = 4096;  // bytes that are fetched before they are read

inline bool reads_tiles(Storage storage, int bits) {
    return storage != Storage::mxfp8 && storage != Storage::fp8 && (bits == 4 || bits == 8);
}

// Codes in bytes as unit 0 or 1 of those of 16 bits.
QUIRE_INLINE IntLanes widened(const IntLanes& bytes, int unit) {
    return unit ? shift_words<8>(bytes) : bit_and(bytes, all_ints(0x00ff00ff));
}

// The units of a word of each column, of `codes` codes each. Of eight nibbles, those in low halves of bytes come first;
// `table`: they are E2M1.
template <bool table> struct Nibbles {
    static constexpr int kBits = 4;
    static constexpr int kMost = table ? 24 : 15;  // the largest code
    template <int codes> QUIRE_INLINE IntLanes get(const IntLanes& words, int unit) const {
        if constexpr (codes == 4) return bytes(words, unit);
        if constexpr (table) return widened(bytes(words, unit / 2), unit % 2);
        const IntLanes low = all_ints(0x000f000f);
        switch (unit) {
            case 0: return bit_and(words, low);
            case 1: return bit_and(shift_words<8>(words), low);
            case 2: return bit_and(shift_words<4>(words), low);
            default: return shift_words<12>(words);
        }
    }

private:
    QUIRE_INLINE IntLanes bytes(const IntLanes& words, int unit) const {
        return by_part<IntLanes>([&](int i) {
            const I codes = bit_and(unit ? shift_right<4>(words.part[i]) : words.part[i], low_);
            return table ? permute_bytes(doubled_, codes) : codes;
        });
    }
    static I doubled() {  // and 12 more
        static const uint8_t values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        uint8_t repeated[4 * W];
        for (int i = 0; i < 4 * W; i++) repeated[i] = values[i % 16];
        return load_ints(repeated);
    }
    const I low_ = set_ints(0x0f0f0f0f);
    const I doubled_ = table ? doubled() : set_ints(0);
};

// Codes of fewer than eight bits, side by side, to a byte each.
class Spread {
public:
    explicit Spread(int bits) : bits_(bits) {
#if defined(__AVX512VBMI__)
        alignas(64) uint8_t places[64], shifts[64];
        for (int i = 0; i < 64; i++) {
            places[i] = (uint8_t)std::min(i / 8 * bits + std::min(i % 8, bits - 1), 63);
            shifts[i] = (uint8_t)(i % 8 * bits);
        }
        places_ = _mm512_load_si512(places);
        shifts_ = _mm512_load_si512(shifts);
        mask_ = _mm512_set1_epi8((char)((1 << bits) - 1));
#endif
    }
    // The first 64 codes.
    IntLanes operator()(const IntLanes& packed) const {
#if defined(__AVX512VBMI__)
        const __m512i packs = _mm512_permutexvar_epi8(places_, packed.part[0]);
        return {_mm512_and_si512(_mm512_multishift_epi64_epi8(shifts_, packs), mask_)};
#else
        uint8_t from[72] = {0};
        uint64_t to[8];
        store_lanes(from, packed);
        for (int i = 0; i < 8; i++) {
            uint64_t eight;
            std::memcpy(&eight, from + i * bits_, 8);
            to[i] = of_eight(eight);
        }
        return load_lanes(to);
#endif
    }

private:
    uint64_t of_eight(uint64_t codes) const {
        switch (bits_) {
            case 2: return spread_to_bytes<2>(codes);
            case 3: return spread_to_bytes<3>(codes);
            case 5: return spread_to_bytes<5>(codes);
            default: return spread_to_bytes<6>(codes);
        }
    }

    int bits_;
#if defined(__AVX512VBMI__)
    __m512i places_, shifts_, mask_;
#endif
};

struct Bytes {
    static constexpr int kBits = 8;
    static constexpr int kMost = 255;
    template <int codes> QUIRE_INLINE IntLanes get(const IntLanes& words, int unit) const {
        return codes == 4 ? words : widened(words, unit);
    }
};

}  // namespace quire::QUIRE_ISA
