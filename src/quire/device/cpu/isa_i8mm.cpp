// Products with packed weights in integers by NEON's dot products of unsigned by signed bytes, and NEON's kernels for everything else.
#include "kernels.h"
#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
#include <sys/auxv.h>

#include "few_by_tiles.h"

namespace quire {
const Kernels* i8mm_kernels() {
    static const Kernels* found = [] {
        if (!(getauxval(AT_HWCAP2) >> 13 & 1)) return (const Kernels*)nullptr;  // HWCAP2_I8MM
        static const Kernels kernels = i8mm::integer_kernels<baseline_kernels>("i8mm");
        return &kernels;
    }();
    return found;
}
}  // namespace quire
#else
namespace quire {
const Kernels* i8mm_kernels() { return nullptr; }
}  // namespace quire
#endif
