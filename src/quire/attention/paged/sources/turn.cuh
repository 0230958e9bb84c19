// The inverse of a rotation, but for its signs and its scale, by all threads of a block: of V_DIM numbers in
// shared memory. See `transformed`.
constexpr int TURNED_RUN = V_DIM & -V_DIM, TURNED_RUNS = V_DIM / TURNED_RUN;
__device__ __forceinline__ void transform_runs(float* x) {
  for (int half = 1; half < TURNED_RUN; half *= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < V_DIM / 2; i += blockDim.x) {
      const int a = i / half * 2 * half + i % half;
      const float u = x[a], v = x[a + half];
      x[a] = u + v;
      x[a + half] = u - v;
    }
  }
  __syncthreads();
}
__device__ __forceinline__ float across_runs(const float* x, int d) {
  if constexpr (TURNED_RUNS == 1) {
    return x[d];
  } else {
    constexpr Hartley<TURNED_RUNS> circle;
    float sum = 0.f;
    for (int r = 0; r < TURNED_RUNS; r++) sum += x[r * TURNED_RUN + d % TURNED_RUN] * circle.of[d / TURNED_RUN * r % TURNED_RUNS];
    return sum;
  }
}
