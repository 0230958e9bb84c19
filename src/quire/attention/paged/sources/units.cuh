// How many runs of 32 keys each of the thread blocks takes that share a row's keys; two at least
// for each of its warps that take keys apart.
__device__ __forceinline__ int units_of_split(int low, int high, int splits) {
  const int units = (high + 31) / 32 - low / 32, streams = V_DIM > 256 ? 1 : V_DIM > 128 ? 2 : 4;
  return (max((units + splits - 1) / splits, 2 * streams) + streams - 1) / streams * streams;
}
