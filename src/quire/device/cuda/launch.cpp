// A recorded CUDA graph as one MLX operation. Of CUDA's driver a few functions are needed, which are
// looked up in the library that MLX has loaded; its headers are not.

#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
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

// As in cuda.h.
struct MemoryLocation {
    int type;
    int id;
};
struct MemoryProperties {
    int type;
    int handle_types;
    MemoryLocation location;
    void* win32;
    unsigned char flags[8];
};
struct MemoryAccess {
    MemoryLocation location;
    int flags;
};

struct Driver {
    int (*copy)(uint64_t to, uint64_t from, size_t bytes, void* stream);
    int (*launch)(void* graph, void* stream);
    int (*pinned)(void** memory, size_t bytes, unsigned flags);
    int (*free_pinned)(void* memory);
    int (*new_event)(void** event, unsigned flags);
    int (*record)(void* event, void* stream);
    int (*wait)(void* event);
    int (*granularity)(size_t* bytes, const MemoryProperties* properties, int recommended);
    int (*reserve)(uint64_t* address, size_t bytes, size_t alignment, uint64_t wanted, uint64_t flags);
    int (*free_addresses)(uint64_t address, size_t bytes);
    int (*new_memory)(uint64_t* handle, size_t bytes, const MemoryProperties* properties, uint64_t flags);
    int (*release)(uint64_t handle);
    int (*map)(uint64_t address, size_t bytes, size_t offset, uint64_t handle, uint64_t flags);
    int (*unmap)(uint64_t address, size_t bytes);
    int (*allow)(uint64_t address, size_t bytes, const MemoryAccess* access, size_t count);
    int (*fill)(uint64_t address, unsigned char value, size_t bytes, void* stream);
    int (*finish)();
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
        find(names.granularity, "cuMemGetAllocationGranularity");
        find(names.reserve, "cuMemAddressReserve");
        find(names.free_addresses, "cuMemAddressFree");
        find(names.new_memory, "cuMemCreate");
        find(names.release, "cuMemRelease");
        find(names.map, "cuMemMap");
        find(names.unmap, "cuMemUnmap");
        find(names.allow, "cuMemSetAccess");
        find(names.fill, "cuMemsetD8Async");
        find(names.finish, "cuCtxSynchronize");
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

// Bytes of memory that all address ranges have, and the most that they and MLX's arrays ever had together until
// the first number last changed. Used by the one thread that owns MLX.
std::pair<size_t, size_t> mapped_bytes_{0, 0};

// Counts mapped memory, and takes it from what MLX may allocate before operations wait for others. MLX's peak begins
// anew, so that it is of a time in which the mapped memory stays the same.
void count_mapped(int64_t bytes) {
    const size_t most = std::max(mlx::core::get_peak_memory(), mlx::core::get_active_memory());
    mapped_bytes_.second = std::max(mapped_bytes_.second, mapped_bytes_.first + most);
    mlx::core::reset_peak_memory();
    mapped_bytes_.first += bytes;
    const auto limit = static_cast<int64_t>(mlx::core::get_memory_limit()) - bytes;
    mlx::core::set_memory_limit(static_cast<size_t>(std::max<int64_t>(limit, 0)));
}

// Memory of this device, in the process that allocates it.
MemoryProperties properties_of(int device) { return {1, 0, {1, device}, nullptr, {}}; }

size_t page_bytes(int device) {
    size_t bytes = 0;
    const MemoryProperties properties = properties_of(device);
    check(driver().granularity(&bytes, &properties, 0), "asking for the size of pages");
    return bytes;
}

// Addresses for all rows that an array may ever have. Memory is mapped to the first of them, in pieces,
// so an array grows and shrinks where it is.
class AddressRange {
public:
    AddressRange(size_t bytes, int device) : properties_(properties_of(device)), page_(page_bytes(device)) {
        size_ = rounded(std::max<size_t>(bytes, 1));
        check(driver().reserve(&address_, size_, 0, 0, 0), "reserving addresses");
    }
    AddressRange(const AddressRange&) = delete;
    ~AddressRange() {
        while (!ends_.empty()) unmap_last();
        driver().free_addresses(address_, size_);
    }
    uint64_t address() const { return address_; }
    size_t size() const { return size_; }
    size_t mapped() const { return ends_.empty() ? 0 : ends_.back(); }

    // Maps memory to the first `bytes` addresses. New memory is filled with zeros on the stream. Pieces
    // of which nothing is needed are unmapped, and nothing may use these then.
    void resize(size_t bytes, void* stream) {
        while (!ends_.empty() && (ends_.size() > 1 ? ends_.end()[-2] : 0) >= bytes) unmap_last();
        const size_t piece = rounded(std::max<size_t>(size_ / kPieces, 1)), begin = mapped();
        while (mapped() < bytes) map_next(std::min(piece, rounded(bytes) - mapped()));
        if (mapped() == begin) return;
        const MemoryAccess all{properties_.location, 3};  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(driver().allow(address_ + begin, mapped() - begin, &all, 1), "allowing access to memory");
        check(driver().fill(address_ + begin, 0, mapped() - begin, stream), "filling memory");
    }

private:
    // What shrinking leaves mapped is less than one piece of what the array may ever have.
    static constexpr size_t kPieces = 32;

    size_t rounded(size_t bytes) const { return (bytes + page_ - 1) / page_ * page_; }

    void map_next(size_t bytes) {
        uint64_t handle = 0;
        if (driver().new_memory(&handle, bytes, &properties_, 0)) {
            mlx::core::clear_cache();  // freed arrays that MLX keeps
            check(driver().finish(), "waiting for memory");
            check(driver().new_memory(&handle, bytes, &properties_, 0), "taking memory for KV blocks");
        }
        const int failed = driver().map(address_ + mapped(), bytes, 0, handle, 0);
        driver().release(handle);  // the mapping keeps the memory
        check(failed, "mapping memory");
        ends_.push_back(mapped() + bytes);
        count_mapped(static_cast<int64_t>(bytes));
    }
    void unmap_last() {
        const size_t end = mapped();
        ends_.pop_back();
        driver().unmap(address_ + mapped(), end - mapped());
        count_mapped(-static_cast<int64_t>(end - mapped()));
    }

    MemoryProperties properties_;
    size_t page_;
    size_t size_ = 0;
    uint64_t address_ = 0;
    std::vector<size_t> ends_;  // of the mapped pieces, in bytes
};

bool computed(const array& of) {
    return of.status() != array::Status::unscheduled && of.data_shared_ptr() != nullptr;
}

// Returns an array at an address whose memory is not MLX's. Its buffer has the size 0, so that MLX
// writes to it in place as to its own, and frees nothing. The host must not read it, nor a view of it:
// MLX would move the buffer to memory that the host can reach.
array array_at(uint64_t address, int device, mlx::core::Shape shape, mlx::core::Dtype dtype) {
    mlx::core::allocator::Data data = mlx::core::allocator::malloc(0);
    auto* buffer = static_cast<mlx::core::cu::CudaBuffer*>(data.buffer().ptr());
    buffer->data = reinterpret_cast<void*>(address);
    buffer->device = device;
    return array(std::move(data), std::move(shape), dtype);
}

// Makes MLX forget that operations still read an array in growing memory: it would copy the array
// instead of writing to it in place. Whoever calls this orders the reads before the write.
void renew(array& of) {
    if (!computed(of)) return;
    const auto* buffer = static_cast<const mlx::core::cu::CudaBuffer*>(of.buffer().ptr());
    if (buffer == nullptr || buffer->size || buffer->data == nullptr) return;
    const auto fresh = array_at(address(of), buffer->device, of.shape(), of.dtype());
    of.overwrite_descriptor(fresh);
}

// The memory of arrays that grow in place. It must outlive them.
class GrowingMemory {
public:
    GrowingMemory() = default;
    GrowingMemory(const GrowingMemory&) = delete;
    ~GrowingMemory() {
        if (!ranges_.empty()) driver().finish();  // steps may still run
    }
    size_t page_bytes() const {
        const auto device = mlx::core::default_stream(mlx::core::default_device()).device;
        return quire::page_bytes(device.index);
    }
    array resized(const array& of, int rows, int most_rows) {
        const auto stream = mlx::core::default_stream(mlx::core::default_device());
        auto& encoder = mlx::core::cu::get_command_encoder(stream);
        encoder.device().make_current();
        encoder.commit();  // MLX knows arrays by their buffers, and this one gets another
        auto shape = of.shape();
        size_t row_bytes = of.itemsize();
        for (size_t axis = 1; axis < shape.size(); axis++) row_bytes *= shape[axis];
        const uint64_t before = computed(of) ? address(of) : 0;
        auto found = ranges_.find(before);
        if (found == ranges_.end() || row_bytes * rows > found->second->size()) {
            auto made = std::make_unique<AddressRange>(row_bytes * std::max(rows, most_rows), stream.device.index);
            made->resize(row_bytes * rows, encoder.stream());
            const size_t copied = row_bytes * std::min(rows, shape[0]);
            if (copied) {
                check(driver().copy(made->address(), before, copied, encoder.stream()), "copying blocks");
                check(driver().finish(), "copying blocks");  // before MLX frees them
            }
            found = ranges_.emplace(made->address(), std::move(made)).first;
        } else {
            found->second->resize(row_bytes * rows, encoder.stream());
        }
        shape[0] = rows;
        return array_at(found->first, stream.device.index, std::move(shape), of.dtype());
    }

    // Frees the memory that none of these arrays uses: MLX has copied arrays that lay there.
    void keep(const std::vector<array>& arrays) {
        std::set<uint64_t> used;
        for (const array& each : arrays) used.insert(computed(each) ? address(each) : 0);
        bool waited = false;
        for (auto each = ranges_.begin(); each != ranges_.end();) {
            if (used.count(each->first)) {
                ++each;
                continue;
            }
            if (!waited) driver().finish();  // steps may still run
            waited = true;
            each = ranges_.erase(each);
        }
    }

private:
    std::map<uint64_t, std::unique_ptr<AddressRange>> ranges_;
};

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
    nb::class_<quire::GrowingMemory>(m, "GrowingMemory")
        .def(nb::init<>())
        .def_prop_ro("page_bytes", &quire::GrowingMemory::page_bytes)
        .def("resized", &quire::GrowingMemory::resized, nb::arg("array"), nb::arg("rows"), nb::arg("most_rows"))
        .def("keep", &quire::GrowingMemory::keep, nb::arg("arrays"));
    m.def("renew", &quire::renew, nb::arg("array"));
    m.def("mapped_bytes", [] { return quire::mapped_bytes_; });
    m.def("pointer", &quire::pointer, nb::arg("array"));
    m.def("host_copy", &quire::host_copy, nb::arg("array"));
    m.def("replay", &quire::replay, nb::arg("graph"), nb::arg("inputs"), nb::arg("targets"),
          nb::arg("workspace"), nb::arg("rows"), nb::arg("numbers") = nb::bytes("", 0),
          nb::arg("numbers_target") = 0);
}
