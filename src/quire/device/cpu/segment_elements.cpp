// Instructions of segments on elements. The bits are those of the device's operations: MLX's own functions but for tanh.

#include "mlx/backend/cpu/binary_ops.h"
#include "mlx/backend/cpu/unary_ops.h"
#include "segment_run.h"

namespace quire {
namespace {

struct Operand {
    int value;
    std::vector<int64_t> strides;  // of each axis of a row, 0 where it is broadcast
    int64_t offset = 0;
};

namespace detail = mlx::core::detail;

// Runs a loop over elements. It is compiled for all processors and, with all that it calls, for those with AVX2: there
// vectors are longer, and a fused product and sum is an instruction in place of a call. The bits are the same.
#if defined(__x86_64__)
template <class Loop> __attribute__((target("avx2,fma"), flatten)) void run_by_avx2(const Loop& loop) { loop(); }
#else
template <class Loop> void run_by_avx2(const Loop& loop) { loop(); }
#endif
template <class Loop> void run_elements(const Loop& loop) {
    constexpr int kVector = 8;  // floats that AVX2 has in one
    kernels().vector < kVector ? loop() : run_by_avx2(loop);
}

template <class Op> class UnaryRows : public RowInstruction {
public:
    UnaryRows(int x, int out, int64_t width) : RowInstruction({x}, {out}, 16 * width), width_(width) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        const float* from = frame.at(reads[0], begin);
        float* to = frame.at(writes[0], begin);
        const int64_t count = (end - begin) * width_;
        run_elements([=] {
            for (int64_t i = 0; i < count; i++) to[i] = Op()(from[i]);
        });
    }

private:
    int64_t width_;
};

class TanhRows : public RowInstruction {
public:
    TanhRows(int x, int out, int64_t width) : RowInstruction({x}, {out}, 4 * width), width_(width) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        kernels().tanh(frame.values[reads[0]], begin * width_, end * width_, frame.values[writes[0]]);
    }

private:
    int64_t width_;
};

class FloatRows : public RowInstruction {
public:
    FloatRows(int x, int out, int64_t width) : RowInstruction({x}, {out}, width), width_(width) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        const auto* from = (const int32_t*)frame.at(reads[0], begin);
        float* to = frame.at(writes[0], begin);
        for (int64_t i = 0; i < (end - begin) * width_; i++) to[i] = (float)from[i];
    }

private:
    int64_t width_;
};

// Elements of a row of `shape`, of which operands have some axes only.
class StridedRows : public RowInstruction {
public:
    StridedRows(std::vector<int> reads, int out, const std::vector<int64_t>& shape, std::vector<Operand> operands)
        : RowInstruction(std::move(reads), {out}, 0), shape_(shape), operands_(std::move(operands)), work_(1) {
        for (const Operand& each : operands_) require(each.strides.size() == shape.size(), "a stride for each axis");
        require(!shape.empty(), "rows have an axis");
        for (const int64_t size : shape) work_ *= size;
    }
    int64_t row_work() const override { return work_; }

protected:
    // Calls `use(out, from)` with where each run of the last axis begins.
    template <class Use> void each_run(const Frame& frame, int64_t row, const Use& use) const {
        const size_t axes = shape_.size() - 1;
        std::vector<int64_t> place(axes, 0);
        const float* from[2];
        for (size_t n = 0; n < operands_.size(); n++) from[n] = frame.at(operands_[n].value, row) + operands_[n].offset;
        float* to = frame.at(writes[0], row);
        const int64_t length = shape_.back();
        for (int64_t runs = work_ / length; runs > 0; runs--, to += length) {
            use(to, from);
            for (size_t axis = axes; axis-- > 0;) {
                for (size_t n = 0; n < operands_.size(); n++) from[n] += operands_[n].strides[axis];
                if (++place[axis] < shape_[axis]) break;
                for (size_t n = 0; n < operands_.size(); n++) from[n] -= operands_[n].strides[axis] * shape_[axis];
                place[axis] = 0;
            }
        }
    }
    int64_t length() const { return shape_.back(); }
    int64_t stride(size_t operand) const { return operands_[operand].strides.back(); }

private:
    std::vector<int64_t> shape_;
    std::vector<Operand> operands_;
    int64_t work_;
};

template <class Op> class BinaryRows : public StridedRows {
public:
    BinaryRows(const Operand& x, const Operand& y, int out, const std::vector<int64_t>& shape)
        : StridedRows({x.value, y.value}, out, shape, {x, y}) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        const int64_t x = stride(0), y = stride(1);
        run_elements([&] {
            for (int64_t row = begin; row < end; row++) {
                each_run(frame, row, [&](float* to, const float* const* from) {
                    const float *a = from[0], *b = from[1];
                    const int64_t count = length();
                    if (x == 1 && y == 1) {
                        for (int64_t i = 0; i < count; i++) to[i] = Op()(a[i], b[i]);
                    } else if (x == 1 && y == 0) {
                        const float one = *b;
                        for (int64_t i = 0; i < count; i++) to[i] = Op()(a[i], one);
                    } else {
                        for (int64_t i = 0; i < count; i++) to[i] = Op()(a[i * x], b[i * y]);
                    }
                });
            }
        });
    }
};

class CopyRows : public StridedRows {
public:
    CopyRows(const Operand& x, int out, const std::vector<int64_t>& shape) : StridedRows({x.value}, out, shape, {x}) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        const int64_t step = stride(0);
        for (int64_t row = begin; row < end; row++) {
            each_run(frame, row, [&](float* to, const float* const* from) {
                for (int64_t i = 0; i < length(); i++) to[i] = from[0][i * step];
            });
        }
    }
};

std::unique_ptr<const Instruction> unary(const std::string& name, int x, int out, int64_t width) {
#define QUIRE_UNARY(op) \
    if (name == #op) return std::make_unique<UnaryRows<detail::op>>(x, out, width)
    QUIRE_UNARY(Abs);
    QUIRE_UNARY(Cos);
    QUIRE_UNARY(Erf);
    QUIRE_UNARY(Exp);
    QUIRE_UNARY(Expm1);
    QUIRE_UNARY(Log1p);
    QUIRE_UNARY(Negative);
    QUIRE_UNARY(Rsqrt);
    QUIRE_UNARY(Sigmoid);
    QUIRE_UNARY(Sin);
    QUIRE_UNARY(Sqrt);
    QUIRE_UNARY(Square);
#undef QUIRE_UNARY
    if (name == "Tanh") return std::make_unique<TanhRows>(x, out, width);
    throw std::invalid_argument("no instruction computes " + name);
}

std::unique_ptr<const Instruction> binary(const std::string& name, const Operand& x, const Operand& y, int out,
                                          const std::vector<int64_t>& shape) {
#define QUIRE_BINARY(op) \
    if (name == #op) return std::make_unique<BinaryRows<detail::op>>(x, y, out, shape)
    QUIRE_BINARY(Add);
    QUIRE_BINARY(Divide);
    QUIRE_BINARY(LogAddExp);
    QUIRE_BINARY(Maximum);
    QUIRE_BINARY(Minimum);
    QUIRE_BINARY(Multiply);
    QUIRE_BINARY(Subtract);
#undef QUIRE_BINARY
    throw std::invalid_argument("no instruction computes " + name);
}

using RowShape = std::vector<int64_t>;

}  // namespace

void bind_segment_elements(SegmentClass& segment) {
    segment
        .def("floats", [](Segment& s, int x, int out) { s.add<FloatRows>(x, out, s.body->width(out)); },
             nb::arg("x"), nb::arg("out"))
        .def("unary", [](Segment& s, const std::string& name, int x, int out) {
            s.body->add(unary(name, x, out, s.body->width(out)));
        }, nb::arg("name"), nb::arg("x"), nb::arg("out"))
        .def("binary", [](Segment& s, const std::string& name, int x, const RowShape& x_strides, int y,
                          const RowShape& y_strides, int out, const RowShape& shape) {
            s.body->add(binary(name, {x, x_strides}, {y, y_strides}, out, shape));
        }, nb::arg("name"), nb::arg("x"), nb::arg("x_strides"), nb::arg("y"), nb::arg("y_strides"), nb::arg("out"),
             nb::arg("shape"))
        .def("copy", [](Segment& s, int x, const RowShape& strides, int64_t offset, int out, const RowShape& shape) {
            s.add<CopyRows>(Operand{x, strides, offset}, out, shape);
        }, nb::arg("x"), nb::arg("strides"), nb::arg("offset"), nb::arg("out"), nb::arg("shape"));
}

}  // namespace quire
