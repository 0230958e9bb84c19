#include "kernels.h"
#if defined(__x86_64__) && defined(__AVX2__)
#include "table.inc"
namespace quire {
const Kernels* avx2_kernels() {
    const bool here = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
    return here ? avx2::table() : nullptr;
}
}  // namespace quire
#else
namespace quire {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace quire
#endif
