#include "kernels.h"

namespace quire {

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> found;
    for (const auto of : {amx_kernels, vnni_kernels, avx512_kernels, avxvnni_kernels, avx2_kernels, i8mm_kernels,
                          dotprod_kernels, baseline_kernels})
        if (const Kernels* kernels = of()) found.push_back(kernels);
    return found;
}

}  // namespace quire
