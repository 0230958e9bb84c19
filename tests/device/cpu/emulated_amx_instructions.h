// AMX's instructions by loops, as Intel's manual defines them: stands in for amx_instructions.h. Tiles that do not fit
// each other stop the program, as they fault on a processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace quire::tiles {

struct Tile {
    int rows = 0, row_bytes = 0;
    uint8_t bytes[16][64] = {};
};
inline Tile registers[8];
inline bool configured = false;

inline void load_config(const void* from) {
    const auto* bytes = (const uint8_t*)from;
    require(bytes[0] == 1 && bytes[1] == 0, "the palette is 1, and nothing is restarted");
    for (int tile = 0; tile < 8; tile++) {
        uint16_t row_bytes;
        std::memcpy(&row_bytes, bytes + 16 + 2 * tile, 2);
        registers[tile] = {bytes[48 + tile], row_bytes};
        require(registers[tile].rows <= 16 && row_bytes <= 64, "a tile has at most 16 rows of 64 bytes");
    }
    configured = true;
}
inline void release() { configured = false; }

inline Tile& used(int number) {
    Tile& tile = registers[number];
    require(configured && tile.rows && tile.row_bytes, "a tile is configured");
    return tile;
}
template <int number> void zero_tile() {
    std::memset(used(number).bytes, 0, sizeof(Tile::bytes));
}
template <int number> void load_tile(const void* p, int64_t stride) {
    zero_tile<number>();
    Tile& tile = used(number);
    for (int row = 0; row < tile.rows; row++)
        std::memcpy(tile.bytes[row], (const char*)p + row * stride, tile.row_bytes);
}
template <int number> void store_tile(void* p, int64_t stride) {
    const Tile& tile = used(number);
    for (int row = 0; row < tile.rows; row++)
        std::memcpy((char*)p + row * stride, tile.bytes[row], tile.row_bytes);
}

// Calls `use(sum, x, y)` for each lane of sums and each depth: four bytes of `a` and four of `b`.
template <int to, int a, int b, class Sum, class Use> void each_sum(const Use& use) {
    Tile &sums = used(to), &left = used(a), &right = used(b);
    require(to != a && to != b && a != b, "three tiles are multiplied");
    require(sums.rows == left.rows && sums.row_bytes == right.row_bytes && left.row_bytes == 4 * right.rows,
            "tiles that are multiplied fit");
    require(sums.row_bytes % 4 == 0, "a tile's rows are whole lanes");
    for (int row = 0; row < sums.rows; row++)
        for (int column = 0; column < sums.row_bytes; column += 4) {
            Sum sum;
            std::memcpy(&sum, sums.bytes[row] + column, 4);
            for (int depth = 0; depth < right.rows; depth++)
                use(sum, left.bytes[row] + 4 * depth, right.bytes[depth] + column);
            std::memcpy(sums.bytes[row] + column, &sum, 4);
        }
}
template <int to, int a, int b> void multiply_bytes() {
    each_sum<to, a, b, uint32_t>([](uint32_t& sum, const uint8_t* x, const uint8_t* y) {
        for (int i = 0; i < 4; i++) sum += (uint32_t)((int8_t)x[i] * y[i]);
    });
}
// In another order than a processor's: of floats, bits are not compared with others.
template <int to, int a, int b> void multiply_bfloat16() {
    const auto value = [](const uint8_t* from) {
        const uint32_t bits = (uint32_t)from[0] << 16 | (uint32_t)from[1] << 24;
        float x;
        std::memcpy(&x, &bits, 4);
        return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
    };
    each_sum<to, a, b, float>([&](float& sum, const uint8_t* x, const uint8_t* y) {
        sum = std::fma(value(x + 2), value(y + 2), std::fma(value(x), value(y), sum));
    });
}

}  // namespace quire::tiles
