// Products with packed weights in integers by NEON's dot products, and NEON's kernels for everything else.
#include "kernels.h"
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include <sys/auxv.h>

#include "few_by_tiles.h"

namespace quire {
const Kernels* dotprod_kernels() {
    static const Kernels* found = [] {
        if (!(getauxval(AT_HWCAP) >> 20 & 1)) return (const Kernels*)nullptr;  // HWCAP_ASIMDDP
        static const Kernels kernels = dotprod::integer_kernels<baseline_kernels>("dotprod");
        return &kernels;
    }();
    return found;
}
}  // namespace quire
#else
namespace quire {
const Kernels* dotprod_kernels() { return nullptr; }
}  // namespace quire
#endif
