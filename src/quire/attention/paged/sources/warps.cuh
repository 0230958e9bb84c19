// What the lanes of a warp, and the warps of a thread block, do together. `column` is of a product's
// result, whose columns are query heads.

// Transposes 8 x 8 numbers: row r is in lanes 4 * r to 4 * r + 3.
__device__ __forceinline__ unsigned transposed(unsigned two) {
  unsigned to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(two));
  return to;
}
__device__ __forceinline__ float column_max(float x) {
  #pragma unroll
  for (int by = 4; by < 32; by *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, by));
  return x;
}
__device__ __forceinline__ float column_sum(float x) {
  #pragma unroll
  for (int by = 4; by < 32; by *= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}
__device__ __forceinline__ float power(float x) {
  float to;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(to) : "f"(x));
  return to;
}
// 16 bytes from global to shared memory, in the background; copies of a turn arrive together.
__device__ __forceinline__ void copy_ahead(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void end_turn() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all turns but the last have arrived.
__device__ __forceinline__ void await_turn() {
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncwarp();
}
__device__ __forceinline__ void await_all() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncwarp();
}
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
// What streams of keys found for one query head: the greatest score, the total of its weights, and one
// element of the weighted sum of values.
struct Joined { float best, sum, x; };
// `found` has each stream's greatest score and total for ROWS heads; `element` is the first stream's, the
// next ones' are `stride` further.
template <int STREAMS, int ROWS>
__device__ __forceinline__ Joined joined(const float* found, int head, const float* element, int stride) {
  Joined to = {-1e30f, 0.f, 0.f};
  #pragma unroll
  for (int w = 0; w < STREAMS; w++) to.best = fmaxf(to.best, found[(w * ROWS + head) * 2]);
  #pragma unroll
  for (int w = 0; w < STREAMS; w++) {
    const float* own = found + (w * ROWS + head) * 2;
    const float weight = power(own[0] - to.best);
    to.sum += own[1] * weight;
    to.x += element[w * stride] * weight;
  }
  return to;
}
