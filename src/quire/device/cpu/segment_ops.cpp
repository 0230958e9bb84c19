// Segments as MLX operations: their instructions that call kernels, and their Python face.

#include <nanobind/stl/map.h>

#include "segment.h"

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
                decode(codes.data(), group * w_.group, number(w_.scales, at), number(w_.biases, at), to);
            }
        }
    }

private:
    // Of element `i` of the `count` that a column has.
    int64_t place(int64_t column, int64_t i, int64_t count) const {
        constexpr int64_t kTile = 16;
        return w_.tiled ? (column / kTile * count + i) * kTile + column % kTile : column * count + i;
    }
    float number(const void* from, int64_t at) const {
        if (w_.scale_type == Storage::float32) return ((const float*)from)[at];
        if (w_.scale_type == Storage::bfloat16) return ((const mlx::core::bfloat16_t*)from)[at];
        return ((const mlx::core::float16_t*)from)[at];
    }
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
        const GroupRows& group = frame.groups.at(group_);
        const float* from = frame.values[reads[0]];
        const int64_t bytes = pool.storage == Storage::float32 ? 4 : 2;
        for (int64_t n = begin * heads_; n < end * heads_; n++) {
            const int64_t place = (int64_t)group.rows[n] * pool.block + group.offsets[n / heads_];
            store_as(pool.storage, from + n * pool.dim, pool.dim, pool.data + place * pool.dim * bytes);
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
        attend_floats(p, frame.groups.at(group_).tables);
    }
    const char* kind() const override { return "attention"; }

private:
    int keys_, values_, group_, heads_, kv_heads_;
    float scale_, softcap_;
};

// One run of a segment. Inputs: pools, given values, and of each group its tables, rows and offsets. Outputs: the
// segment's, then the pools, where they lie if nobody else reads them.
class SegmentRun : public mlx::core::Primitive {
public:
    SegmentRun(mlx::core::Stream stream, std::shared_ptr<const SegmentBody> body, size_t pools,
        std::vector<std::vector<int64_t>> sizes)
        : Primitive(stream), body_(std::move(body)), pools_(pools), sizes_(std::move(sizes)) {}

    void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
        auto& encoder = mlx::core::cpu::get_command_encoder(stream());
        // Each output holds the inputs, though only one's are asked for: the others' would keep the pools in use.
        for (array& out : outputs)
            if (&out.inputs() != &inputs) out.inputs().clear();
        const size_t values = outputs.size() - pools_;
        for (size_t i = 0; i < values; i++) outputs[i].set_data(mlx::core::allocator::malloc(outputs[i].nbytes()));
        for (size_t i = 0; i < pools_; i++) {
            array& pool = outputs[values + i];
            if (inputs[i].is_donatable() && inputs[i].flags().row_contiguous) {
                pool.copy_shared_buffer(inputs[i]);
            } else {
                pool.set_data(mlx::core::allocator::malloc(pool.nbytes()));
                encoder.dispatch(copying(inputs[i], pool));
            }
        }
        encoder.dispatch([body = body_, frame = frame_of(in_rows(inputs, pools_, encoder), outputs)]() mutable {
            body->run(frame);
        });
    }
    void eval_gpu(const std::vector<array>&, std::vector<array>&) override {
        throw std::runtime_error("quire's CPU kernels do not run on a GPU");
    }
    const char* name() const override { return "quire::segment"; }

private:
    Frame frame_of(const std::vector<array>& rows, std::vector<array>& outputs) const {
        Frame frame{};
        frame.rows = rows[0].shape(0);
        frame.values.resize(body_->values());
        frame.strides.resize(body_->values());
        size_t at = 0;
        for (const int value : body_->given()) frame.values[value] = const_cast<float*>(rows[at++].data<float>());
        for (const auto& sizes : sizes_) {
            const Tables tables(rows[at].data<int32_t>(), sizes);
            frame.groups.push_back({tables, rows[at + 1].data<int32_t>(), rows[at + 2].data<int32_t>()});
            at += 3;
        }
        size_t to = 0;
        for (const int value : body_->outputs()) frame.values[value] = outputs[to++].data<float>();
        for (; to < outputs.size(); to++) {
            array& pool = outputs[to];
            frame.pools.push_back({pool.data<char>(), storage_of(pool), pool.shape(0), pool.shape(1), pool.shape(2)});
        }
        return frame;
    }

    std::shared_ptr<const SegmentBody> body_;
    size_t pools_;
    std::vector<std::vector<int64_t>> sizes_;  // of each group's tables
};

// A segment while it is built, and its runs.
struct Segment {
    std::shared_ptr<SegmentBody> body = std::make_shared<SegmentBody>();

    // Runs the segment on given values `[T, ...]`. As where MLX assigns, the pools' Python objects become the pools
    // after it.
    std::vector<array> run(const std::vector<array>& given, const std::vector<TableArrays>& tables,
                           const std::vector<array>& rows, const std::vector<array>& offsets,
                           const nb::list& list) const {
        using namespace mlx::core;
        require(!given.empty() && given.size() == body->given().size(), "the segment is given other values");
        const int count = given[0].shape(0);
        std::vector<array*> pools;
        for (const auto& pool : list) pools.push_back(&nb::cast<array&>(pool));
        std::vector<array> inputs;
        for (const array* pool : pools) inputs.push_back(*pool);
        for (size_t i = 0; i < given.size(); i++) {
            const int value = body->given()[i];
            require(given[i].dtype() == (body->integers(value) ? int32 : float32) && given[i].shape(0) == count &&
                        (int64_t)given[i].size() == count * body->width(value),
                    "given values must be of their type, with a row for each of the step's");
            inputs.push_back(given[i]);
        }
        std::vector<std::vector<int64_t>> sizes;
        for (size_t i = 0; i < tables.size(); i++) {
            require(rows.at(i).dtype() == int32 && offsets.at(i).dtype() == int32, "rows and offsets are int32");
            inputs.insert(inputs.end(), {tables[i].all, rows[i], offsets[i]});
            sizes.push_back(tables[i].sizes);
        }
        std::vector<Shape> shapes;
        std::vector<Dtype> types;
        for (const auto& shape : body->output_shapes()) {
            shapes.push_back({count});
            shapes.back().insert(shapes.back().end(), shape.begin(), shape.end());
            types.push_back(float32);
        }
        const size_t values = shapes.size();
        for (const array* pool : pools) {
            require(pool->ndim() == 3, "pools are [rows, block, dim]");
            shapes.push_back(pool->shape());
            types.push_back(pool->dtype());
        }
        auto primitive = std::make_shared<SegmentRun>(default_stream(Device(Device::cpu)), body, pools.size(), sizes);
        auto made = array::make_arrays(shapes, types, primitive, inputs);
        for (size_t i = 0; i < pools.size(); i++) pools[i]->overwrite_descriptor(made[values + i]);
        made.resize(values, made[0]);
        return made;
    }

    template <class Made, class... Arguments> void add(Arguments&&... arguments) {
        body->add(std::make_unique<Made>(std::forward<Arguments>(arguments)...));
    }
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
        .def("value", [](Segment& s, int64_t width) { return s.body->value(width); })
        .def("constant", [](Segment& s, const array& whole) { return s.body->constant(whole); })
        .def("output", [](Segment& s, int value, const std::vector<int>& shape) { s.body->output(value, shape); })
        .def("finish", [](Segment& s) { s.body->finish(); })
        .def("run", &Segment::run, nb::arg("given"), nb::arg("tables"), nb::arg("rows"), nb::arg("offsets"),
             nb::arg("pools"))
        .def("products", [](Segment& s, int x, const std::vector<Matrix>& matrices, const std::vector<int>& outs) {
            s.add<MultiplyRows>(x, matrices, outs);
        })
        .def("experts", [](Segment& s, int x, int chosen, const Matrix& matrices, int out, int64_t k, bool shared) {
            s.add<MultiplyByExperts>(x, chosen, out, matrices, k, shared);
        }, nb::arg("x"), nb::arg("chosen"), nb::arg("matrices"), nb::arg("out"), nb::arg("k"), nb::arg("shared"))
        .def("mix", [](Segment& s, int y, int weights, int out, int64_t k) {
            s.add<MixRows>(y, weights, out, k, s.body->width(out));
        }, nb::arg("y"), nb::arg("weights"), nb::arg("out"), nb::arg("k"))
        .def("embed", [](Segment& s, int tokens, const Matrix& table, int out) { s.add<EmbedRows>(tokens, out, table); },
             nb::arg("tokens"), nb::arg("table"), nb::arg("out"))
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
