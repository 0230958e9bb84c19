// What the files of operations share: kernels as MLX operations that run on MLX's CPU stream.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "threads.h"

namespace nb = nanobind;

namespace quire {

using mlx::core::array;

// The kernels of the instruction set that was chosen.
const Kernels& kernels();

// The number by which kernels know an activation.
int activation_of(const std::string& name);

// Adds the operations of each file to the extension.
void bind_attention(nb::module_& m);
void bind_cache(nb::module_& m);
void bind_recurrent(nb::module_& m);
void bind_layers(nb::module_& m);
void bind_pages(nb::module_& m);
void bind_routing(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_drafts(nb::module_& m);
void bind_segments(nb::module_& m);

constexpr int64_t kLine = 16;  // floats of a cache line

// Where the first cache line begins: vectors that lie across two take twice as long.
inline float* aligned_to_line(float* from) {
    constexpr uintptr_t kBytes = kLine * 4;
    return (float*)(((uintptr_t)from + kBytes - 1) / kBytes * kBytes);
}

// Room for so many floats, where a cache line begins.
inline float* in_line(std::vector<float>& kept, int64_t floats) {
    if ((int64_t)kept.size() < floats + kLine) kept.resize(floats + kLine);
    return aligned_to_line(kept.data());
}

// Memory of a task, `[floats]`; it lives as long as whoever holds the array.
inline array room(int64_t floats) {
    array memory({(int)floats}, mlx::core::float32, nullptr, {});
    memory.set_data(mlx::core::allocator::malloc(memory.nbytes()));
    return memory;
}

// Memory that a kernel needs while it runs, kept by its thread for the next one.
inline float* scratch(int64_t floats) {
    thread_local std::vector<float> kept;
    return in_line(kept, floats);
}

// Arranged rows: apart from `scratch`, which a kernel takes meanwhile.
inline float* scratch_rows(int64_t floats) {
    thread_local std::vector<float> kept;
    return in_line(kept, floats);
}

// A task that writes a view row by row.
inline auto copying(const array& from, array& to) {
    return [shape = from.shape(), strides = from.strides(), size = (int64_t)from.itemsize(),
            source = from.data<char>(), target = to.data<char>(), count = (int64_t)from.size()] {
        const int axes = (int)shape.size();
        std::vector<int> place(axes, 0);
        int64_t offset = 0;
        for (int64_t i = 0; i < count; i++) {
            std::memcpy(target + i * size, source + offset * size, size);
            for (int axis = axes - 1; axis >= 0; axis--) {
                offset += strides[axis];
                if (++place[axis] < shape[axis]) break;
                offset -= strides[axis] * shape[axis];
                place[axis] = 0;
            }
        }
    };
}

// A view's elements row by row.
inline array copied(const array& from, mlx::core::cpu::CommandEncoder& encoder) {
    array to(from.shape(), from.dtype(), nullptr, {});
    to.set_data(mlx::core::allocator::malloc(to.nbytes()));
    encoder.dispatch(copying(from, to));
    encoder.add_temporary(to);
    return to;
}

// Inputs from number `from` on, each row by row.
inline std::vector<array> in_rows(const std::vector<array>& inputs, size_t from,
                                  mlx::core::cpu::CommandEncoder& encoder) {
    std::vector<array> rows(inputs.begin() + (int64_t)from, inputs.end());
    for (array& input : rows) {
        if (!input.flags().row_contiguous) input = copied(input, encoder);
    }
    return rows;
}

// An operation whose task is made from its inputs and its outputs.
template <class Make> class Operation : public mlx::core::Primitive {
public:
    Operation(mlx::core::Stream stream, const char* name, Make make)
        : Primitive(stream), name_(name), make_(std::move(make)) {}

    void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
        for (array& out : outputs) out.set_data(mlx::core::allocator::malloc(out.nbytes()));
        auto& encoder = mlx::core::cpu::get_command_encoder(stream());
        const std::vector<array> rows = in_rows(inputs, 0, encoder);
        encoder.dispatch(make_(rows, outputs));
    }
    void eval_gpu(const std::vector<array>&, std::vector<array>&) override {
        throw std::runtime_error("quire's CPU kernels do not run on a GPU");
    }
    const char* name() const override { return name_; }

private:
    const char* name_;
    Make make_;
};

// Multiplications that the calling thread computes at once, if the inputs are there: handing them to MLX's thread and
// waking it takes longer. On a busy machine both threads may share a core, and then each task stops the caller.
constexpr int64_t kAtOnce = 1 << 20;

inline bool is_there(const array& input) { return input.is_available() && input.flags().row_contiguous; }

// An array that is computed at once.
inline array computed(const mlx::core::Shape& shape, mlx::core::Dtype type) {
    array out(shape, type, nullptr, {});
    out.set_data(mlx::core::allocator::malloc(out.nbytes()));
    out.set_status(array::Status::available);
    return out;
}

// The outputs of an operation: float32 unless `types` says otherwise. `work`: its multiplications, about.
template <class Make>
std::vector<array> operation(const char* name, std::vector<mlx::core::Shape> shapes, std::vector<array> inputs,
                             Make make, std::vector<mlx::core::Dtype> types = {}, int64_t work = INT64_MAX) {
    if (work <= kAtOnce && std::all_of(inputs.begin(), inputs.end(), is_there)) {
        std::vector<array> outputs;
        for (size_t i = 0; i < shapes.size(); i++)
            outputs.push_back(computed(shapes[i], i < types.size() ? types[i] : mlx::core::float32));
        make(inputs, outputs)();
        return outputs;
    }
    const auto stream = mlx::core::default_stream(mlx::core::Device(mlx::core::Device::cpu));
    std::shared_ptr<mlx::core::Primitive> primitive =
        std::make_shared<Operation<Make>>(stream, name, std::move(make));
    types.resize(shapes.size(), mlx::core::float32);
    return array::make_arrays(std::move(shapes), types, primitive, inputs);
}

inline void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

// Where a rotation is among an operation's inputs, if there is one: signs `[size]` or a matrix `[size, size]`.
struct VectorRotationShape {
    size_t place = 0;
    bool signs = false;
    int size = 0;
    float scale = 1;

    // Adds the rotation to the inputs.
    VectorRotationShape(const std::optional<array>& rotation, float scale, int size, std::vector<array>& inputs)
        : place(inputs.size()), size(size), scale(scale) {
        if (!rotation) {
            place = 0;
            return;
        }
        signs = rotation->ndim() == 1;
        require(rotation->dtype() == mlx::core::float32 && rotation->shape(-1) == size && rotation->shape(0) == size,
                "a rotation is float32, signs [size] or a matrix [size, size]");
        require(!signs || (size & (size - 1)) == 0, "signs belong to powers of two");
        inputs.push_back(*rotation);
    }
    VectorRotation at(const std::vector<array>& in) const {
        const float* map = place ? in[place].data<float>() : nullptr;
        return {signs ? map : nullptr, signs ? nullptr : map, size, scale};
    }
};

// Whether `count` items, of which `least` are worth giving to a thread that waits, are worth waking one: that takes
// some ten times as long.
inline bool worth_waking(int64_t count, int64_t least) { return count / std::max<int64_t>(least, 1) >= 16; }

// Parts of about equal size into which `count` items are cut, none smaller than `least`. There are several for each
// thread, since threads that other work slows down take fewer; but many threads wait for each other to take parts, so
// that small ones cost more than they even out.
inline int parts_of(int64_t count, int64_t least) {
    constexpr int64_t kFewThreads = 4, kLarge = 16;
    const int64_t units = std::max<int64_t>(1, count / std::max<int64_t>(least, 1));
    if (threads() == 1) return 1;
    if (threads() <= kFewThreads) return (int)std::min<int64_t>(12 * threads(), units);
    const int64_t large = std::min<int64_t>(3 * threads(), units / kLarge);
    return (int)std::max(large, std::min<int64_t>(threads(), units));
}

template <class Run> void split(int64_t count, int64_t least, int64_t multiple, const Run& run) {
    const int parts = parts_of(count, least);
    const int64_t each = ((count + parts - 1) / parts + multiple - 1) / multiple * multiple;
    parallel(parts, [&](int part) {
        const int64_t begin = part * each, end = std::min(count, begin + each);
        if (begin < end) run(begin, end);
    }, worth_waking(count, least));
}

// Stacks of thin matrices `[numbers, rank, in]` and `[numbers, rank, out]`: their check, and where evaluated ones lie.
void require_low_rank(const array& inner, const array& outer, int64_t depth, int64_t columns);
LowRank low_rank(const array& inner, const array& outer);
int64_t work_of(const LowRank& factors);  // multiplications a row

constexpr int64_t kLeastWork = 1 << 16;  // multiplications that are worth giving to a thread that waits for work

}  // namespace quire
