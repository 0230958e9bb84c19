// What the portable kernels need of CUDA.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
// Aligned, so that four neighbours are read at once.
#define SHARED __shared__ __align__(16)
#define BARRIER() __syncthreads()
#define UNROLL _Pragma("unroll")
#define UNROLL_4 _Pragma("unroll 4")
#define EXP2(x) exp2f(x)
#define TANH(x) tanhf(x)
__device__ __forceinline__ float sum_of_lanes(float x) {
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}
__device__ __forceinline__ float max_of_lanes(float x) {
  for (int by = 16; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, by));
  return x;
}
