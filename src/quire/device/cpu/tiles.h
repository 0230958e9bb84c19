// AMX's tiles: 16 rows of 64 bytes. Included by isa_amx.cpp.
//
// In a product a weight's columns are the rows of tile A, and rows of x are the columns of tile B. A row of
// x is cut into three parts; each adds up depth by itself, in one order, whatever tile it is in, and their
// sums are added at the end. Few rows have all their parts in one tile B.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx_instructions.h"
#include "lanes.h"

namespace quire::tiles {

constexpr int kTile = 16;           // rows of a tile
constexpr int64_t kSum = kTile * kTile;  // floats or integers of a tile of sums
constexpr int64_t kTileBytes = 1024;
constexpr int kParts = 3;    // of a row of x
constexpr int kFewRows = 5;  // rows whose parts fit one tile

inline bool few(int rows) { return rows <= kFewRows; }

struct __attribute__((packed)) Config {
    uint8_t palette = 1, start = 0, reserved[14] = {0};
    uint16_t row_bytes[16] = {0};
    uint8_t rows[16] = {0};
};

// Tiles 0 to 2 sum, 3 and 4 are A, and 5 for few rows; 6, 7 and else 5 are B of `count` rows of x.
inline void configure(int count) {
    Config config;
    const int columns = few(count) ? kParts * count : count;
    for (int tile = 0; tile < 8; tile++) {
        const bool a = tile == 3 || tile == 4 || (tile == 5 && few(count));
        config.rows[tile] = kTile;
        config.row_bytes[tile] = (uint16_t)(a ? 64 : 4 * columns);
    }
    load_config(&config);
}

// Calls `use` with 0, 1, ... count - 1 as compile-time constants.
template <int count, int i = 0, class Use> inline __attribute__((always_inline)) void each(Use&& use) {
    if constexpr (i < count) {
        use(std::integral_constant<int, i>());
        each<count, i + 1>(use);
    }
}

// Adds `steps` tiles of depth to three tiles of sums. `Multiply::tiles<to, a, b>()` adds a product. Few rows:
// three tiles of columns, which lie `between` bytes apart. A sum takes three times as long as the next
// product may follow, so three take turns.
template <class Multiply>
inline void add_few(int64_t steps, const uint8_t* a, int64_t between, int64_t stride, int64_t apart,
                    const uint8_t* b, int count) {
    for (int64_t step = 0; step < steps; step++, a += apart, b += 192 * count) {
        load_tile<6>(b, 12 * count);
        load_tile<3>(a, stride);
        Multiply::template tiles<0, 3, 6>();
        load_tile<4>(a + between, stride);
        Multiply::template tiles<1, 4, 6>();
        load_tile<5>(a + 2 * between, stride);
        Multiply::template tiles<2, 5, 6>();
    }
}

// The same for one tile of columns: a tile of sums, or one for each part where rows are not few.
template <class Multiply>
inline void add_one(int64_t steps, const uint8_t* a, int64_t stride, int64_t apart, const uint8_t* b, int count) {
    if (few(count)) {
        for (int64_t step = 0; step < steps; step++, a += apart, b += 192 * count) {
            load_tile<6>(b, 12 * count);
            load_tile<3>(a, stride);
            Multiply::template tiles<0, 3, 6>();
        }
        return;
    }
    for (int64_t step = 0; step < steps; step++, a += apart, b += 192 * count) {
        load_tile<3>(a, stride);
        load_tile<5>(b, 4 * count);
        Multiply::template tiles<0, 3, 5>();
        load_tile<6>(b + 64 * count, 4 * count);
        Multiply::template tiles<1, 3, 6>();
        load_tile<7>(b + 128 * count, 4 * count);
        Multiply::template tiles<2, 3, 7>();
    }
}

inline __mmask16 lanes(int64_t count) { return (__mmask16)((1u << count) - 1u); }
inline __m512i numbers() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// Writes the parts of a tile B of `count` rows: words of row r in `parts[part][r]`.
inline float* store_parts(__m512i (*parts)[kTile], int count, float* to) {
    const int64_t between = few(count) ? count : kTile * count, apart = few(count) ? kParts * count : count;
    for (int part = 0; part < kParts; part++) {
        amx::transpose_square(parts[part]);
        for (int i = 0; i < kTile; i++)
            _mm512_mask_storeu_epi32(to + part * between + i * apart, lanes(count), parts[part][i]);
    }
    return to + kParts * kTile * count;
}

// Reads sums of `count` rows by part, for one column: lanes are rows.
struct PartSums {
    __m512i second, third;
    bool together;
    explicit PartSums(int count)
        : second(_mm512_add_epi32(_mm512_set1_epi32(count), numbers())),
          third(_mm512_add_epi32(_mm512_set1_epi32(2 * count), numbers())), together(few(count)) {}
    void read(const void* sums, __m512i* parts) const {
        const auto* p = (const int32_t*)sums;
        parts[0] = _mm512_load_si512(p);
        parts[1] = together ? _mm512_permutexvar_epi32(second, parts[0]) : _mm512_load_si512(p + kSum);
        parts[2] = together ? _mm512_permutexvar_epi32(third, parts[0]) : _mm512_load_si512(p + 2 * kSum);
    }
};

// Rows of a product, [count <= 16] of them from `row` on, from their columns in `columns`.
inline void write_rows(const Weight& w, const Rows& rows, __m512i* columns, int64_t row, int count,
                       int64_t column, int64_t width) {
    amx::transpose_square(columns);
    for (int r = 0; r < count; r++) amx::write_row(w, rows, {(__m512)columns[r]}, row + r, column, width);
}

}  // namespace quire::tiles
