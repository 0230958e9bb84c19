// Of kernels of products and of attention. Copies to shared memory in the background are counted in turns.
__device__ __forceinline__ float power(float x) {
  float to;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(to) : "f"(x));
  return to;
}
// Transposes 8 x 8 numbers: row r is in lanes 4 * r to 4 * r + 3.
__device__ __forceinline__ unsigned transposed(unsigned two) {
  unsigned to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(two));
  return to;
}
// 16 bytes, or 8, from global to shared memory, in the background; copies of a turn arrive together.
__device__ __forceinline__ void copy_ahead(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_half_ahead(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void end_turn() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all turns but the last LEFT have arrived.
template <int LEFT>
__device__ __forceinline__ void await_turns() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
// Until so many threads have come to a barrier.
__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
// Four 8 x 8 matrices of numbers from shared memory; each lane names a row of eight.
__device__ __forceinline__ void matrices(unsigned* to, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
    : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
}
__device__ __forceinline__ void turned_matrices(unsigned* to, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
    : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
}
