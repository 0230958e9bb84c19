// Of products of experts. Thread blocks of first products count those that have stored a tile, and the last products of
// a tile start when all of its blocks are counted, not when the whole kernel before is done.
__device__ __forceinline__ void count_block(int* count) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(count) : "memory");
}
// A block that is not counted soon is awaited with its kernel.
__device__ __forceinline__ void await_blocks(const int* count, int wanted) {
  if (threadIdx.x == 0) {
    int now = 0;
    for (int polls = 0; polls < 64 && now < wanted; polls++)
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
    if (now < wanted) wait_for_others();
  }
  __syncthreads();
}
