// Of kernels of products and of attention. Copies to shared memory in the background are counted in turns.
// Transposes 8 x 8 numbers: row r is in lanes 4 * r to 4 * r + 3.
__device__ __forceinline__ unsigned transposed(unsigned two) {
  unsigned to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(two));
  return to;
}
__device__ __forceinline__ void end_turn() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all turns but the last LEFT have arrived.
template <int LEFT>
__device__ __forceinline__ void await_turns() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
