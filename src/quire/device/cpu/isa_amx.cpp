// Products on AMX's tiles, and AVX-512's kernels for everything else.
//
// bfloat16 weights: a row of x is cut into three bfloat16 parts whose sum is the row to the last bit, so each
// product is exact, and sums are float32's as everywhere. Packed weights: see integers.h.
#include "kernels.h"
#if defined(__x86_64__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "few_by_tiles.h"
#include "tiles.h"

namespace quire {
namespace {

using namespace tiles;
using amx::Accumulator;
using amx::aligned;
using amx::ByteParts;
using amx::for_group;
using amx::Group;
using amx::in_integers;
using amx::kFewByVectors;
using amx::kUnit;
using amx::load_floats;
using amx::row_of;
using amx::store_floats;

constexpr int64_t kStep = 32;      // depth of a tile
constexpr int64_t kDepths = 1024;  // that are multiplied before the next rows
constexpr int64_t kColumns = 96;   // that share a read of x
constexpr int64_t kManyRows = 256;

struct MultiplyFloats {
    template <int to, int a, int b> static void tiles() { multiply_bfloat16<to, a, b>(); }
};

bool serves(const Weight& w) { return w.storage == Storage::bfloat16 && w.depth % kStep == 0; }

// -- rows of x ------------------------------------------------------------------------------------

// Takes the upper half of floats away from them.
inline __m512i take_upper(__m512i* x) {
    const __m512i upper = _mm512_and_si512(*x, _mm512_set1_epi32((int)0xffff0000));
    *x = (__m512i)_mm512_sub_ps((__m512)*x, (__m512)upper);
    return upper;
}

int64_t block_floats(const Weight& w) { return w.depth / kStep * kParts * kTile * kTile; }

// `count` rows, at most 16, as tiles of pairs of depth.
void arrange_block(const Weight& w, const Source& x, int64_t begin, int count, float* to) {
    const __m512i even = _mm512_slli_epi32(numbers(), 1), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int64_t at = 0; at < w.depth; at += kStep) {
        __m512i parts[kParts][kTile] = {};
        for (int i = 0; i < count; i++) {
            const float* row = row_of(x, begin + i) + at;
            const __m512i low = _mm512_loadu_si512(row), high = _mm512_loadu_si512(row + kTile);
            __m512i first = _mm512_permutex2var_epi32(low, even, high);
            __m512i second = _mm512_permutex2var_epi32(low, odd, high);
            for (int part = 0; part < kParts; part++) {
                const __m512i half = _mm512_srli_epi32(take_upper(&first), 16);
                parts[part][i] = _mm512_or_si512(half, take_upper(&second));
            }
        }
        to = store_parts(parts, count, to);
    }
}

// -- products -------------------------------------------------------------------------------------

struct Product {
    const Weight& w;
    const Rows& rows;
    float* sums;    // [row tile][column tile][part][column][row]
    uint8_t* last;  // columns that do not fill a tile

    static int64_t scratch_floats() {
        return 16 + kManyRows * kColumns * kParts + kTile * kDepths / 2;
    }
    Product(const Weight& w, const Rows& rows, float* scratch)
        : w(w), rows(rows), sums(aligned(scratch)), last((uint8_t*)(sums + kManyRows * kColumns * kParts)) {}

    void run(int64_t begin, int64_t end) const {
        for (int64_t column = begin; column < end; column += kColumns)
            for (int64_t row = 0; row < rows.count; row += kManyRows)
                block(column, std::min(kColumns, end - column), row, std::min(kManyRows, rows.count - row));
        release();
    }

    // So many columns and rows from the first of each.
    void block(int64_t column, int64_t columns, int64_t row, int64_t count) const {
        const int64_t tile_sums = (columns + kTile - 1) / kTile * kParts * kSum;
        std::memset(sums, 0, (count + kTile - 1) / kTile * tile_sums * 4);
        for (int64_t at = 0; at < w.depth; at += kDepths) {
            const int64_t steps = std::min(kDepths, w.depth - at) / kStep;
            for (int64_t r = 0; r < count; r += kTile) {
                const int together = (int)std::min<int64_t>(kTile, count - r);
                if (r == 0 || together < kTile) configure(together);
                const auto* b = (const uint8_t*)(rows.arranged + (row + r) / kTile * block_floats(w));
                add(column, columns, at, steps, b + at / kStep * 192 * together, together, sums + r / kTile * tile_sums);
            }
        }
        for (int64_t r = 0; r < count; r += kTile)
            for (int64_t c = 0; c < columns; c += kTile)
                write(sums + r / kTile * tile_sums + c / kTile * kParts * kSum, row + r,
                      (int)std::min<int64_t>(kTile, count - r), column + c, std::min<int64_t>(kTile, columns - c));
    }

    void add(int64_t column, int64_t columns, int64_t at, int64_t steps, const uint8_t* b, int count, float* to) const {
        const int64_t bytes = w.depth * 2, tiles = (columns + kTile - 1) / kTile, whole = columns / kTile;
        const auto* a = (const uint8_t*)w.values + column * bytes + at * 2;
        const auto load = [&](auto i) { load_tile<i.value>(to + i.value * kSum, 64); };
        const auto store = [&](auto i) { store_tile<i.value>(to + i.value * kSum, 64); };
        int64_t tile = 0;
        for (; few(count) && tile + kParts <= whole; tile += kParts, to += kParts * kSum * kParts) {
            each<kParts>([&](auto i) { load_tile<i.value>(to + i.value * kParts * kSum, 64); });
            add_few<MultiplyFloats>(steps, a + tile * kTile * bytes, kTile * bytes, bytes, 64, b, count);
            each<kParts>([&](auto i) { store_tile<i.value>(to + i.value * kParts * kSum, 64); });
        }
        for (; tile < tiles; tile++, to += kParts * kSum) {
            const uint8_t* own = a + tile * kTile * bytes;
            int64_t stride = bytes;
            if (tile == whole) {
                std::memset(last, 0, kTile * steps * 64);
                for (int64_t c = 0; c < columns - tile * kTile; c++)
                    std::memcpy(last + c * steps * 64, own + c * bytes, steps * 64);
                own = last;
                stride = steps * 64;
            }
            few(count) ? each<1>(load) : each<kParts>(load);
            add_one<MultiplyFloats>(steps, own, stride, 64, b, count);
            few(count) ? each<1>(store) : each<kParts>(store);
        }
    }

    void write(const float* from, int64_t row, int count, int64_t column, int64_t width) const {
        const PartSums sums_of(count);
        __m512i columns[kTile];
        for (int c = 0; c < kTile; c++) {
            __m512i parts[kParts];
            sums_of.read(from + c * kTile, parts);
            columns[c] = (__m512i)_mm512_add_ps(_mm512_add_ps((__m512)parts[0], (__m512)parts[1]), (__m512)parts[2]);
        }
        write_rows(w, rows, columns, row, count, column, width);
    }
};

// -- products in integers -------------------------------------------------------------------------

// The digits of a block's rows lie together, so they are rows of one or two tiles, as many as they fill: 3 and 4.
// Tiles 0 and 1 sum, and 6 is codes.
template <int size, int digits> struct Integers {
    using Parts = ByteParts<digits>;
    static constexpr int64_t kScratch = 16 + digits * kSum;
    static constexpr int kAlone = kTile;
    static constexpr int kDepth = std::min(size, 64);  // of a tile
    float* sums;  // [digits, rows, kTile]
    explicit Integers(float* scratch) : sums(aligned(scratch)) {}

    void begin(int rows) const {
        Config config;
        for (int tile = 0; tile < digits; tile++) {
            const int own = std::clamp(digits * rows - tile * kTile, 1, kTile);
            config.rows[tile] = config.rows[tile + 3] = (uint8_t)own;
            config.row_bytes[tile] = 64;
            config.row_bytes[tile + 3] = kDepth;
        }
        config.rows[6] = kDepth / 4;
        config.row_bytes[6] = 64;
        load_config(&config);
    }
    void end() const { release(); }

    void operator()(Group<size> g, int count) const {
        for (int i = 0; i < count; i++, g.template advance<Parts>())
            digits * g.rows <= kTile ? multiply<1>(g) : multiply<2>(g);
    }

private:
    template <int parts> void multiply(const Group<size>& g) const {
        for (int tile = 0; tile < g.tiles; tile++) {
            each<parts>([](auto i) { zero_tile<i.value>(); });
            for (int at = 0; at < size; at += kDepth) {
                load_tile<6>(g.codes + tile * amx::kSpanBytes<Parts> + at * kTile, kUnit);
                each<parts>([&](auto i) {
                    if (tile == 0 || kDepth < size)
                        load_tile<3 + i.value>(g.parts + i.value * kTile * size + at, size);
                    multiply_bytes<i.value, 3 + i.value, 6>();
                });
            }
            each<parts>([&](auto i) { store_tile<i.value>(sums + i.value * kSum, 64); });
            add(g, tile);
        }
    }
    void add(const Group<size>& g, int tile) const {
        const Accumulator add = g.scales[tile].accumulator(g.number);
        const float* scales = g.template row_scales<Parts>();
        const float* own = sums;
        const int64_t between = g.rows * kTile;
        float* to = g.sums + tile * kSum;
        for (int row = 0; row < g.rows; row++, own += kTile, to += kTile) {
            __m512i whole = _mm512_load_si512(own);
            if constexpr (digits == 2)
                whole = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(own + between), 8), whole);
            store_floats(to, add({whole}, scales + row, g.rows, load_floats(to)));
        }
    }
};

// -- the table's entries --------------------------------------------------------------------------

// Products by rows of one digit or two.
template <int digits> struct Entries {
    static const Products& base() {
        return digits == 1 ? vnni_kernels()->bytes : static_cast<const Products&>(*vnni_kernels());
    }
    static int64_t arranged_floats(const Weight& w, int64_t count) {
        if (!serves(w)) return base().arranged_floats(w, count);
        return (count + kTile - 1) / kTile * block_floats(w);
    }
    static void arrange(const Weight& w, const Source& x, int64_t count, int64_t begin, int64_t end, float* arranged) {
        if (!serves(w)) return base().arrange(w, x, count, begin, end, arranged);
        for (int64_t row = begin; row < end; row += kTile)
            arrange_block(w, x, row, (int)std::min<int64_t>(kTile, end - row), arranged + row / kTile * block_floats(w));
    }
    static int64_t arranged_together(const Weight& w) { return serves(w) ? kTile : base().arranged_together(w); }
    static int64_t scratch_floats(const Weight& w) {
        if (in_integers(w)) return amx::IntegerProduct<Integers<16, digits>, 16>::scratch_floats();
        return serves(w) ? Product::scratch_floats() : base().scratch_floats(w);
    }
    static void product(const Weight& w, const Rows& rows, int64_t begin, int64_t end, float* scratch) {
        const bool few = w.tiled && rows.count <= kFewByVectors;
        if (in_integers(w) && !few) {
            return for_group(w, [&](auto size) {
                amx::IntegerProduct<Integers<size, digits>, size>(w, rows, scratch).run(begin, end);
            });
        }
        if (!serves(w)) return base().product(w, rows, begin, end, scratch);
        Product(w, rows, scratch).run(begin, end);
    }
    static constexpr Products kProducts = {arranged_floats, arrange, arranged_together, product, scratch_floats,
                                           amx::reads_tiles};
};

// Whether a tile multiplies. Tried in a child, since virtual machines that announce AMX may kill whoever
// uses it.
bool tiles_work() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
    const pid_t child = fork();
    if (child < 0) return false;
    if (child == 0) {
        alignas(64) uint16_t ones[kTile * kStep];
        alignas(64) float sums[kSum];
        for (uint16_t& one : ones) one = 0x3f80;
        configure(kTile);
        zero_tile<0>();
        load_tile<3>(ones, 64);
        load_tile<6>(ones, 64);
        MultiplyFloats::tiles<0, 3, 6>();
        store_tile<0>(sums, 64);
        for (float sum : sums)
            if (sum != kStep) _exit(1);
        _exit(0);
    }
    int status = 1;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

const Kernels* amx_kernels() {
    static const Kernels* found = [] {
        const bool here = vnni_kernels() && __builtin_cpu_supports("amx-tile") &&
                          __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
                          __builtin_cpu_supports("avx512bf16") && tiles_work();
        if (!here) return (const Kernels*)nullptr;
        static const Kernels kernels =
            with_products(*vnni_kernels(), "amx", Entries<2>::kProducts, Entries<1>::kProducts);
        return &kernels;
    }();
    return found;
}
}  // namespace quire
#else
namespace quire {
const Kernels* amx_kernels() { return nullptr; }
}  // namespace quire
#endif
