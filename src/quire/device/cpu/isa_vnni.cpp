// Products with packed weights in integers, and AVX-512's kernels for everything else.
#include "kernels.h"
#if defined(__x86_64__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#include "few_by_tiles.h"

namespace quire {
namespace {

int64_t arranged_floats(const Weight& w, int64_t count) {
    return in_integers(w) ? integer_floats(w, count) : avx512_kernels()->arranged_floats(w, count);
}

void arrange(const Weight& w, const Source& x, int64_t begin, int64_t end, float* arranged) {
    (in_integers(w) ? arrange_integers : avx512_kernels()->arrange)(w, x, begin, end, arranged);
}

int64_t scratch_floats(const Weight& w) {
    return in_integers(w) ? IntegerProduct<Vnni, 16>::scratch_floats() : avx512_kernels()->scratch_floats(w);
}

void product(const Weight& w, const Rows& rows, int64_t begin, int64_t end, float* scratch) {
    if (!in_integers(w)) return avx512_kernels()->product(w, rows, begin, end, scratch);
    if (w.tiled) return multiply_by_tiles(w, rows, begin, end);
    multiply_integers<Vnni>(w, rows, begin, end, scratch);
}

}  // namespace

const Kernels* vnni_kernels() {
    static const Kernels* found = [] {
        const bool here = avx512_kernels() && __builtin_cpu_supports("avx512vnni") &&
                          __builtin_cpu_supports("avx512vbmi");
        if (!here) return (const Kernels*)nullptr;
        static const Kernels kernels =
            with_products(*avx512_kernels(), "vnni", {arranged_floats, arrange, product, scratch_floats, reads_tiles});
        return &kernels;
    }();
    return found;
}
}  // namespace quire
#else
namespace quire {
const Kernels* vnni_kernels() { return nullptr; }
}  // namespace quire
#endif
