// Sampling of rows as an MLX operation.

#include <nanobind/stl/tuple.h>

#include <array>
#include <cmath>
#include <functional>

#include "operation.h"

namespace quire {
namespace {

// How a row's token is drawn; see `device/draws.py`.
struct Draw {
    float temperature, min_p;
    int top_k;
    float top_p;
    int candidates;
    float block, inside;  // uniforms
};
using DrawFields = std::tuple<float, float, int, float, int, float, float>;

// A token that may be drawn.
struct Candidate {
    float logit, weight;
    int32_t id;
    bool operator<(const Candidate& other) const {
        return logit != other.logit ? logit > other.logit : id < other.id;
    }
};

// The first of `count` numbers at which the running sum exceeds a share of the whole; -1 if there is none.
template <class At> int64_t pick(int64_t count, float share, const At& weight) {
    double whole = 0, sum = 0;
    for (int64_t i = 0; i < count; i++) whole += weight(i);
    for (int64_t i = 0; i < count; i++) {
        sum += weight(i);
        if (weight(i) > 0 && sum > share * whole) return i;
    }
    return -1;
}

// Draws one of `count` weights in two levels: a block, whose sums are given, and a place in it.
template <class Sum, class At>
int64_t pick_of_blocks(int64_t count, const Draw& draw, const Sum& sum, const At& weight) {
    const int64_t block = pick((count + kSampledTogether - 1) / kSampledTogether, draw.block, sum);
    if (block < 0) return -1;
    const int64_t first = block * kSampledTogether;
    const int64_t place =
        pick(std::min(kSampledTogether, count - first), draw.inside, [&](int64_t i) { return weight(first + i); });
    return place < 0 ? -1 : first + place;
}

// A row's weights, and of each block their sum and the largest.
struct Weights {
    const float *logits, *weights, *blocks;
    int64_t count;
    int64_t blocks_count() const { return (count + kSampledTogether - 1) / kSampledTogether; }
    double whole() const {
        double sum = 0;
        for (int64_t b = 0; b < blocks_count(); b++) sum += blocks[2 * b];
        return sum;
    }
    // Calls `use` with the number of each token of at least a weight, which is above 0.
    template <class Use> void each(float least, const Use& use) const {
        for (int64_t b = 0; b < blocks_count(); b++) {
            if (!(blocks[2 * b + 1] >= least)) continue;
            const int64_t end = std::min(count, (b + 1) * kSampledTogether);
            for (int64_t i = b * kSampledTogether; i < end; i++)
                if (weights[i] >= least) use(i);
        }
    }
};

constexpr float kLeastWeight = 0x1p-126f;

// The weight of the k-th best block's best token: at least k tokens have it.
float least_of_best(const Weights& row, int64_t k, std::vector<float>& largest) {
    if (row.blocks_count() < k) return kLeastWeight;
    largest.clear();
    for (int64_t b = 0; b < row.blocks_count(); b++) largest.push_back(row.blocks[2 * b + 1]);
    std::nth_element(largest.begin(), largest.begin() + (k - 1), largest.end(), std::greater<float>());
    return std::max(largest[k - 1], kLeastWeight);
}

// A weight so that the tokens of at least this one hold a share of the whole.
float least_of_share(const Weights& row, float share) {
    // By their exponents and first bits: those of a bin stay together.
    constexpr int kShift = 20, kBins = (0x3f800000 >> kShift) + 1;
    std::array<double, kBins> masses{};
    const double whole = row.whole();
    // All tokens of less weight hold half of what may be left out.
    const float floor = std::max((float)((1 - share) * whole / (2 * (double)row.count)), kLeastWeight);
    row.each(floor, [&](int64_t i) {
        uint32_t bits;
        std::memcpy(&bits, row.weights + i, 4);
        masses[std::min<int>((int)(bits >> kShift), kBins - 1)] += row.weights[i];
    });
    double mass = 0;
    int bin = kBins;
    while (bin > 0 && mass < share * whole) mass += masses[--bin];
    const uint32_t bits = (uint32_t)bin << kShift;
    float least;
    std::memcpy(&least, &bits, 4);
    return std::max(least, kLeastWeight);
}

// The likeliest tokens, best first: as many as top_k, or so many that they hold top_p of the whole.
void rank(const Weights& row, const Draw& draw, std::vector<Candidate>& ranked) {
    thread_local std::vector<float> largest;
    const float least = draw.top_k > 0 ? least_of_best(row, draw.top_k, largest) : least_of_share(row, draw.top_p);
    ranked.clear();
    row.each(least, [&](int64_t i) { ranked.push_back({row.logits[i], row.weights[i], (int32_t)i}); });
    double whole = row.whole();
    if (draw.top_k > 0) {
        const size_t most = std::min<size_t>(ranked.size(), draw.top_k);
        std::partial_sort(ranked.begin(), ranked.begin() + most, ranked.end());
        ranked.resize(most);
        whole = 0;
        for (const Candidate& each : ranked) whole += each.weight;
    } else {
        std::sort(ranked.begin(), ranked.end());
    }
    if (draw.top_p >= 1) return;
    // A token stays while those before it hold less than top_p of the whole.
    double before = 0;
    size_t kept = 0;
    for (; kept < ranked.size() && before < draw.top_p * whole; kept++) before += ranked[kept].weight;
    ranked.resize(std::max<size_t>(kept, std::min<size_t>(ranked.size(), 1)));
}

int32_t drawn(const float* logits, int64_t count, const Draw& draw) {
    const Kernels& k = kernels();
    const int64_t best = k.best(logits, count);
    if (draw.temperature <= 0) return (int32_t)best;
    float* weights = scratch(count + 2 * (count / kSampledTogether + 1));
    float* blocks = weights + count;
    const float factor = 1.44269504088896341f / draw.temperature;
    k.weigh_logits(logits, count, logits[best], factor, draw.min_p, weights, blocks);
    int64_t token = -1;
    if (draw.candidates == 0) {
        token = pick_of_blocks(count, draw, [&](int64_t b) { return blocks[2 * b]; },
                               [&](int64_t i) { return weights[i]; });
        return (int32_t)(token < 0 ? best : token);
    }
    thread_local std::vector<Candidate> ranked;
    rank({logits, weights, blocks, count}, draw, ranked);
    const int64_t some = (int64_t)ranked.size();
    const auto weight = [&](int64_t i) { return ranked[i].weight; };
    if (std::min<int64_t>(draw.candidates, count) <= kSampledTogether) {
        token = pick(some, draw.inside, weight);
    } else {
        token = pick_of_blocks(some, draw, [&](int64_t block) {
            double sum = 0;
            for (int64_t i = block * kSampledTogether; i < std::min(some, (block + 1) * kSampledTogether); i++)
                sum += weight(i);
            return sum;
        }, weight);
    }
    return token < 0 ? (int32_t)best : ranked[token].id;
}

constexpr int64_t kWork = 4;  // multiplications of a logit, about

// Draws one token of each of some rows: tokens[row] from `row_of(row)`.
template <class Of> void draw_rows(const float* logits, int64_t rows, int64_t count, int32_t* tokens, const Of& row_of) {
    split(rows, kLeastWork / (kWork * count) + 1, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) tokens[row] = drawn(logits + row * count, count, row_of(row));
    });
}

void require_logits(const array& logits, size_t rows) {
    require(logits.dtype() == mlx::core::float32 && logits.ndim() == 2 && logits.shape(0) == (int)rows &&
                logits.shape(1) > 0,
            "logits must be float32 [rows, vocabulary], with a draw for each row");
}

Draw draw_of(const DrawFields& row) {
    return std::apply([](auto... fields) { return Draw{fields...}; }, row);
}

// One token of each row of logits [R, V], int32 [R].
array draw(const array& logits, const std::vector<DrawFields>& rows) {
    require_logits(logits, rows.size());
    std::vector<Draw> draws;
    for (const DrawFields& row : rows) draws.push_back(draw_of(row));
    return operation("quire::draw", {mlx::core::Shape{logits.shape(0)}}, {logits},
                     [draws](const std::vector<array>& in, std::vector<array>& out) {
        return [draws, x = in[0].data<float>(), count = (int64_t)in[0].shape(1), tokens = out[0].data<int32_t>()] {
            draw_rows(x, (int64_t)draws.size(), count, tokens, [&](int64_t row) -> const Draw& { return draws[row]; });
        };
    }, {mlx::core::int32}, kWork * (int64_t)logits.size())[0];
}

// The same where a row's draw depends on how many rows before it did not count: draw number `moved[row]` of it.
array draw_moved(const array& logits, const std::vector<std::vector<DrawFields>>& rows, const array& moved) {
    require_logits(logits, rows.size());
    require(moved.dtype() == mlx::core::int32 && moved.size() == rows.size(), "each row is moved by a number of rows");
    std::vector<Draw> draws;
    std::vector<int64_t> firsts;
    for (const auto& choices : rows) {
        firsts.push_back((int64_t)draws.size());
        for (const DrawFields& row : choices) draws.push_back(draw_of(row));
    }
    return operation("quire::draw_moved", {mlx::core::Shape{logits.shape(0)}}, {logits, moved},
                     [draws, firsts](const std::vector<array>& in, std::vector<array>& out) {
        return [draws, firsts, x = in[0].data<float>(), moved = in[1].data<int32_t>(),
                count = (int64_t)in[0].shape(1), tokens = out[0].data<int32_t>()] {
            draw_rows(x, (int64_t)firsts.size(), count, tokens,
                      [&](int64_t row) -> const Draw& { return draws[firsts[row] + moved[row]]; });
        };
    }, {mlx::core::int32}, kWork * (int64_t)logits.size())[0];
}

}  // namespace

void bind_sampling(nb::module_& m) {
    m.def("draw", &draw, nb::arg("logits"), nb::arg("rows"));
    m.def("draw_moved", &draw_moved, nb::arg("logits"), nb::arg("rows"), nb::arg("moved"));
}

}  // namespace quire
