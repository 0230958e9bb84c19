// How many runs of 32 keys each of the thread blocks takes that share a row's keys: at least one for each of its
// warps that take keys apart; two, where these are all of the row's, so that nothing is left to combine, or where a
// step's rows are many, so that thread blocks are few for each. Where there are more splits than SPLITS_AT_ONCE, whose
// thread blocks run at a time, half of them share many keys: after 8,000 tokens a step of Llama 8B then takes 9% less
// time (benchmarks/results/gpu-runs.md).
#ifndef SPLITS_AT_ONCE
#define SPLITS_AT_ONCE splits
#endif
__device__ __forceinline__ int units_of_split(int low, int high, int splits) {
  const int units = (high + 31) / 32 - low / 32, streams = V_DIM > 256 ? 1 : V_DIM > 128 ? 2 : 4;
  const int used = units >= 128 && splits > SPLITS_AT_ONCE ? splits / 2 : splits;
  const int least = units > 2 * streams && splits >= 16 ? streams : 2 * streams;
  return (max((units + used - 1) / used, least) + streams - 1) / streams * streams;
}
