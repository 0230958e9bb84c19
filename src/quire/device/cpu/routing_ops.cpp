// Choice of experts as an MLX operation.

#include "routing.h"

#include <cmath>

#include "operation.h"

namespace quire {
namespace {

// The best `k` of `count` numbers by descending value, the last of equal ones first: `argpartition` of MLX
// chooses so on every device.
void highest_of(const float* x, int count, int k, int32_t* ids, float* best) {
    int found = 0;
    for (int i = count - 1; i >= 0; i--) {
        if (found == k && !(x[i] > best[k - 1])) continue;
        int at = found < k ? found++ : k - 1;
        for (; at > 0 && x[i] > best[at - 1]; at--) {
            best[at] = best[at - 1];
            ids[at] = ids[at - 1];
        }
        best[at] = x[i];
        ids[at] = i;
    }
}

// Sums of exp(x - largest): what a softmax divides by.
struct Exponentials {
    float largest = -INFINITY, sum = 0;
    Exponentials(const float* x, int count) {
        for (int i = 0; i < count; i++) largest = std::max(largest, x[i]);
        for (int i = 0; i < count; i++) sum += std::exp(x[i] - largest);
    }
    float share(float x) const { return std::exp(x - largest) / sum; }
};

// One row. `room` holds twice the experts, the groups, and twice the most of `k`, `counted` and `best_groups`.
class RoutedRow {
public:
    RoutedRow(const Routing& routing, const float* logits, const float* correction, float* room, int32_t* ids)
        : r_(routing), logits_(logits), scores_(room), ranked_(room + r_.experts), worth_(ranked_ + r_.experts),
          best_(worth_ + r_.groups), ids_(ids) {
        const bool grouped = r_.best_groups < r_.groups;
        if (r_.sigmoid) {
            score_by_sigmoid(correction || grouped);
        } else if (correction || (grouped && r_.counted > 1)) {
            const Exponentials all(logits, r_.experts);
            for (int i = 0; i < r_.experts; i++) ranked_[i] = all.share(logits[i]);
        } else {
            std::copy(logits, logits + r_.experts, ranked_);  // in the order of probabilities
        }
        if (correction)
            for (int i = 0; i < r_.experts; i++) ranked_[i] += correction[i];
        if (grouped) keep_best_groups();
    }

    void choose(int32_t* chosen, float* weights) {
        highest_of(ranked_, r_.experts, r_.k, chosen, best_);
        for (int i = 0; i < r_.k; i++) weights[i] = (r_.sigmoid ? scores_ : logits_)[chosen[i]];
        if (!r_.sigmoid) {
            const Exponentials among = r_.normalise ? Exponentials(weights, r_.k) : Exponentials(logits_, r_.experts);
            for (int i = 0; i < r_.k; i++) weights[i] = among.share(weights[i]);
        } else if (r_.normalise) {
            float sum = 0;
            for (int i = 0; i < r_.k; i++) sum += weights[i];
            for (int i = 0; i < r_.k; i++) weights[i] /= sum + 1e-20f;
        }
        for (int i = 0; i < r_.k; i++) weights[i] *= r_.scale;
    }

private:
    void score_by_sigmoid(bool ranks_scores) {
        for (int i = 0; i < r_.experts; i++) {
            const float x = r_.softcap ? std::tanh(logits_[i] / r_.softcap) * r_.softcap : logits_[i];
            scores_[i] = 1 / (1 + std::exp(-x));
            ranked_[i] = ranks_scores ? scores_[i] : x;  // which differ where their sigmoids are all 1
        }
    }
    void keep_best_groups() {
        const int size = r_.experts / r_.groups;
        for (int group = 0; group < r_.groups; group++) {
            highest_of(ranked_ + group * size, size, r_.counted, ids_, best_);
            worth_[group] = 0;
            for (int i = 0; i < r_.counted; i++) worth_[group] += best_[i];
        }
        highest_of(worth_, r_.groups, r_.best_groups, ids_, best_);
        const float least = best_[r_.best_groups - 1];
        for (int i = 0; i < r_.experts; i++)
            if (!(worth_[i / size] >= least)) ranked_[i] = -INFINITY;
    }

    const Routing& r_;
    const float* logits_;
    float *scores_, *ranked_, *worth_, *best_;
    int32_t* ids_;
};

}  // namespace

void route_rows(const Routing& routing, const float* logits, const float* correction, const float* per_expert,
                int64_t begin, int64_t end, int32_t* chosen, float* weights) {
    const int most = std::max({routing.k, routing.counted, routing.best_groups});
    float* room = scratch(2 * routing.experts + routing.groups + 2 * most);
    auto* ids = (int32_t*)(room + 2 * routing.experts + routing.groups + most);
    for (int64_t row = begin; row < end; row++) {
        int32_t* own = chosen + row * routing.k;
        float* shares = weights + row * routing.k;
        RoutedRow(routing, logits + row * routing.experts, correction, room, ids).choose(own, shares);
        if (per_expert)
            for (int i = 0; i < routing.k; i++) shares[i] *= per_expert[own[i]];
    }
}

namespace {

std::vector<array> route(const array& logits, const std::optional<array>& correction,
                         const std::optional<array>& per_expert, int k, bool sigmoid, bool normalise, float scale,
                         float softcap, int groups, int best_groups, int counted) {
    using namespace mlx::core;
    require(logits.dtype() == float32 && logits.ndim() == 2, "logits must be float32 [rows, experts]");
    const int experts = logits.shape(1);
    require(0 < k && k <= experts && groups > 0 && experts % groups == 0 && counted <= experts / groups,
            "experts and groups do not fit");
    const Routing routing{experts, k, sigmoid, normalise, scale, softcap, groups, best_groups, counted};
    std::vector<array> inputs = {logits};
    for (const auto* each : {&correction, &per_expert}) {
        if (!*each) continue;
        require((*each)->dtype() == float32 && (int)(*each)->size() == experts, "each expert has a float32 number");
        inputs.push_back(**each);
    }
    const Shape shape = {logits.shape(0), k};
    const bool corrected = correction.has_value(), weighted = per_expert.has_value();
    return operation("quire::route", {shape, shape}, inputs,
                     [=](const std::vector<array>& in, std::vector<array>& out) {
        const float* added = corrected ? in[1].data<float>() : nullptr;
        const float* factors = weighted ? in[1 + corrected].data<float>() : nullptr;
        return [=, rows = (int64_t)in[0].shape(0), logits = in[0].data<float>(), chosen = out[0].data<int32_t>(),
                weights = out[1].data<float>()] {
            split(rows, kLeastWork / (8 * experts) + 1, 1, [&](int64_t begin, int64_t end) {
                route_rows(routing, logits, added, factors, begin, end, chosen, weights);
            });
        };
    }, {int32, float32});
}

}  // namespace

void bind_routing(nb::module_& m) {
    m.def("route", &route, nb::arg("logits"), nb::arg("correction").none(), nb::arg("per_expert").none(), nb::arg("k"),
          nb::arg("sigmoid"), nb::arg("normalise"), nb::arg("scale"), nb::arg("softcap"), nb::arg("groups"),
          nb::arg("best_groups"), nb::arg("counted"));
}

}  // namespace quire
