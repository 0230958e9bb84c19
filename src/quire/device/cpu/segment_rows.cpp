// Instructions of segments that norm, rotate, gate and join rows.

#include <numeric>

#include "segment_run.h"

namespace quire {
namespace {

// An RMS norm of each head of a row.
class NormRows : public RowInstruction {
public:
    NormRows(int x, std::optional<int> weight, int out, float eps, int64_t heads, int64_t dim)
        : RowInstruction(weight ? std::vector<int>{x, *weight} : std::vector<int>{x}, {out}, 4 * heads * dim),
          eps_(eps), heads_(heads), dim_(dim) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        const float* weight = reads.size() > 1 ? frame.values[reads[1]] : nullptr;
        kernels().rms_norm(frame.values[reads[0]], weight, nullptr, nullptr, eps_, dim_, begin * heads_, end * heads_,
                           frame.values[writes[0]]);
    }

private:
    float eps_;
    int64_t heads_, dim_;
};

class RotateRows : public RowInstruction {
public:
    RotateRows(int x, int cosines, int sines, int out, int64_t heads, int64_t dim, int64_t half, bool neighbours)
        : RowInstruction({x, cosines, sines}, {out}, 4 * heads * dim), heads_(heads), dim_(dim), half_(half),
          neighbours_(neighbours) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        kernels().rotate(frame.values[reads[0]], frame.values[reads[1]], frame.values[reads[2]], heads_, dim_,
                         2 * half_, neighbours_, begin, end, frame.values[writes[0]]);
    }

private:
    int64_t heads_, dim_, half_;
    bool neighbours_;
};

class GateRows : public RowInstruction {
public:
    GateRows(int gates, int up, int out, const std::string& activation, int64_t width)
        : RowInstruction({gates, up}, {out}, 16 * width), activation_(activation_of(activation)), width_(width) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        kernels().gate(activation_, frame.values[reads[0]], frame.values[reads[1]], begin * width_, end * width_,
                       frame.values[writes[0]]);
    }

private:
    int activation_;
    int64_t width_;
};

class ActivateRows : public RowInstruction {
public:
    ActivateRows(int x, int out, const std::string& activation, int64_t width)
        : RowInstruction({x}, {out}, 16 * width), activation_(activation_of(activation)), ones_(width, 1.0f) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        const auto width = (int64_t)ones_.size();
        for (int64_t row = begin; row < end; row++)
            kernels().gate(activation_, frame.at(reads[0], row), ones_.data(), 0, width, frame.at(writes[0], row));
    }

private:
    int activation_;
    std::vector<float> ones_;
};

// The place of the largest of each row.
class BestRows : public RowInstruction {
public:
    BestRows(int x, int out, int64_t width) : RowInstruction({x}, {out}, 4 * width), width_(width) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        for (int64_t row = begin; row < end; row++)
            *(int32_t*)frame.at(writes[0], row) = (int32_t)kernels().best(frame.at(reads[0], row), width_);
    }

private:
    int64_t width_;
};

// The place of the largest of each row, and its share of the row's softmax.
class LikeliestRows : public RowInstruction {
public:
    LikeliestRows(int x, int out, int chances, int64_t width)
        : RowInstruction({x}, {out, chances}, 20 * width), width_(width) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        constexpr float kLog2E = 1.44269504088896341f;
        const int64_t blocks = (width_ + kSampledTogether - 1) / kSampledTogether;
        float* weights = scratch(width_ + 2 * blocks);
        float* sums = weights + width_;
        for (int64_t row = begin; row < end; row++) {
            const float* x = frame.at(reads[0], row);
            const int64_t best = kernels().best(x, width_);
            kernels().weigh_logits(x, width_, x[best], kLog2E, 0, weights, sums);
            float whole = 0;
            for (int64_t block = 0; block < blocks; block++) whole += sums[2 * block];
            *(int32_t*)frame.at(writes[0], row) = (int32_t)best;
            *frame.at(writes[1], row) = 1 / whole;
        }
    }

private:
    int64_t width_;
};

// Rows of several values side by side.
class JoinRows : public RowInstruction {
public:
    JoinRows(const std::vector<int>& values, int out, std::vector<int64_t> widths)
        : RowInstruction(values, {out}, std::accumulate(widths.begin(), widths.end(), int64_t{0})),
          widths_(std::move(widths)) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        for (int64_t row = begin; row < end; row++) {
            float* to = frame.at(writes[0], row);
            for (size_t i = 0; i < reads.size(); to += widths_[i++])
                std::memcpy(to, frame.at(reads[i], row), widths_[i] * 4);
        }
    }

private:
    std::vector<int64_t> widths_;
};

}  // namespace

void bind_segment_rows(SegmentClass& segment) {
    using MaybeValue = std::optional<int>;
    segment
        .def("rms_norm", [](Segment& s, int x, MaybeValue weight, int out, float eps, int64_t heads, int64_t dim) {
            s.add<NormRows>(x, weight, out, eps, heads, dim);
        }, nb::arg("x"), nb::arg("weight").none(), nb::arg("out"), nb::arg("eps"), nb::arg("heads"), nb::arg("dim"))
        .def("rotate", [](Segment& s, int x, int cosines, int sines, int out, int64_t heads, int64_t dim, int64_t half,
                          bool neighbours) { s.add<RotateRows>(x, cosines, sines, out, heads, dim, half, neighbours); },
             nb::arg("x"), nb::arg("cosines"), nb::arg("sines"), nb::arg("out"), nb::arg("heads"), nb::arg("dim"),
             nb::arg("half"), nb::arg("neighbours"))
        .def("gate", [](Segment& s, int gates, int up, int out, const std::string& activation, int64_t width) {
            s.add<GateRows>(gates, up, out, activation, width);
        }, nb::arg("gates"), nb::arg("up"), nb::arg("out"), nb::arg("activation"), nb::arg("width"))
        .def("activate", [](Segment& s, int x, int out, const std::string& activation) {
            s.add<ActivateRows>(x, out, activation, s.body->width(out));
        }, nb::arg("x"), nb::arg("out"), nb::arg("activation"))
        .def("best", [](Segment& s, int x, int out) { s.add<BestRows>(x, out, s.body->width(x)); }, nb::arg("x"),
             nb::arg("out"))
        .def("likeliest", [](Segment& s, int x, int out, int chances) {
            s.add<LikeliestRows>(x, out, chances, s.body->width(x));
        }, nb::arg("x"), nb::arg("out"), nb::arg("chances"))
        .def("join", [](Segment& s, const std::vector<int>& values, int out) {
            std::vector<int64_t> widths;
            for (const int value : values) widths.push_back(s.body->width(value));
            s.add<JoinRows>(values, out, widths);
        }, nb::arg("values"), nb::arg("out"));
}

}  // namespace quire
