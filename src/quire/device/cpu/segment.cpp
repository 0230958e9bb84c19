#include "segment.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>

namespace quire {
namespace {

// Adds up where the time of segments goes, if asked to.
class Stopwatch {
public:
    void measure(bool measures) {
        std::lock_guard lock(mutex_);
        measures_ = measures;
        seconds_.clear();
        last_ = Clock::now();
    }
    bool measures() const { return measures_; }
    // Adds the time since the last call.
    void add(const char* kind) {
        const auto now = Clock::now();
        std::lock_guard lock(mutex_);
        seconds_[kind] += std::chrono::duration<double>(now - last_).count();
        last_ = now;
    }
    std::map<std::string, double> seconds() {
        std::lock_guard lock(mutex_);
        return seconds_;
    }

private:
    using Clock = std::chrono::steady_clock;
    std::mutex mutex_;
    std::atomic<bool> measures_{false};
    std::map<std::string, double> seconds_;
    Clock::time_point last_;
};

Stopwatch stopwatch;

}  // namespace

void measure_segments(bool measures) { stopwatch.measure(measures); }
std::map<std::string, double> segment_seconds() { return stopwatch.seconds(); }

int SegmentBody::number(int64_t width, Kind kind, bool integers) {
    require(width > 0, "values have a width");
    widths_.push_back(width);
    integers_.push_back(integers);
    kinds_.push_back(kind);
    places_.push_back(-1);
    return (int)widths_.size() - 1;
}

int SegmentBody::given(int64_t width, bool integers) {
    given_.push_back(number(width, Kind::given, integers));
    return given_.back();
}

int SegmentBody::value(int64_t width, bool integers) { return number(width, Kind::computed, integers); }

int SegmentBody::constant(const array& whole) {
    require(whole.dtype() == mlx::core::float32, "constants are float32");
    array rows = mlx::core::contiguous(whole);
    rows.eval();
    const int id = number((int64_t)rows.size(), Kind::constant);
    constants_.emplace_back(id, rows);
    return id;
}

void SegmentBody::output(int value, const std::vector<int>& shape) {
    int64_t width = 1;
    for (const int size : shape) width *= size;
    require(kinds_.at(value) == Kind::computed && width == widths_[value], "outputs are computed, of their width");
    kinds_[value] = Kind::output;
    outputs_.push_back(value);
    output_shapes_.push_back(shape);
}

namespace {

// Where values lie in a row of memory: the first free place that is long enough.
class Room {
public:
    int64_t take(int64_t width) {
        for (size_t i = 0; i < free_.size(); i++) {
            auto& [begin, end] = free_[i];
            if (end - begin < width) continue;
            const int64_t place = begin;
            begin += width;
            if (begin == end) free_.erase(free_.begin() + (int64_t)i);
            return place;
        }
        const int64_t place = most_;
        most_ += width;
        return place;
    }
    void give(int64_t place, int64_t width) {
        free_.emplace_back(place, place + width);
        std::sort(free_.begin(), free_.end());
        std::vector<std::pair<int64_t, int64_t>> joined;
        for (const auto& each : free_) {
            if (!joined.empty() && joined.back().second == each.first) {
                joined.back().second = each.second;
            } else {
                joined.push_back(each);
            }
        }
        free_ = joined;
    }
    int64_t most() const { return most_; }

private:
    std::vector<std::pair<int64_t, int64_t>> free_;
    int64_t most_ = 0;
};

// Each value begins where a cache line does.
int64_t lines(int64_t width) { return (width + kLine - 1) / kLine * kLine; }

}  // namespace

void SegmentBody::finish() {
    for (size_t i = 0; i < instructions_.size(); i++) {
        const int64_t work = instructions_[i]->row_work();
        if (work > 0 && !stages_.empty() && stages_.back().row_work > 0) {
            stages_.back().end = i + 1;
            stages_.back().row_work += work;
        } else {
            stages_.push_back({i, i + 1, work});
        }
    }
    // A value's place is free behind the stage that reads it last: within a stage threads are at different rows.
    std::vector<size_t> last(widths_.size(), 0);
    for (size_t s = 0; s < stages_.size(); s++)
        for (size_t i = stages_[s].begin; i < stages_[s].end; i++)
            for (const auto* own : {&instructions_[i]->reads, &instructions_[i]->writes})
                for (const int value : *own) last[value] = s;
    Room room;
    for (size_t s = 0; s < stages_.size(); s++) {
        for (size_t i = stages_[s].begin; i < stages_[s].end; i++)
            for (const int value : instructions_[i]->writes)
                if (kinds_[value] == Kind::computed && places_[value] < 0)
                    places_[value] = room.take(lines(widths_[value]));
        for (size_t value = 0; value < widths_.size(); value++)
            if (kinds_[value] == Kind::computed && places_[value] >= 0 && last[value] == s)
                room.give(places_[value], lines(widths_[value]));
    }
    floats_ = room.most();
}

int64_t SegmentBody::work(const Frame& frame) const {
    int64_t all = 0;
    for (const auto& each : instructions_) all += each->work(frame);
    return all;
}

// Gathers what is given of the rows that have a token; returns their numbers, none if no row is left out.
std::vector<int32_t> SegmentBody::leave_out(Frame& frame) const {
    const auto* tokens = (const int32_t*)frame.values[*tokens_];
    std::vector<int32_t> kept;
    for (int32_t row = 0; row < frame.rows; row++)
        if (tokens[row] >= 0) kept.push_back(row);
    if (kept.empty() || (int64_t)kept.size() == frame.rows || !frame.state_rows.empty()) return {};
    const auto gathered = [&](const void* from, int64_t width) {
        auto& own = frame.gathered.emplace_back(kept.size() * width);
        for (size_t i = 0; i < kept.size(); i++)
            std::memcpy(own.data() + i * width, (const int32_t*)from + kept[i] * width, width * 4);
        return own.data();
    };
    for (const int value : given_) frame.values[value] = (float*)gathered(frame.values[value], widths_[value]);
    if (frame.keys) frame.keys = gathered(frame.keys, 1);
    for (Tables& group : frame.groups) {
        group.first = gathered(group.first, 1);
        group.last = gathered(group.last, 1);
        auto& starts = frame.gathered.emplace_back(group.rows, group.rows + group.sequences + 1);
        for (int32_t& start : starts)
            start = (int32_t)(std::lower_bound(kept.begin(), kept.end(), start) - kept.begin());
        group.rows = starts.data();
    }
    frame.rows = (int64_t)kept.size();
    return kept;
}

// Puts the outputs of the computed rows at their places among `rows`.
void SegmentBody::spread(const Frame& frame, const std::vector<int32_t>& kept, int64_t rows) const {
    for (const int value : outputs_) {
        const int64_t width = widths_[value];
        float* out = frame.values[value];
        int64_t end = rows;
        for (size_t i = kept.size(); i-- > 0; end = kept[i]) {
            if (kept[i] != (int64_t)i) std::memcpy(out + kept[i] * width, out + i * width, width * 4);
            std::fill(out + (kept[i] + 1) * width, out + end * width, 0.0f);
        }
    }
}

void SegmentBody::run(Frame& frame) const {
    const int64_t rows = frame.rows;
    const std::vector<int32_t> computed = tokens_ ? leave_out(frame) : std::vector<int32_t>();
    // Steps of few rows come by the hundred a second; the memory of others goes back to MLX.
    constexpr int64_t kKept = 1 << 20;
    thread_local std::vector<float> kept;
    const int64_t floats = floats_ * frame.rows;
    std::optional<array> lent;
    if (floats > kKept) lent = room(floats + kLine);
    float* memory = lent ? aligned_to_line(lent->data<float>()) : in_line(kept, floats);
    for (size_t value = 0; value < widths_.size(); value++) {
        frame.strides[value] = kinds_[value] == Kind::constant ? 0 : widths_[value];
        if (places_[value] >= 0) frame.values[value] = memory + places_[value] * frame.rows;
    }
    for (const auto& [value, whole] : constants_) frame.values[value] = const_cast<float*>(whole.data<float>());
    const bool measures = stopwatch.measures();
    if (measures) stopwatch.add("between");
    for (size_t s = 0; s < stages_.size(); s++) {
        const Stage& stage = stages_[s];
        if (stage.row_work == 0) {
            instructions_[stage.begin]->run(frame);
            frame.arranged = nullptr;
        } else {
            run_rows(stage, s + 1 < stages_.size() ? instructions_[stages_[s + 1].begin].get() : nullptr, frame);
        }
        if (measures) stopwatch.add(instructions_[stage.begin]->kind());
    }
    if (!computed.empty()) spread(frame, computed, rows);
}

void SegmentBody::run_rows(const Stage& stage, const Instruction* next, Frame& frame) const {
    const int64_t floats = next ? next->arranged_floats(frame.rows) : 0;
    if (floats > 0) frame.arranged = scratch_rows(floats);
    const int64_t together = floats > 0 ? next->arranged_together() : 1, least = kLeastWork / stage.row_work + 1;
    const auto compute = [&](int64_t begin, int64_t end) {
        for (size_t i = stage.begin; i < stage.end; i++) instructions_[i]->run_rows(frame, begin, end);
    };
    const auto arrange = [&](int64_t begin, int64_t end) { next->arrange(frame, begin, end); };
    if (floats == 0) return split(frame.rows, least, 1, compute);
    if (together > 1 && frame.rows / together < threads()) {  // else threads would go without rows
        split(frame.rows, least, 1, compute);
        return split(frame.rows, least, together, arrange);
    }
    // A product's rows are arranged by the thread that has just computed them.
    split(frame.rows, least, together, [&](int64_t begin, int64_t end) {
        compute(begin, end);
        arrange(begin, end);
    });
}

}  // namespace quire
