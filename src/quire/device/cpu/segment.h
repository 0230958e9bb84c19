// A part of a step as one operation: instructions that run one after another over the step's rows, without MLX or
// Python between them. `executor/segments` makes segments from programs. The bits are those of the operations apart.
#pragma once

#include <map>

#include "matrix.h"
#include "paged.h"

namespace quire {

// An array of a pool of floats.
struct PoolArray {
    char* data;
    Storage storage;
    int rows, block, dim;  // [rows, block, dim]
};

// A layer's recurrent states: `floats` of each slot.
struct StateArray {
    float* data;
    int64_t floats;
    float* slot(int64_t number) const { return data + number * floats; }
};

// The sequences of a step whose states advance. Numbers: how many there are; of each its first row, rows, the slot of
// the state before (-1: zeros), where its target slots begin among the numbers, and how many these are.
struct StateRows {
    const int32_t* numbers;
    struct Sequence {
        int64_t row, rows;
        int32_t source;
        const int32_t* targets;
        int target_count;
    };
    int64_t count() const { return numbers[0]; }
    Sequence sequence(int64_t i) const {
        const int32_t* own = numbers + 1 + 5 * i;
        return {own[0], own[1], own[2], numbers + own[3], own[4]};
    }
};

// What a segment computes with in one step: where its values lie, and the step's pools.
struct Frame {
    int64_t rows;
    std::vector<float*> values;    // by number, `[rows, width]`, constants `[width]`
    std::vector<int64_t> strides;  // by number: floats from row to row, 0 for constants
    std::vector<PoolArray> pools;
    std::vector<Tables> groups;    // of each KV group
    const int32_t* keys;           // of each row its own key, [T]
    std::vector<StateArray> states;
    std::vector<StateRows> state_rows;  // by group of recurrent layers
    std::vector<std::vector<int32_t>> gathered;  // what is given of the computed rows, if some are left out
    float* arranged = nullptr;  // rows for the next product, if the stage before it arranged them

    float* at(int value, int64_t row) const { return values[value] + row * strides[value]; }
};

// One computation of a segment, from values to values.
class Instruction {
public:
    Instruction(std::vector<int> reads, std::vector<int> writes) : reads(std::move(reads)), writes(std::move(writes)) {}
    virtual ~Instruction() = default;
    virtual void run(Frame& frame) const = 0;
    // The multiplications of a step, about.
    virtual int64_t work(const Frame& frame) const { return frame.rows * row_work(); }
    // What it computes, for measurements.
    virtual const char* kind() const { return "rows"; }
    // The multiplications of a row, about, where rows may be computed apart from each other; else 0.
    virtual int64_t row_work() const { return 0; }
    // Rows [begin, end).
    virtual void run_rows(const Frame&, int64_t, int64_t) const {}

    // Floats of arranged rows, where rows are arranged for this instruction; else 0.
    virtual int64_t arranged_floats(int64_t) const { return 0; }
    // How many rows are arranged together, and rows [begin, end) to `frame.arranged`.
    virtual int64_t arranged_together() const { return 1; }
    virtual void arrange(const Frame&, int64_t, int64_t) const {}

    const std::vector<int> reads, writes;
};

// An instruction whose rows are computed apart from each other. Neighbours share one division of rows among threads.
class RowInstruction : public Instruction {
public:
    RowInstruction(std::vector<int> reads, std::vector<int> writes, int64_t work)
        : Instruction(std::move(reads), std::move(writes)), work_(work) {}
    void run(Frame& frame) const override { run_rows(frame, 0, frame.rows); }
    int64_t row_work() const override { return work_; }

private:
    int64_t work_;
};

using Instructions = std::vector<std::unique_ptr<const Instruction>>;

// The instructions of a segment and its values: what it is given, what it computes, and constants.
class SegmentBody {
public:
    // Number new values of `width` floats a row.
    int given(int64_t width, bool integers = false);
    int value(int64_t width, bool integers = false);
    // Number an array that all rows read.
    int constant(const array& whole);
    void output(int value, const std::vector<int>& shape);
    // Leaves out rows whose token, a given value, is negative: no draft that is worth its row. Their outputs are zeros.
    void leave_out_by(int tokens) { tokens_ = tokens; }
    void add(std::unique_ptr<const Instruction> instruction) { instructions_.push_back(std::move(instruction)); }
    // Decides where values lie. Nothing is added afterwards.
    void finish();

    int64_t width(int value) const { return widths_.at(value); }
    size_t values() const { return widths_.size(); }
    const std::vector<int>& given() const { return given_; }
    bool integers(int value) const { return integers_.at(value); }
    const std::vector<int>& outputs() const { return outputs_; }
    const std::vector<std::vector<int>>& output_shapes() const { return output_shapes_; }

    // The multiplications of a step, about.
    int64_t work(const Frame& frame) const;
    // Computes a step. Given values and outputs are in the frame already; room for the others is added.
    void run(Frame& frame) const;

private:
    // Neighbouring instructions that are computed row by row, or one instruction.
    struct Stage {
        size_t begin, end;
        int64_t row_work;
    };
    enum class Kind { given, computed, constant, output };
    int number(int64_t width, Kind kind, bool integers = false);
    void run_rows(const Stage& stage, const Instruction* next, Frame& frame) const;
    std::vector<int32_t> leave_out(Frame& frame) const;
    void spread(const Frame& frame, const std::vector<int32_t>& kept, int64_t rows) const;

    Instructions instructions_;
    std::vector<Stage> stages_;
    std::vector<int64_t> widths_, places_;  // places of computed values, in floats a row
    std::vector<Kind> kinds_;
    std::vector<bool> integers_;  // int32 in place of floats
    std::vector<std::pair<int, array>> constants_;
    std::vector<int> given_, outputs_;
    std::vector<std::vector<int>> output_shapes_;
    int64_t floats_ = 0;  // a row of all computed values together
    std::optional<int> tokens_;
};

// Seconds that segments took since `measure_segments(true)`, by kind of instruction; "between": from the end of one run
// to the beginning of the next.
void measure_segments(bool measures);
std::map<std::string, double> segment_seconds();

}  // namespace quire
