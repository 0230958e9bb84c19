// Segments as MLX operations: their instructions that call kernels, and their Python face.

#include <nanobind/stl/map.h>

#include <numeric>

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

// Rows of a table of affine codes, by tokens. As MLX decodes them: a code times the scale, plus the bias, both rounded.
class EmbedRows : public RowInstruction {
public:
    EmbedRows(int tokens, int out, const Matrix& table)
        : RowInstruction({tokens}, {out}, 4 * table.depth()), table_(table), w_(table.evaluated()) {
        require(w_.storage == Storage::affine, "tables are of affine codes");
    }
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        const auto* tokens = (const int32_t*)frame.values[reads[0]];
        const int64_t words = w_.depth * w_.bits / 32, groups = w_.depth / w_.group;
        std::vector<uint32_t> codes(words + 1);
        for (int64_t row = begin; row < end; row++) {
            const int64_t token = tokens[row];
            for (int64_t i = 0; i < words; i++) codes[i] = ((const uint32_t*)w_.values)[place(token, i, words)];
            float* to = frame.at(writes[0], row);
            for (int64_t group = 0; group < groups; group++) {
                const int64_t at = place(token, group, groups);
                const float scale = number(w_.scales, at);
                const float bias = w_.biases ? number(w_.biases, at) : scale * w_.bias_factor;
                decode(codes.data(), group * w_.group, scale, bias, to);
            }
        }
    }

private:
    // Of element `i` of the `count` that a column has.
    int64_t place(int64_t column, int64_t i, int64_t count) const {
        constexpr int64_t kTile = 16;
        return w_.tiled ? (column / kTile * count + i) * kTile + column % kTile : column * count + i;
    }
    float number(const void* from, int64_t at) const { return number_at(w_.scale_type, from, at); }
    void decode(const uint32_t* codes, int64_t first, float scale, float bias, float* to) const {
        const uint32_t mask = (1u << w_.bits) - 1;
        for (int64_t i = first; i < first + w_.group; i++) {
            uint64_t two;
            std::memcpy(&two, codes + i * w_.bits / 32, 8);
            const float product = (float)(uint32_t)(two >> (i * w_.bits % 32) & mask) * scale;
            to[i] = product + bias;
        }
    }

    Matrix table_;  // keeps the codes alive
    Weight w_;
};

// Rows of a table of numbers, by tokens. Narrow floats become float32.
class LookUpRows : public RowInstruction {
public:
    LookUpRows(int tokens, int out, array table)
        : RowInstruction({tokens}, {out}, table.shape(1)), table_(std::move(table)), width_(table_.shape(1)) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        const auto* tokens = (const int32_t*)frame.values[reads[0]];
        for (int64_t row = begin; row < end; row++) {
            const int64_t first = tokens[row] * width_;
            float* to = frame.at(writes[0], row);
            if (table_.itemsize() == 4) {
                std::memcpy(to, table_.data<char>() + first * 4, width_ * 4);
            } else {
                for (int64_t i = 0; i < width_; i++) to[i] = number_at(storage_of(table_), table_.data<char>(), first + i);
            }
        }
    }

private:
    array table_;
    int64_t width_;
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

// Vectors of floats as elements of a pool.
void store_as(Storage storage, const float* from, int64_t count, char* to) {
    if (storage == Storage::float32) {
        std::memcpy(to, from, count * 4);
    } else if (storage == Storage::bfloat16) {
        for (int64_t i = 0; i < count; i++) ((mlx::core::bfloat16_t*)to)[i] = from[i];
    } else {
        for (int64_t i = 0; i < count; i++) ((mlx::core::float16_t*)to)[i] = from[i];
    }
}

// Writes the keys or values of rows to a pool.
class WriteRows : public RowInstruction {
public:
    WriteRows(int x, int pool, int group, int64_t heads, int64_t width)
        : RowInstruction({x}, {}, 4 * width), pool_(pool), group_(group), heads_(heads) {}
    void run_rows(const Frame& frame, int64_t begin, int64_t end) const override {
        const PoolArray& pool = frame.pools.at(pool_);
        const Tables& t = frame.groups.at(group_);
        const float* from = frame.values[reads[0]];
        const int64_t bytes = pool.storage == Storage::float32 ? 4 : 2;
        int sequence = 0;
        for (int64_t row = begin; row < end; row++) {
            while (row >= t.rows[sequence + 1]) sequence++;
            const int64_t key = frame.keys[row];
            const int64_t block = t.table[t.starts[sequence] + key / pool.block - t.blocks[sequence]];
            for (int64_t head = 0; head < heads_; head++) {
                const int64_t place = (block * heads_ + head) * pool.block + key % pool.block;
                store_as(pool.storage, from + (row * heads_ + head) * pool.dim, pool.dim,
                         pool.data + place * pool.dim * bytes);
            }
        }
    }

private:
    int pool_, group_;
    int64_t heads_;
};

class AttendRows : public Instruction {
public:
    AttendRows(int q, std::optional<int> sinks, int out, int keys, int values, int group, int heads, int kv_heads,
               float scale, float softcap)
        : Instruction(sinks ? std::vector<int>{q, *sinks} : std::vector<int>{q}, {out}), keys_(keys), values_(values),
          group_(group), heads_(heads), kv_heads_(kv_heads), scale_(scale), softcap_(softcap) {}

    void run(Frame& frame) const override {
        const PoolArray &keys = frame.pools.at(keys_), &values = frame.pools.at(values_);
        PagedRows p{};
        p.q = frame.values[reads[0]];
        p.out = frame.values[writes[0]];
        p.heads = heads_;
        p.kv_heads = kv_heads_;
        p.key_dim = p.q_dim = keys.dim;
        p.value_dim = p.out_dim = values.dim;
        p.block = keys.block;
        p.blocks = Blocks::floats;
        p.storage = keys.storage;
        p.keys = keys.data;
        p.values = values.data;
        p.first_written = INT32_MAX;
        p.scale = scale_;
        p.softcap = softcap_;
        p.sinks = reads.size() > 1 ? frame.values[reads[1]] : nullptr;
        attend_floats(p, frame.groups.at(group_));
    }
    int64_t work(const Frame& frame) const override {
        const int dims = frame.pools.at(keys_).dim + frame.pools.at(values_).dim;
        return pairs_of(frame.groups.at(group_)) * heads_ * dims;
    }
    const char* kind() const override { return "attention"; }

private:
    int keys_, values_, group_, heads_, kv_heads_;
    float scale_, softcap_;
};

using RowShape = std::vector<int64_t>;

}  // namespace

void bind_segments(nb::module_& m) {
    using MaybeValue = std::optional<int>;
    m.def("measure_segments", &measure_segments, nb::arg("measures"));
    m.def("segment_seconds", &segment_seconds);
    nb::class_<Segment>(m, "Segment")
        .def(nb::init<>())
        .def("given", [](Segment& s, int64_t width, bool integers) { return s.body->given(width, integers); },
             nb::arg("width"), nb::arg("integers") = false)
        .def("value", [](Segment& s, int64_t width, bool integers) { return s.body->value(width, integers); },
             nb::arg("width"), nb::arg("integers") = false)
        .def("constant", [](Segment& s, const array& whole) { return s.body->constant(whole); })
        .def("output", [](Segment& s, int value, const std::vector<int>& shape) { s.body->output(value, shape); })
        .def("finish", [](Segment& s) { s.body->finish(); })
        .def("run", &Segment::run, nb::arg("given"), nb::arg("tables") = std::vector<TableArrays>(),
             nb::arg("keys") = nb::none(), nb::arg("pools") = nb::list(), nb::arg("states") = nb::list(),
             nb::arg("state_rows") = std::vector<array>(), nb::arg("at_once") = true)
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
        .def("convolve", [](Segment& s, int x, int taps, MaybeValue bias, int out, int state, int rows, int kernel,
                            bool silu) {
            s.body->add(convolved_rows(x, taps, bias, out, {state, rows}, s.body->width(x), kernel, silu));
        }, nb::arg("x"), nb::arg("taps"), nb::arg("bias").none(), nb::arg("out"), nb::arg("state"), nb::arg("rows"),
             nb::arg("kernel"), nb::arg("silu"))
        .def("delta_rule", [](Segment& s, const std::vector<int>& values, int out, int state, int rows, int key_heads,
                              const std::vector<int>& shape, bool by_column, float eps, float most_correction,
                              float most_forgotten) {
            GatedDelta d{};
            d.key_heads = key_heads;
            d.value_heads = shape.at(0);
            d.value_dim = shape.at(1);
            d.key_dim = shape.at(2);
            d.by_column = by_column;
            d.eps = eps;
            d.most_correction = most_correction;
            d.most_forgotten = most_forgotten;
            s.body->add(delta_rows(values, out, {state, rows}, d));
        }, nb::arg("values"), nb::arg("out"), nb::arg("state"), nb::arg("rows"), nb::arg("key_heads"),
             nb::arg("shape"), nb::arg("by_column"), nb::arg("eps"), nb::arg("most_correction"),
             nb::arg("most_forgotten"))
        .def("state_space", [](Segment& s, const std::vector<int>& values, int out, int state, int rows, int groups,
                               const std::vector<int>& shape, bool by_column) {
            StateSpace space{};
            space.heads = shape.at(0);
            space.head_dim = shape.at(1);
            space.state_dim = shape.at(2);
            space.groups = groups;
            space.by_column = by_column;
            s.body->add(space_rows(values, out, {state, rows}, space));
        }, nb::arg("values"), nb::arg("out"), nb::arg("state"), nb::arg("rows"), nb::arg("groups"), nb::arg("shape"),
             nb::arg("by_column"))
        .def("embed", [](Segment& s, int tokens, const Matrix& table, int out) { s.add<EmbedRows>(tokens, out, table); },
             nb::arg("tokens"), nb::arg("table"), nb::arg("out"))
        .def("look_up", [](Segment& s, int tokens, const array& table, int out) {
            using namespace mlx::core;
            array whole = contiguous(table);
            whole.eval();
            const bool integers = s.body->integers(out);
            require(whole.ndim() == 2 && whole.shape(1) == s.body->width(out) &&
                        (integers ? whole.dtype() == int32 : issubdtype(whole.dtype(), floating)),
                    "tables are [tokens, width], of floats or int32");
            s.add<LookUpRows>(tokens, out, whole);
        }, nb::arg("tokens"), nb::arg("table"), nb::arg("out"))
        .def("best", [](Segment& s, int x, int out) { s.add<BestRows>(x, out, s.body->width(x)); }, nb::arg("x"),
             nb::arg("out"))
        .def("join", [](Segment& s, const std::vector<int>& values, int out) {
            std::vector<int64_t> widths;
            for (const int value : values) widths.push_back(s.body->width(value));
            s.add<JoinRows>(values, out, widths);
        }, nb::arg("values"), nb::arg("out"))
        .def("add_low_rank", [](Segment& s, int y, int x, int numbers, int out, array inner, array outer) {
            require_low_rank(inner, outer, s.body->width(x), s.body->width(y));
            mlx::core::eval(inner, outer);
            require(inner.flags().row_contiguous && outer.flags().row_contiguous, "factors must be contiguous");
            s.add<AddLowRank>(y, x, numbers, out, inner, outer);
        }, nb::arg("y"), nb::arg("x"), nb::arg("numbers"), nb::arg("out"), nb::arg("inner"), nb::arg("outer"))
        .def("floats", [](Segment& s, int x, int out) { s.body->add(floats(x, out, s.body->width(out))); },
             nb::arg("x"), nb::arg("out"))
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
        .def("write", [](Segment& s, int x, int pool, int group, int64_t heads) {
            s.add<WriteRows>(x, pool, group, heads, s.body->width(x));
        }, nb::arg("x"), nb::arg("pool"), nb::arg("group"), nb::arg("heads"))
        .def("attend", [](Segment& s, int q, MaybeValue sinks, int out, int keys, int values, int group, int heads,
                          int kv_heads, float scale, float softcap) {
            s.add<AttendRows>(q, sinks, out, keys, values, group, heads, kv_heads, scale, softcap);
        }, nb::arg("q"), nb::arg("sinks").none(), nb::arg("out"), nb::arg("keys"), nb::arg("values"),
             nb::arg("group"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("scale"), nb::arg("softcap"))
        .def("unary", [](Segment& s, const std::string& name, int x, int out) {
            s.body->add(unary(name, x, out, s.body->width(out)));
        }, nb::arg("name"), nb::arg("x"), nb::arg("out"))
        .def("binary", [](Segment& s, const std::string& name, int x, const RowShape& x_strides, int y,
                          const RowShape& y_strides, int out, const RowShape& shape) {
            s.body->add(binary(name, {x, x_strides}, {y, y_strides}, out, shape));
        }, nb::arg("name"), nb::arg("x"), nb::arg("x_strides"), nb::arg("y"), nb::arg("y_strides"), nb::arg("out"),
             nb::arg("shape"))
        .def("copy", [](Segment& s, int x, const RowShape& strides, int64_t offset, int out, const RowShape& shape) {
            s.body->add(copy({x, strides, offset}, out, shape));
        }, nb::arg("x"), nb::arg("strides"), nb::arg("offset"), nb::arg("out"), nb::arg("shape"));
}

}  // namespace quire
