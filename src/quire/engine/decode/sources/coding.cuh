// As it is once it was stored in float16.
__device__ __forceinline__ float stored(float x) {
  return __half2float(__float2half(fminf(fmaxf(x, -65504.f), 65504.f)));
}
__device__ __forceinline__ float code_of(float x, float bias, float inverse, float top) {
  return fminf(fmaxf(rintf((x - bias) * inverse), 0.f), top);
}
__device__ __forceinline__ float lanes_sum(float x) {
  #pragma unroll
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}
