// AMX's instructions. The compiler's intrinsics take no numbers of tiles from templates.
#pragma once

#include <cstdint>

namespace quire::tiles {

inline void load_config(const void* config) { asm volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])config)); }
inline void release() { asm volatile("tilerelease"); }
template <int tile> inline void zero_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }
template <int tile> inline void load_tile(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}
template <int tile> inline void store_tile(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}
// Adds to tile `to` the products of tile `a`, signed bytes, and tile `b`, unsigned ones.
template <int to, int a, int b> inline void multiply_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(to), "i"(a), "i"(b));
}
template <int to, int a, int b> inline void multiply_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(to), "i"(a), "i"(b));
}

}  // namespace quire::tiles
