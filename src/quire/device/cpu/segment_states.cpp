// Instructions of segments that advance recurrent states. Sequences advance apart from each other, each by its rows.

#include "segment_run.h"

namespace quire {
namespace {

// Which array of states, and which of the step's state rows.
struct StatePlace {
    int array, rows;
};

// Instructions of an array of states and the sequences of a group.
class StateInstruction : public Instruction {
public:
    StateInstruction(std::vector<int> reads, int out, StatePlace place)
        : Instruction(std::move(reads), {out}), place_(place) {}
    const char* kind() const override { return "states"; }

protected:
    const StateArray& states(const Frame& frame) const { return frame.states.at(place_.array); }
    const StateRows& sequences(const Frame& frame) const { return frame.state_rows.at(place_.rows); }

    // Calls `run(sequence, head, before, after)` for each sequence and head: the head's state of `floats` before and
    // after the step. The state after it is then copied to the sequence's other targets.
    template <class Run>
    void each_head(const Frame& frame, int64_t heads, int64_t floats, int64_t row_work, const Run& run) const {
        const StateRows& all = sequences(frame);
        const StateArray& array = states(frame);
        const int64_t rows = std::max<int64_t>(1, frame.rows / all.count());
        split(all.count() * heads, kLeastWork / (rows * row_work) + 1, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) {
                const StateRows::Sequence sequence = all.sequence(i / heads);
                const int64_t head = i % heads;
                float* after = array.slot(sequence.targets[0]) + head * floats;
                const float* before = after;
                if (sequence.source < 0)
                    std::fill_n(after, floats, 0.0f);
                else
                    before = array.slot(sequence.source) + head * floats;
                run(sequence, head, before, after);
                for (int n = 1; n < sequence.target_count; n++)
                    std::memcpy(array.slot(sequence.targets[n]) + head * floats, after, floats * 4);
            }
        });
    }

private:
    StatePlace place_;
};

class ConvolveRows : public StateInstruction {
public:
    ConvolveRows(std::vector<int> reads, int out, StatePlace place, const CausalConv& like)
        : StateInstruction(std::move(reads), out, place), like_(like) {
        require(like.channels % 16 == 0 && like.kernel <= 8,
                "channels are a multiple of 16, a filter has 8 taps at most");
    }
    int64_t work(const Frame& frame) const override { return frame.rows * like_.channels * like_.kernel; }
    void run(Frame& frame) const override {
        const StateRows& all = sequences(frame);
        const int64_t channels = like_.channels, kept = like_.kernel - 1;
        const array memory = room((frame.rows + all.count() * kept) * channels + kLine);
        float* windows = aligned_to_line(const_cast<array&>(memory).data<float>());
        const int64_t least = kLeastWork / (frame.rows * like_.kernel) + 1;
        split(channels, least, 16, [&](int64_t begin, int64_t end) {
            for (int64_t i = 0; i < all.count(); i++) {
                const StateRows::Sequence sequence = all.sequence(i);
                advance(frame, sequence, windows + (sequence.row + i * kept) * channels, begin, end);
            }
        });
    }

private:
    // Channels [begin, end) of a sequence: its last inputs and its rows make a window.
    void advance(const Frame& frame, const StateRows::Sequence& sequence, float* window, int64_t begin,
                 int64_t end) const {
        const StateArray& array = states(frame);
        const int64_t channels = like_.channels, kept = like_.kernel - 1, bytes = (end - begin) * 4;
        for (int64_t j = 0; j < kept; j++) {
            float* to = window + j * channels + begin;
            if (sequence.source < 0)
                std::fill(to, to + (end - begin), 0.0f);
            else
                std::memcpy(to, array.slot(sequence.source) + j * channels + begin, bytes);
        }
        for (int64_t t = 0; t < sequence.rows; t++)
            std::memcpy(window + (kept + t) * channels + begin, frame.at(reads[0], sequence.row + t) + begin, bytes);
        CausalConv c = like_;
        c.tokens = sequence.rows;
        c.window = window;
        c.taps = frame.values[reads[1]];
        c.bias = reads.size() > 2 ? frame.values[reads[2]] : nullptr;
        c.out = frame.at(writes[0], sequence.row);
        kernels().causal_conv(c, 0, begin, end);
        for (int n = 0; n < sequence.target_count; n++)
            for (int64_t j = 0; j < kept; j++)
                std::memcpy(array.slot(sequence.targets[n]) + j * channels + begin,
                            window + (sequence.rows + j) * channels + begin, bytes);
    }

    CausalConv like_;
};

class DeltaRule : public StateInstruction {
public:
    DeltaRule(const std::vector<int>& values, int out, StatePlace place, const GatedDelta& like)
        : StateInstruction(values, out, place), like_(like) {
        require(values.size() == 5 && like.key_dim % 16 == 0 && like.value_heads % like.key_heads == 0,
                "key_dim is a multiple of 16, and value heads are one of key heads");
    }
    int64_t work(const Frame& frame) const override {
        return frame.rows * 4 * like_.value_heads * like_.value_dim * like_.key_dim;
    }
    void run(Frame& frame) const override {
        const int64_t floats = (int64_t)like_.value_dim * like_.key_dim;
        each_head(frame, like_.value_heads, floats, 4 * floats,
                  [&](const StateRows::Sequence& sequence, int64_t head, const float* before, float* after) {
            GatedDelta d = like_;
            d.tokens = sequence.rows;
            d.mixed = frame.at(reads[0], sequence.row);
            d.steps = frame.at(reads[1], sequence.row);
            d.betas = frame.at(reads[2], sequence.row);
            d.log_rates = frame.values[reads[3]];
            d.step_biases = frame.values[reads[4]];
            d.before = before - head * floats;
            d.after = after - head * floats;
            d.out = frame.at(writes[0], sequence.row);
            kernels().gated_delta(d, 0, (int)head, scratch(kernels().gated_delta_scratch_floats(d)));
        });
    }

private:
    GatedDelta like_;
};

class AdvanceSpace : public StateInstruction {
public:
    AdvanceSpace(const std::vector<int>& values, int out, StatePlace place, const StateSpace& like)
        : StateInstruction(values, out, place), like_(like) {
        require(values.size() == 5 && like.state_dim % 16 == 0 && like.heads % like.groups == 0,
                "state_dim is a multiple of 16, and heads are one of groups");
    }
    int64_t work(const Frame& frame) const override {
        return frame.rows * 3 * like_.heads * like_.head_dim * like_.state_dim;
    }
    void run(Frame& frame) const override {
        const int64_t floats = (int64_t)like_.head_dim * like_.state_dim;
        each_head(frame, like_.heads, floats, 3 * floats,
                  [&](const StateRows::Sequence& sequence, int64_t head, const float* before, float* after) {
            StateSpace s = like_;
            s.tokens = sequence.rows;
            s.values = frame.at(reads[0], sequence.row);
            s.keys = frame.at(reads[1], sequence.row);
            s.queries = frame.at(reads[2], sequence.row);
            s.steps = frame.at(reads[3], sequence.row);
            s.rates = frame.values[reads[4]];
            s.before = before - head * floats;
            s.after = after - head * floats;
            s.out = frame.at(writes[0], sequence.row);
            kernels().state_space(s, 0, (int)head, scratch(kernels().state_space_scratch_floats(s)));
        });
    }

private:
    StateSpace like_;
};

}  // namespace

void bind_segment_states(SegmentClass& segment) {
    using MaybeValue = std::optional<int>;
    segment
        .def("convolve", [](Segment& s, int x, int taps, MaybeValue bias, int out, int state, int rows, int kernel,
                            bool silu) {
            CausalConv like{};
            like.channels = s.body->width(x);
            like.kernel = kernel;
            like.silu = silu;
            std::vector<int> reads = {x, taps};
            if (bias) reads.push_back(*bias);
            s.add<ConvolveRows>(std::move(reads), out, StatePlace{state, rows}, like);
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
            s.add<DeltaRule>(values, out, StatePlace{state, rows}, d);
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
            s.add<AdvanceSpace>(values, out, StatePlace{state, rows}, space);
        }, nb::arg("values"), nb::arg("out"), nb::arg("state"), nb::arg("rows"), nb::arg("groups"), nb::arg("shape"),
             nb::arg("by_column"));
}

}  // namespace quire
