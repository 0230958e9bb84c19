// A recorded CUDA graph as one MLX operation. Of CUDA's driver a few functions are needed, which are
// looked up in the library that MLX has loaded; its headers are not.

#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "mlx/version.h"

namespace mlx::core::cu {
// Declared as in MLX's backend/cuda/device.h, whose own includes a wheel lacks. Only the first two
// members are named; objects are made by MLX alone.
class Device {
public:
    void make_current();
};
class CommandEncoder {
public:
    void commit();
    Device& device() { return device_; }
    void* stream() { return stream_; }

private:
    Device& device_;
    void* stream_;
};
CommandEncoder& get_command_encoder(Stream s);
// As in backend/cuda/allocator.h.
struct CudaBuffer {
    void* data;
    size_t size;
    int device;
};
}  // namespace mlx::core::cu

namespace nb = nanobind;
using mlx::core::array;

namespace quire {
namespace {

struct Driver {
    int (*copy)(uint64_t to, uint64_t from, size_t bytes, void* stream);
    int (*launch)(void* graph, void* stream);
    int (*pinned)(void** memory, size_t bytes, unsigned flags);
    int (*free_pinned)(void* memory);
    int (*new_event)(void** event, unsigned flags);
    int (*record)(void* event, void* stream);
    int (*wait)(void* event);
};

const Driver& driver() {
    static const Driver found = [] {
        void* library = dlopen("libcuda.so.1", RTLD_LAZY);
        if (!library) throw std::runtime_error("libcuda.so.1 cannot be loaded");
        const auto find = [library](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
            if (!function) throw std::runtime_error(std::string("libcuda.so.1 lacks ") + name);
        };
        Driver names{};
        find(names.copy, "cuMemcpyAsync");
        find(names.launch, "cuGraphLaunch");
        find(names.pinned, "cuMemHostAlloc");
        find(names.free_pinned, "cuMemFreeHost");
        find(names.new_event, "cuEventCreate");
        find(names.record, "cuEventRecord");
        find(names.wait, "cuEventSynchronize");
        return names;
    }();
    return found;
}

void check(int result, const char* what) {
    if (result) throw std::runtime_error(std::string(what) + ": CUDA error " + std::to_string(result));
}

uint64_t address(const array& of) {
    auto* buffer = static_cast<mlx::core::cu::CudaBuffer*>(const_cast<array&>(of).buffer().ptr());
    return reinterpret_cast<uint64_t>(buffer->data) + of.offset();
}

// Numbers of the host on their way to the device, in memory that the device reads as it is. An array
// of MLX would be managed memory, whose pages move one by one: 100 us for 12 KB on an H200. Used by
// the one thread that owns MLX.
class Staging {
public:
    void copy(uint64_t to, const std::string& bytes, void* stream) {
        Slot& slot = slots_[next_++ % slots_.size()];
        if (!slot.copied) check(driver().new_event(&slot.copied, 2), "making an event");  // no timing
        check(driver().wait(slot.copied), "waiting for a copy");
        if (slot.size < bytes.size()) {
            if (slot.memory) check(driver().free_pinned(slot.memory), "freeing memory");
            slot.size = 0;
            check(driver().pinned(&slot.memory, 2 * bytes.size(), 0), "taking pinned memory");
            slot.size = 2 * bytes.size();
        }
        std::memcpy(slot.memory, bytes.data(), bytes.size());
        check(driver().copy(to, reinterpret_cast<uint64_t>(slot.memory), bytes.size(), stream),
              "copying numbers");
        check(driver().record(slot.copied, stream), "recording an event");
    }

private:
    struct Slot {
        void* memory = nullptr;
        size_t size = 0;
        void* copied = nullptr;
    };
    std::array<Slot, 4> slots_;
    size_t next_ = 0;
};

// Copies its inputs, but for the last, and numbers of the host to where the graph reads them, and
// launches it. The last input is where the graph writes: the output is its beginning.
class Replay : public mlx::core::Primitive {
public:
    Replay(mlx::core::Stream stream, uint64_t graph, std::vector<uint64_t> targets, std::string numbers,
           uint64_t numbers_target)
        : Primitive(stream),
          graph_(graph),
          targets_(std::move(targets)),
          numbers_(std::move(numbers)),
          numbers_target_(numbers_target) {}

    void eval_cpu(const std::vector<array>&, std::vector<array>&) override {
        throw std::runtime_error("a CUDA graph does not run on a CPU");
    }
    void eval_gpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
        auto& encoder = mlx::core::cu::get_command_encoder(stream());
        encoder.device().make_current();
        encoder.commit();  // what was asked for before runs before
        for (size_t i = 0; i < targets_.size(); i++) {
            if (!inputs[i].flags().row_contiguous) throw std::runtime_error("an input has gaps");
            check(driver().copy(targets_[i], address(inputs[i]), inputs[i].nbytes(), encoder.stream()),
                  "copying an input");
        }
        if (!numbers_.empty()) {
            static Staging staging;
            staging.copy(numbers_target_, numbers_, encoder.stream());
        }
        check(driver().launch(reinterpret_cast<void*>(graph_), encoder.stream()), "launching a graph");
        array& out = outputs[0];
        out.copy_shared_buffer(inputs.back(), out.strides(), {true, true, out.size() == 1}, out.size());
    }
    const char* name() const override { return "Replay"; }

private:
    uint64_t graph_;
    std::vector<uint64_t> targets_;
    std::string numbers_;
    uint64_t numbers_target_;
};

// Pinned memory that the device writes to, and the event of the write.
struct Arrival {
    void* memory = nullptr;
    size_t size = 0;
    void* written = nullptr;
};

// Arrivals that nobody uses. Copies may be dropped by any thread.
class Arrivals {
public:
    Arrival take(size_t bytes) {
        Arrival found;
        {
            const std::lock_guard lock(mutex_);
            if (!free_.empty()) {
                found = free_.back();
                free_.pop_back();
            }
        }
        if (!found.written) check(driver().new_event(&found.written, 2), "making an event");  // no timing
        if (found.size < bytes) {
            if (found.memory) check(driver().free_pinned(found.memory), "freeing memory");
            found.size = 2 * bytes;
            check(driver().pinned(&found.memory, found.size, 0), "taking pinned memory");
        }
        return found;
    }
    void give(Arrival arrival) {
        const std::lock_guard lock(mutex_);
        free_.push_back(arrival);
    }

private:
    std::mutex mutex_;
    std::vector<Arrival> free_;
};

Arrivals& arrivals() {
    static Arrivals& all = *new Arrivals;  // never destroyed: the driver may be gone before
    return all;
}

// A copy of an array on the host. MLX would move the array into new managed memory when the host
// reads it, and tells the host that a step is done by way of another stream and a thread.
class HostCopy {
public:
    ~HostCopy() {
        if (started_) arrivals().give(arrival_);
    }
    void start(uint64_t from, size_t bytes, void* stream) {
        arrival_ = arrivals().take(bytes);
        bytes_ = bytes;
        started_ = true;
        check(driver().copy(reinterpret_cast<uint64_t>(arrival_.memory), from, bytes, stream),
              "copying a result");
        check(driver().record(arrival_.written, stream), "recording an event");
    }
    nb::bytes read() {
        if (!started_) throw std::runtime_error("the array was not computed");
        {
            const nb::gil_scoped_release others_run;
            check(driver().wait(arrival_.written), "waiting for a result");
        }
        return nb::bytes(arrival_.memory, bytes_);
    }

private:
    Arrival arrival_;
    size_t bytes_ = 0;
    bool started_ = false;
};

// Starts a host copy of its input, which is also its output.
class Copied : public mlx::core::Primitive {
public:
    Copied(mlx::core::Stream stream, std::shared_ptr<HostCopy> copy)
        : Primitive(stream), copy_(std::move(copy)) {}

    void eval_cpu(const std::vector<array>&, std::vector<array>&) override {
        throw std::runtime_error("an array of a CPU is on the host already");
    }
    void eval_gpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
        auto& encoder = mlx::core::cu::get_command_encoder(stream());
        encoder.device().make_current();
        encoder.commit();  // so that the input is computed before
        const array& in = inputs[0];
        if (!in.flags().row_contiguous) throw std::runtime_error("a result has gaps");
        copy_->start(address(in), in.nbytes(), encoder.stream());
        outputs[0].copy_shared_buffer(in);
    }
    const char* name() const override { return "Copied"; }

private:
    std::shared_ptr<HostCopy> copy_;
};

std::pair<array, std::shared_ptr<HostCopy>> host_copy(array of) {
    auto copy = std::make_shared<HostCopy>();
    const auto stream = mlx::core::default_stream(mlx::core::default_device());
    auto copied = std::make_shared<Copied>(stream, copy);
    const auto shape = of.shape();
    const auto dtype = of.dtype();
    return {array(shape, dtype, std::move(copied), {std::move(of)}), std::move(copy)};
}

uint64_t pointer(const array& of) {
    if (of.status() == array::Status::unscheduled) return 0;
    if (!of.flags().row_contiguous) throw std::invalid_argument("the array has gaps");
    return address(of);
}

array replay(uint64_t graph, std::vector<array> inputs, std::vector<uint64_t> targets, array workspace,
             int rows, nb::bytes numbers, uint64_t numbers_target) {
    if (inputs.size() != targets.size()) throw std::invalid_argument("one target for each input");
    if (workspace.ndim() != 2 || rows > workspace.shape(0)) throw std::invalid_argument("too many rows");
    const mlx::core::Shape shape{rows, workspace.shape(1)};
    const auto dtype = workspace.dtype();
    inputs.push_back(std::move(workspace));
    const auto stream = mlx::core::default_stream(mlx::core::default_device());
    auto replay = std::make_shared<Replay>(stream, graph, std::move(targets),
                                           std::string(numbers.c_str(), numbers.size()), numbers_target);
    return array(shape, dtype, std::move(replay), std::move(inputs));
}

}  // namespace
}  // namespace quire

NB_MODULE(_cuda, m) {
    nb::module_::import_("mlx.core");
    m.attr("MLX_VERSION") = std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) +
                            "." + std::to_string(MLX_VERSION_PATCH);
    m.attr("SOURCES") = QUIRE_SOURCES;
    nb::class_<quire::HostCopy>(m, "HostCopy").def("read", &quire::HostCopy::read);
    m.def("pointer", &quire::pointer, nb::arg("array"));
    m.def("host_copy", &quire::host_copy, nb::arg("array"));
    m.def("replay", &quire::replay, nb::arg("graph"), nb::arg("inputs"), nb::arg("targets"),
          nb::arg("workspace"), nb::arg("rows"), nb::arg("numbers") = nb::bytes("", 0),
          nb::arg("numbers_target") = 0);
}
