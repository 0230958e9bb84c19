// Instructions of segments that read rows of tables, by tokens.

#include "segment_run.h"

namespace quire {
namespace {

// Instructions take a negative token, which stands for none, as token 0.

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
            const int64_t token = std::max(tokens[row], 0);
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
            const int64_t first = std::max(tokens[row], 0) * width_;
            float* to = frame.at(writes[0], row);
            if (table_.itemsize() == 4) {
                std::memcpy(to, table_.data<char>() + first * 4, width_ * 4);
            } else {
                const Storage storage = storage_of(table_);
                for (int64_t i = 0; i < width_; i++) to[i] = number_at(storage, table_.data<char>(), first + i);
            }
        }
    }

private:
    array table_;
    int64_t width_;
};

}  // namespace

void bind_segment_tables(SegmentClass& segment) {
    segment
        .def("embed", [](Segment& s, int tokens, const Matrix& table, int out) {
            s.add<EmbedRows>(tokens, out, table);
        }, nb::arg("tokens"), nb::arg("table"), nb::arg("out"))
        .def("look_up", [](Segment& s, int tokens, const array& table, int out) {
            using namespace mlx::core;
            array whole = contiguous(table);
            whole.eval();
            const bool integers = s.body->integers(out);
            require(whole.ndim() == 2 && whole.shape(1) == s.body->width(out) &&
                        (integers ? whole.dtype() == int32 : issubdtype(whole.dtype(), floating)),
                    "tables are [tokens, width], of floats or int32");
            s.add<LookUpRows>(tokens, out, whole);
        }, nb::arg("tokens"), nb::arg("table"), nb::arg("out"));
}

}  // namespace quire
