// Instructions of segments that multiply rows by matrices, and choose and mix experts.

#include "routing.h"
#include "segment_run.h"

namespace quire {
namespace {

// Products of the same rows.
class MultiplyRows : public Instruction {
public:
    MultiplyRows(int x, const std::vector<Matrix>& matrices, const std::vector<int>& outs)
        : Instruction({x}, outs), matrices_(matrices) {
        for (const Matrix& each : matrices_) weights_.push_back(each.evaluated());
    }
    void run(Frame& frame) const override {
        std::vector<Product> products;
        for (size_t i = 0; i < weights_.size(); i++) products.push_back({weights_[i], frame.values[writes[i]]});
        frame.arranged ? multiply_arranged(products, frame.arranged, frame.rows)
                       : multiply(products, frame.values[reads[0]], frame.rows);
    }
    int64_t work(const Frame& frame) const override {
        int64_t all = 0;
        for (const Matrix& each : matrices_) all += frame.rows * each.columns() * each.depth();
        return all;
    }
    const char* kind() const override { return "products"; }
    int64_t arranged_floats(int64_t rows) const override {
        for (const Weight& each : weights_)
            if (!alike(weights_[0], each)) return 0;
        return kernels().arranged_floats(weights_[0], rows);
    }
    int64_t arranged_together() const override { return kernels().arranged_together(weights_[0]); }
    void arrange(const Frame& frame, int64_t begin, int64_t end) const override {
        const Weight& w = weights_[0];
        const Source rows{frame.values[reads[0]], w.depth, nullptr};
        kernels().arrange(w, rows, frame.rows, begin, end, frame.arranged);
    }

private:
    std::vector<Matrix> matrices_;  // keep the weights alive
    std::vector<Weight> weights_;
};

// Products of rows, or of rows of each of their `k` experts, by the matrices that `chosen` names.
class MultiplyByExperts : public Instruction {
public:
    MultiplyByExperts(int x, int chosen, int out, const Matrix& matrices, int64_t k, bool shared)
        : Instruction({x, chosen}, {out}), matrices_(matrices), stack_(matrices.evaluated_stack()), k_(k),
          together_(shared ? k : 1) {}
    void run(Frame& frame) const override {
        const auto* ids = (const int32_t*)frame.values[reads[1]];
        multiply_experts(stack_, ids, frame.rows * k_, together_, frame.values[reads[0]], frame.values[writes[0]]);
    }
    int64_t work(const Frame& frame) const override {
        return frame.rows * k_ * matrices_.columns() * matrices_.depth();
    }
    const char* kind() const override { return "experts"; }

private:
    Matrix matrices_;  // keeps the weights alive
    std::vector<Weight> stack_;
    int64_t k_, together_;
};

class MixRows : public RowInstruction {
public:
    MixRows(int y, int weights, int out, int64_t k, int64_t width)
        : RowInstruction({y, weights}, {out}, 2 * k * width), k_(k), width_(width) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        mix_rows(frame.values[reads[0]], frame.values[reads[1]], k_, width_, begin, end, frame.values[writes[0]]);
    }

private:
    int64_t k_, width_;
};

// The experts of each row, and their weights.
class RouteRows : public RowInstruction {
public:
    RouteRows(int logits, std::optional<int> correction, std::optional<int> per_expert, int chosen, int weights,
              const Routing& routing)
        : RowInstruction({logits}, {chosen, weights}, 8 * routing.experts), correction_(correction),
          per_expert_(per_expert), routing_(routing) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        const float* correction = correction_ ? frame.values[*correction_] : nullptr;
        const float* factors = per_expert_ ? frame.values[*per_expert_] : nullptr;
        route_rows(routing_, frame.values[reads[0]], correction, factors, begin, end,
                   (int32_t*)frame.values[writes[0]], frame.values[writes[1]]);
    }

private:
    std::optional<int> correction_, per_expert_;  // constants
    Routing routing_;
};

// Adds products of each row by thin matrices of its own.
class AddLowRank : public RowInstruction {
public:
    AddLowRank(int y, int x, int numbers, int out, const array& inner, const array& outer)
        : RowInstruction({y, x, numbers}, {out}, work_of(low_rank(inner, outer))), inner_(inner), outer_(outer),
          factors_(low_rank(inner_, outer_)) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        const auto* numbers = (const int32_t*)frame.values[reads[2]];
        kernels().add_low_rank(factors_, frame.values[reads[1]], numbers, frame.values[reads[0]], begin, end,
                               frame.values[writes[0]]);
    }

private:
    array inner_, outer_;  // keep the factors alive
    LowRank factors_;
};

}  // namespace

void bind_segment_products(SegmentClass& segment) {
    using MaybeValue = std::optional<int>;
    segment
        .def("products", [](Segment& s, int x, const std::vector<Matrix>& matrices, const std::vector<int>& outs) {
            s.add<MultiplyRows>(x, matrices, outs);
        })
        .def("experts", [](Segment& s, int x, int chosen, const Matrix& matrices, int out, int64_t k, bool shared) {
            s.add<MultiplyByExperts>(x, chosen, out, matrices, k, shared);
        }, nb::arg("x"), nb::arg("chosen"), nb::arg("matrices"), nb::arg("out"), nb::arg("k"), nb::arg("shared"))
        .def("mix", [](Segment& s, int y, int weights, int out, int64_t k) {
            s.add<MixRows>(y, weights, out, k, s.body->width(out));
        }, nb::arg("y"), nb::arg("weights"), nb::arg("out"), nb::arg("k"))
        .def("route", [](Segment& s, int logits, MaybeValue correction, MaybeValue per_expert, int chosen, int weights,
                         int k, bool sigmoid, bool normalise, float scale, float softcap, int groups, int best_groups,
                         int counted) {
            const Routing routing{(int)s.body->width(logits), k, sigmoid, normalise, scale, softcap, groups,
                                  best_groups, counted};
            s.add<RouteRows>(logits, correction, per_expert, chosen, weights, routing);
        }, nb::arg("logits"), nb::arg("correction").none(), nb::arg("per_expert").none(), nb::arg("chosen"),
             nb::arg("weights"), nb::arg("k"), nb::arg("sigmoid"), nb::arg("normalise"), nb::arg("scale"),
             nb::arg("softcap"), nb::arg("groups"), nb::arg("best_groups"), nb::arg("counted"))
        .def("add_low_rank", [](Segment& s, int y, int x, int numbers, int out, array inner, array outer) {
            require_low_rank(inner, outer, s.body->width(x), s.body->width(y));
            mlx::core::eval(inner, outer);
            require(inner.flags().row_contiguous && outer.flags().row_contiguous, "factors must be contiguous");
            s.add<AddLowRank>(y, x, numbers, out, inner, outer);
        }, nb::arg("y"), nb::arg("x"), nb::arg("numbers"), nb::arg("out"), nb::arg("inner"), nb::arg("outer"));
}

}  // namespace quire
