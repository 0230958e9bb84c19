__device__ __forceinline__ void copy_block(const T* from, int numbers, T* to) {
  for (int n = threadIdx.x; n < numbers / 8; n += THREADS) ((uint4*)to)[n] = ((const uint4*)from)[n];
}
__device__ __forceinline__ void clear(T* to, int numbers) {
  for (int n = threadIdx.x; n < numbers / 8; n += THREADS) ((uint4*)to)[n] = make_uint4(0, 0, 0, 0);
}
