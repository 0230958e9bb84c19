// Calls the kernels of every instruction set without MLX and holds them against sums in double precision. Compiled
// by test_foreign.py, for a foreign processor too, where an emulator runs it. Prints "instruction set: what digest"
// for the bits of each result, and what is wrong.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"

using namespace quire;
using Floats = std::vector<float>;

namespace {

int failures = 0;
Kernels kernels;  // that are called

Floats drawn(size_t count, int seed) {
    std::mt19937 random(seed);
    Floats values(count);
    for (float& value : values) value = (float)(random() >> 8) / (1 << 23) - 1;
    return values;
}

void expect(const char* what, bool holds) {
    if (!holds) {
        std::printf("%s: wrong: %s\n", kernels.name, what);
        failures++;
    }
}

void near(const char* what, const Floats& got, const std::vector<double>& exact, double tolerance) {
    double most = 0, error = 0;
    uint64_t digest = 0xcbf29ce484222325u;  // FNV-1a
    for (size_t i = 0; i < got.size() * 4; i++)
        digest = (digest ^ ((const uint8_t*)got.data())[i]) * 0x100000001b3u;
    std::printf("%s: %s %016llx\n", kernels.name, what, (unsigned long long)digest);
    for (size_t i = 0; i < got.size(); i++) {
        most = std::max(most, std::abs(exact[i]));
        error = std::max(error, std::isfinite(got[i]) ? std::abs(got[i] - exact[i]) : 1e30);
    }
    expect(what, got.size() == exact.size() && error <= tolerance * most);
}

// `places`: where rows of x and of the product lie; `at_once`: columns of each call, or 0 for all.
Floats multiplied(const Weight& w, const Floats& x, int64_t rows, const int32_t* places = nullptr,
                  int64_t at_once = 0) {
    Floats arranged(kernels.arranged_floats(w, rows)), scratch(kernels.scratch_floats(w));
    Floats y(rows * w.columns);
    kernels.arrange(w, Source{x.data(), w.depth, places}, rows, 0, rows, arranged.data());
    const Rows to{rows, arranged.data(), y.data(), places, w.columns};
    const int64_t step = at_once ? at_once : w.columns;
    for (int64_t begin = 0; begin < w.columns; begin += step)
        kernels.product(w, to, begin, std::min(begin + step, w.columns), scratch.data());
    return y;
}

// Calls `check` with the bits to which rows are rounded beside packed weights.
template <class Check> void at_each_precision(const Check& check) {
    const Kernels words = kernels;
    check(16);
    kernels = with_products(words, words.name, words.bytes, words.bytes);
    check(8);
    kernels = words;
}

// `values`: the weight's, [columns, depth].
void check_near(const char* what, const Weight& w, const Floats& values, double tolerance) {
    const int64_t rows = 33;
    const Floats x = drawn(rows * w.depth, 7), y = multiplied(w, x, rows);
    std::vector<double> exact(y.size(), 0.0);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < w.columns; c++)
            for (int64_t d = 0; d < w.depth; d++)
                exact[r * w.columns + c] += (double)x[r * w.depth + d] * values[c * w.depth + d];
    near(what, y, exact, tolerance);
    for (int64_t few : {1, 2, 3, 5, 8, 9, 16, 17}) {
        const Floats part = multiplied(w, x, few);
        expect("bits depend on company", !std::memcmp(part.data(), y.data(), part.size() * 4));
    }
    std::vector<int32_t> backwards(rows);
    for (int64_t r = 0; r < rows; r++) backwards[r] = (int32_t)(rows - 1 - r);
    expect("bits depend on places", multiplied(w, x, rows, backwards.data()) == y);
    expect("bits depend on division", multiplied(w, x, rows, nullptr, 16) == y);
}

void check_product(const char* what, const Weight& w, const Floats& values) {
    const bool in_integers = w.group && w.storage != Storage::fp8;
    if (!in_integers) return check_near(what, w, values, 2e-6);
    at_each_precision([&](int bits) { check_near(what, w, values, bits == 16 ? 5e-5 : 1e-2); });
}

// Scales and biases of 16 bits give the bits of the same numbers in float32.
void check_narrow_scales(Weight w, const Floats& scales, const Floats& biases) {
    const Floats x = drawn(17 * w.depth, 8);
    for (Storage type : {Storage::bfloat16, Storage::float16}) {
        std::vector<uint16_t> narrow[2];
        Floats wide[2];
        for (int i = 0; i < 2; i++)
            for (float value : i ? biases : scales) {
                uint32_t bits;
                std::memcpy(&bits, &value, 4);
                bits &= type == Storage::bfloat16 ? 0xffff0000u : 0xffffe000u;
                if (type == Storage::float16 && std::fabs(value) < 0x1p-14f) bits = 0;
                const uint32_t half = (bits >> 16 & 0x8000) | (bits ? (bits >> 13 & 0x3ffff) - (112 << 10) : 0);
                narrow[i].push_back((uint16_t)(type == Storage::bfloat16 ? bits >> 16 : half));
                std::memcpy(&value, &bits, 4);
                wide[i].push_back(value);
            }
        w.scale_type = Storage::float32;
        w.scales = wide[0].data();
        w.biases = wide[1].data();
        const Floats y = multiplied(w, x, 17);
        w.scale_type = type;
        w.scales = narrow[0].data();
        w.biases = narrow[1].data();
        expect("bits depend on the type of scales", multiplied(w, x, 17) == y);
    }
}

double e4m3(uint8_t byte) {
    const double value = byte & 0x78 ? std::ldexp(8 + (byte & 7), (byte >> 3 & 15) - 10) : std::ldexp(byte & 7, -9);
    return byte & 0x80 ? -value : value;
}

// What a packing makes of a group's code.
double decoded(Storage storage, unsigned code, uint8_t scale) {
    static const double fp4[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
    return fp4[code] * (storage == Storage::nvfp4 ? e4m3(scale) : std::ldexp(1, scale - 127));
}

// Sixteen columns together: see `Weight::tiled`.
template <class Word> std::vector<Word> in_tiles(const std::vector<Word>& rows, int64_t columns) {
    const int64_t width = (int64_t)rows.size() / columns;
    std::vector<Word> tiles(rows.size());
    for (int64_t column = 0; column < columns; column++)
        for (int64_t at = 0; at < width; at++)
            tiles[(column / 16 * width + at) * 16 + column % 16] = rows[column * width + at];
    return tiles;
}

// The same product with other rows beside it, and with codes in tiles, has the same bits.
void check_codes(const char* name, Storage storage, int bits, int64_t group, int64_t columns) {
    const int64_t depth = 640 + std::max<int64_t>(group, 32);  // the last 128 are not all there
    std::mt19937 random(4);
    std::vector<uint32_t> words(columns * depth * bits / 32);
    for (uint32_t& word : words) word = random();
    const auto* bytes = (const uint8_t*)words.data();
    const Floats scales = drawn(columns * depth / group, 2), biases = drawn(scales.size(), 3);
    std::vector<uint8_t> exponents(scales.size());
    for (uint8_t& each : exponents) each = (uint8_t)(storage == Storage::nvfp4 ? random() % 120 : 120 + random() % 9);
    Floats values(columns * depth);
    for (size_t i = 0; i < values.size(); i++) {
        unsigned code = 0;  // the lowest bits first
        for (int bit = 0; bit < bits; bit++) {
            const size_t at = i * bits + bit;
            code |= (bytes[at / 8] >> (at % 8) & 1u) << bit;
        }
        const size_t own = i / group;
        values[i] = storage == Storage::affine ? code * scales[own] + biases[own]
                    : storage == Storage::fp8  ? (float)e4m3((uint8_t)code) * scales[own]
                                               : (float)decoded(storage, code, exponents[own]);
    }
    char what[64];
    std::snprintf(what, sizeof what, "%s of %d bits in groups of %d, %d columns", name, bits, (int)group, (int)columns);
    const bool affine = storage == Storage::affine;
    Weight w{storage, bits, (int)group, columns, depth, words.data(), scales.data(), biases.data()};
    if (!affine && storage != Storage::fp8) w.scales = exponents.data();
    check_product(what, w, values);
    if (affine) check_narrow_scales(w, scales, biases);
    if (!kernels.reads_tiles(storage, bits) || columns % 16) return;
    const auto tiles = in_tiles(words, columns);
    const Floats tiled_scales = in_tiles(scales, columns), tiled_biases = in_tiles(biases, columns);
    const auto tiled_exponents = in_tiles(exponents, columns);
    Weight tiled = w;
    tiled.tiled = true;
    tiled.values = tiles.data();
    tiled.scales = affine ? (const void*)tiled_scales.data() : tiled_exponents.data();
    tiled.biases = tiled_biases.data();
    at_each_precision([&](int) {
        for (int64_t rows : {1, 2, 3, 4, 5, 8, 16, 17, 37}) {
            const Floats x = drawn(rows * depth, 7), y = multiplied(w, x, rows), other = multiplied(tiled, x, rows);
            expect("bits depend on tiles", !std::memcmp(y.data(), other.data(), y.size() * 4));
        }
    });
}

void check_products() {
    const int64_t columns = 21, depth = 384;
    const Floats values = drawn(columns * depth, 1);
    check_product("float32", {Storage::float32, 0, 0, columns, depth, values.data()}, values);

    std::vector<uint16_t> halves(values.size());
    Floats cut(values.size());
    for (size_t i = 0; i < values.size(); i++) {
        uint32_t bits;
        std::memcpy(&bits, &values[i], 4);
        halves[i] = (uint16_t)(bits >> 16);
        bits &= 0xffff0000u;
        std::memcpy(&cut[i], &bits, 4);
    }
    check_product("bfloat16", {Storage::bfloat16, 0, 0, columns, depth, halves.data()}, cut);

    for (int64_t columns : {21, 80}) {
        for (int64_t group : {32, 64, 128}) {
            for (int bits : {2, 3, 4, 5, 6, 8}) check_codes("affine", Storage::affine, bits, group, columns);
            check_codes("fp8", Storage::fp8, 8, group, columns);
        }
        check_codes("mxfp4", Storage::mxfp4, 4, 32, columns);
        check_codes("nvfp4", Storage::nvfp4, 4, 16, columns);
    }
}

void check_rows() {
    const int64_t depth = 102, rows = 3;
    const Floats x = drawn(rows * depth, 5), w = drawn(depth, 6), up = drawn(rows * depth, 8);
    Floats out(x.size());
    std::vector<double> exact(x.size());
    kernels.rms_norm(x.data(), w.data(), nullptr, nullptr, 1e-5f, depth, 0, rows, out.data());
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0;
        for (int64_t i = 0; i < depth; i++) squares += (double)x[r * depth + i] * x[r * depth + i];
        for (int64_t i = 0; i < depth; i++)
            exact[r * depth + i] = x[r * depth + i] / std::sqrt(squares / depth + 1e-5) * w[i];
    }
    near("rms_norm", out, exact, 1e-6);

    Floats wide = x;
    for (float& value : wide) value *= 9;
    kernels.gate(0, wide.data(), up.data(), 0, (int64_t)x.size(), out.data());
    for (size_t i = 0; i < x.size(); i++) exact[i] = wide[i] / (1 + std::exp(-(double)wide[i])) * up[i];
    near("silu", out, exact, 1e-6);
    kernels.gate(1, wide.data(), up.data(), 0, (int64_t)x.size(), out.data());
    for (size_t i = 0; i < x.size(); i++) {
        const double y = std::sqrt(2 / M_PI) * (wide[i] + 0.044715 * std::pow((double)wide[i], 3));
        exact[i] = 0.5 * wide[i] * (1 + std::tanh(y)) * up[i];
    }
    near("gelu", out, exact, 1e-6);
}

const int kHeads = 4, kKVHeads = 2, kDim = 32, kBlock = 32, kAttended = 20, kBlocks = 3;

// What a step's rows see, over blocks that stand for `k` and `v` [blocks * kv_heads, block, dim].
void check_attention(const char* what, PagedRows p, const Floats& k, const Floats& v) {
    const Floats q = drawn(kAttended * kHeads * kDim, 9);
    const int32_t table[] = {2, 0, 1};
    std::vector<int32_t> first(kAttended), last(kAttended);
    for (int row = 0; row < kAttended; row++) {
        last[row] = 38 + row;
        first[row] = row / 3;
    }
    Floats out(q.size());
    p.q = q.data();
    p.out = out.data();
    p.table = table;
    p.first = first.data();
    p.last = last.data();
    p.heads = kHeads;
    p.kv_heads = kKVHeads;
    p.key_dim = p.value_dim = p.q_dim = p.out_dim = kDim;
    p.block = kBlock;
    p.storage = Storage::float32;
    p.first_written = INT32_MAX;
    p.scale = 0.5f;
    Floats scratch(kernels.attend_scratch_floats(p));
    for (int head = 0; head < kKVHeads; head++) {
        kernels.attend(p, head, 0, 16, scratch.data());
        kernels.attend(p, head, 16, kAttended, scratch.data());
    }
    std::vector<double> exact(q.size(), 0.0);
    for (int row = 0; row < kAttended; row++)
        for (int head = 0; head < kHeads; head++) {
            double total = 0;
            double* to = &exact[(row * kHeads + head) * kDim];
            for (int key = first[row]; key <= last[row]; key++) {
                const int place = table[key / kBlock] * kKVHeads + head / (kHeads / kKVHeads);
                const int at = (place * kBlock + key % kBlock) * kDim;
                double score = 0;
                for (int d = 0; d < kDim; d++) score += (double)q[(row * kHeads + head) * kDim + d] * k[at + d];
                const double weight = std::exp(0.5 * score);
                total += weight;
                for (int d = 0; d < kDim; d++) to[d] += weight * v[at + d];
            }
            for (int d = 0; d < kDim; d++) to[d] /= total;
        }
    near(what, out, exact, 5e-6);
}

void check_plain_attention() {
    const Floats k = drawn(kBlocks * kKVHeads * kBlock * kDim, 10), v = drawn(k.size(), 11);
    PagedRows p{};
    p.blocks = Blocks::floats;
    p.keys = k.data();
    p.values = v.data();
    check_attention("attention", p, k, v);
}

double half(uint16_t bits) {  // of a normal one
    return std::ldexp(1024 + (bits & 1023), (bits >> 10 & 31) - 25) * (bits & 0x8000 ? -1 : 1);
}

// Vectors that the kernels code, and what the codes read as.
struct CodedVectors {
    std::vector<uint8_t> codes;
    std::vector<uint16_t> scales, biases;
    Floats read;
    Coded coded;

    CodedVectors(const Floats& x, int bits) : codes(x.size() * bits / 8), read(x.size()) {
        const int64_t count = (int64_t)x.size() / 32;
        scales.resize(count);
        biases.resize(count);
        Floats room(3 * 32);
        const Coding coding{x.data(), 32, 32, bits, 32, {}, nullptr, 0, 0, codes.data(), scales.data(), biases.data()};
        kernels.encode(coding, 0, count, room.data());
        for (size_t i = 0; i < x.size(); i++) {
            unsigned code = 0;
            for (int bit = 0; bit < bits; bit++) {
                const size_t at = i * bits + bit;
                code |= (codes[at / 8] >> (at % 8) & 1u) << bit;
            }
            read[i] = (float)(code * half(scales[i / 32]) + half(biases[i / 32]));
            expect("a code is far off", std::fabs(read[i] - x[i]) <= 0.6 * half(scales[i / 32]) + 1e-3);
        }
        coded = {codes.data(), scales.data(), biases.data(), nullptr, 32, bits, 32};
    }
};

void check_coded_attention() {
    const Floats keys = drawn(kBlocks * kKVHeads * kBlock * kDim, 10), values = drawn(keys.size(), 11);
    for (int bits : {2, 3, 4, 5, 6, 8}) {
        const CodedVectors k(keys, bits), v(values, bits);
        PagedRows p{};
        p.blocks = Blocks::tokens;
        p.coded_keys = k.coded;
        p.coded_values = v.coded;
        check_attention("attention over codes", p, k.read, v.read);
    }
}

// One head, token by token, in double precision.
void check_gated_delta(bool by_column, float most_forgotten) {
    const int dim = 16, value_dim = 9, tokens = 19, channels = 2 * dim + value_dim, columns = by_column ? dim : 1;
    const Floats mixed = drawn(tokens * channels, 12), steps = drawn(tokens * columns, 13), betas = drawn(tokens, 14),
                 before = drawn(value_dim * dim, 15), rate = drawn(1, 16), bias = drawn(columns, 17);
    const double most_correction = by_column ? 1 : 2;
    Floats after(before.size()), out(tokens * value_dim);
    const GatedDelta d{mixed.data(), steps.data(), betas.data(), rate.data(), bias.data(), before.data(), after.data(),
                       out.data(), tokens, 1, 1, dim, value_dim, 1e-6f, by_column, (float)most_correction,
                       most_forgotten};
    Floats scratch(kernels.gated_delta_scratch_floats(d));
    kernels.gated_delta(d, 0, 0, scratch.data());
    std::vector<double> state(before.begin(), before.end()), exact;
    for (int t = 0; t < tokens; t++) {
        const float *q = &mixed[t * channels], *k = q + dim, *v = k + dim;
        double q_squares = 1e-6, k_squares = 1e-6;
        for (int i = 0; i < dim; i++) {
            q_squares += (double)q[i] * q[i];
            k_squares += (double)k[i] * k[i];
        }
        std::vector<double> keeps;
        for (int i = 0; i < dim; i++) {
            const int column = by_column ? i : 0;
            const double step = (double)steps[t * columns + column] + bias[column], each = std::exp((double)rate[0]);
            keeps.push_back(std::exp(most_forgotten < 0 ? most_forgotten / (1 + std::exp(-each * step))
                                                        : -each * std::log1p(std::exp(step))));
        }
        const double beta = most_correction / (1 + std::exp(-(double)betas[t]));
        for (int r = 0; r < value_dim; r++) {
            double known = 0, read = 0;
            for (int i = 0; i < dim; i++) known += (state[r * dim + i] *= keeps[i]) * k[i] / std::sqrt(k_squares);
            for (int i = 0; i < dim; i++) {
                state[r * dim + i] += beta * (v[r] - known) * k[i] / std::sqrt(k_squares);
                read += state[r * dim + i] * q[i] / std::sqrt(q_squares * dim);
            }
            exact.push_back(read);
        }
    }
    near("gated delta rule", out, exact, 5e-6);
    near("its state", after, state, 5e-6);
}

// One head of each kind, token by token, in double precision.
void check_state_space() {
    const int dim = 16, tokens = 19;
    for (bool by_column : {false, true}) {
        const int head_dim = by_column ? 1 : 6;
        const Floats values = drawn(tokens * head_dim, 18), keys = drawn(tokens * dim, 19),
                     queries = drawn(tokens * dim, 20), before = drawn(head_dim * dim, 21);
        Floats steps = drawn(tokens, 22), rates = drawn(by_column ? dim : 1, 23);
        for (float& step : steps) step = std::fabs(step);
        for (float& rate : rates) rate = -std::fabs(rate);
        Floats after(before.size()), out(values.size());
        const StateSpace s{values.data(), keys.data(), queries.data(), steps.data(), rates.data(), before.data(),
                           after.data(), out.data(), tokens, 1, head_dim, 1, dim, by_column};
        Floats scratch(kernels.state_space_scratch_floats(s));
        kernels.state_space(s, 0, 0, scratch.data());
        std::vector<double> state(before.begin(), before.end()), exact;
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < head_dim; r++) {
                double read = 0;
                for (int i = 0; i < dim; i++) {
                    double& each = state[r * dim + i];
                    each = each * std::exp((double)rates[by_column ? i : 0] * steps[t]) +
                           (double)values[t * head_dim + r] * keys[t * dim + i];
                    read += each * queries[t * dim + i];
                }
                exact.push_back(read);
            }
        near("state space", out, exact, 5e-6);
        near("its state", after, state, 5e-6);
    }
}

void check() {
    check_products();
    check_rows();
    check_plain_attention();
    check_coded_attention();
    for (bool by_column : {false, true}) {
        check_gated_delta(by_column, 0);
        check_gated_delta(by_column, -5);
    }
    check_state_space();
}

}  // namespace

int main() {
    for (const Kernels* each : available_kernels()) {
        kernels = *each;
        check();
    }
    return failures ? 1 : 0;
}
