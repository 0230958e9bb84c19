// Products with packed weights in integers by AVX-VNNI, in vectors of 256 bits, and AVX2's kernels for everything else.
#include "kernels.h"
#if defined(__x86_64__) && defined(__AVXVNNI__)
#include <cpuid.h>

#include "few_by_tiles.h"

namespace quire {
namespace {

bool announced() {  // not known to every compiler's __builtin_cpu_supports
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

}  // namespace

const Kernels* avxvnni_kernels() {
    static const Kernels* found = [] {
        if (!avx2_kernels() || !announced()) return (const Kernels*)nullptr;
        static const Kernels kernels = avxvnni::integer_kernels<avx2_kernels>("avxvnni");
        return &kernels;
    }();
    return found;
}
}  // namespace quire
#else
namespace quire {
const Kernels* avxvnni_kernels() { return nullptr; }
}  // namespace quire
#endif
