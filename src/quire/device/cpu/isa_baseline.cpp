#include "kernels.h"
#ifndef QUIRE_OMITTED
#include "table.inc"
namespace quire {
const Kernels* baseline_kernels() { return QUIRE_ISA::table(); }
}  // namespace quire
#else
namespace quire {
const Kernels* baseline_kernels() { return nullptr; }
}  // namespace quire
#endif
