#include "table.inc"
namespace quire {
const Kernels* baseline_kernels() { return QUIRE_ISA::table(); }
}  // namespace quire
