// Products with packed weights in integers by VNNI, and AVX-512's kernels for everything else.
#include "kernels.h"
#if defined(__x86_64__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#include "few_by_tiles.h"

namespace quire {
const Kernels* vnni_kernels() {
    static const Kernels* found = [] {
        const bool here = avx512_kernels() && __builtin_cpu_supports("avx512vnni") &&
                          __builtin_cpu_supports("avx512vbmi");
        if (!here) return (const Kernels*)nullptr;
        static const Kernels kernels = vnni::integer_kernels<avx512_kernels>("vnni");
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
