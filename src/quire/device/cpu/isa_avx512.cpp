#include "kernels.h"
#if defined(__x86_64__) && defined(__AVX512F__)
#include "table.inc"
namespace quire {
const Kernels* avx512_kernels() {
    const bool here = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
    return here ? avx512::table() : nullptr;
}
}  // namespace quire
#else
namespace quire {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace quire
#endif
