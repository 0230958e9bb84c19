// Weights in large pages: an address's translation reaches further, so that memory is read up to twice as fast.

#include <nanobind/nanobind.h>

#include "operation.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace quire {
namespace {

constexpr size_t kLargePage = 2 << 20;
constexpr size_t kAligned = 64;  // bytes: where an array begins

size_t rounded(size_t bytes) { return (bytes + kAligned - 1) / kAligned * kAligned; }

// Asks the system for large pages. It gives them when memory is first written.
void advise(char* memory, size_t bytes) {
#if defined(__linux__)
    const auto begin = ((uintptr_t)memory + kLargePage - 1) / kLargePage * kLargePage;
    const auto end = ((uintptr_t)memory + bytes) / kLargePage * kLargePage;
    if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

// Moves arrays, which are computed and row by row, into one buffer: the Python objects then lie there.
void move_to_large_pages(const nb::list& list) {
    using namespace mlx::core;
    std::vector<array*> arrays;
    std::vector<size_t> places;
    size_t bytes = 0;
    for (const auto& each : list) {
        array& own = nb::cast<array&>(each);
        if (!own.flags().row_contiguous || own.size() == 0) continue;
        arrays.push_back(&own);
        places.push_back(bytes);
        bytes += rounded(own.nbytes());
    }
    if (bytes < kLargePage) return;
    const array memory(allocator::malloc(bytes + kAligned), {(int)((bytes + kAligned) / sizeof(uint64_t))}, uint64);
    char* all = const_cast<char*>(memory.data<char>());
    const size_t first = rounded((uintptr_t)all) - (uintptr_t)all;
    advise(all, bytes + kAligned);
    parallel((int)arrays.size(), [&](int i) {
        std::memcpy(all + first + places[i], arrays[i]->data<char>(), arrays[i]->nbytes());
    });
    for (size_t i = 0; i < arrays.size(); i++) {
        array moved(arrays[i]->shape(), arrays[i]->dtype(), nullptr, {});
        const int64_t offset = (int64_t)((first + places[i]) / moved.itemsize());
        moved.copy_shared_buffer(memory, moved.strides(), {true, true, moved.ndim() < 2}, moved.size(), offset);
        moved.set_status(array::Status::available);
        arrays[i]->overwrite_descriptor(moved);
    }
}

}  // namespace

void bind_pages(nb::module_& m) { m.def("move_to_large_pages", &move_to_large_pages, nb::arg("arrays")); }

}  // namespace quire
