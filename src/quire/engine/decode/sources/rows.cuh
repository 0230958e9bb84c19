// Rows of HIDDEN numbers, bfloat16, eight to a lane at a time; a thread block has THREADS lanes.
constexpr int EIGHTS = HIDDEN / 8, PER = (EIGHTS + THREADS - 1) / THREADS;

__device__ __forceinline__ void unpack(const uint4& from, float* to) {
  const __nv_bfloat162* pair = (const __nv_bfloat162*)&from;
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 two = __bfloat1622float2(pair[i]);
    to[2 * i] = two.x;
    to[2 * i + 1] = two.y;
  }
}
__device__ __forceinline__ uint4 packed(const float* from) {
  uint4 to;
  __nv_bfloat162* pair = (__nv_bfloat162*)&to;
  #pragma unroll
  for (int i = 0; i < 4; i++) pair[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
  return to;
}
// As it is once it was stored.
__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16(x)); }
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float found[32];
  #pragma unroll
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) found[threadIdx.x >> 5] = x;
  __syncthreads();
  x = (threadIdx.x & 31) < THREADS / 32 ? found[threadIdx.x & 31] : 0.f;
  #pragma unroll
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}
// What a row is multiplied by to have a root mean square of one.
__device__ __forceinline__ float norm_factor(const float (*v)[8]) {
  float sum = 0.f;
  #pragma unroll
  for (int p = 0; p < PER; p++)
    #pragma unroll
    for (int i = 0; i < 8; i++) sum += v[p][i] * v[p][i];
  return rsqrtf(block_sum(sum) / HIDDEN + EPS);
}
// The rows of an array that this lane has; zeros behind the end.
__device__ __forceinline__ void load(uint4* to, const T* from) {
  #pragma unroll
  for (int p = 0; p < PER; p++) {
    const int at = threadIdx.x + p * THREADS;
    to[p] = at < EIGHTS ? ((const uint4*)from)[at] : make_uint4(0, 0, 0, 0);
  }
}
__device__ __forceinline__ void store(T* to, const float (*from)[8]) {
  #pragma unroll
  for (int p = 0; p < PER; p++) {
    const int at = threadIdx.x + p * THREADS;
    if (at < EIGHTS) ((uint4*)to)[at] = packed(from[p]);
  }
}
// A norm with a weight, and what follows: `to` is `v` scaled.
__device__ __forceinline__ void store_normed(T* to, const float (*v)[8], float factor, const uint4* weight) {
  float out[PER][8];
  #pragma unroll
  for (int p = 0; p < PER; p++) {
    unpack(weight[p], out[p]);
    #pragma unroll
    for (int i = 0; i < 8; i++) out[p][i] *= rounded(v[p][i] * factor);
  }
  store(to, out);
}
__device__ __forceinline__ void normed(float (*v)[8], const uint4* weight) {
  const float factor = norm_factor(v);
  #pragma unroll
  for (int p = 0; p < PER; p++) {
    float scale[8];
    unpack(weight[p], scale);
    #pragma unroll
    for (int i = 0; i < 8; i++) v[p][i] = rounded(rounded(v[p][i] * factor) * scale[i]);
  }
}
