// Sums of the ranks' rows in a kernel with a row for each thread block, or a part of one, or several rows. The products
// that made the rows have sent them.
//
// Adds the other ranks' vectors to a thread's own, in the order of ranks: all get the same bits.
//
// own [PER, V]; first [PER]: where each vector begins in all rows, -1 if the thread has none.
template <typename E, int PER, int V>
__device__ __forceinline__ void add_ranks(E* own, const int* first, const char* inbox, unsigned round) {
  constexpr int EACH = 8 / sizeof(E), PIECES = V / EACH;
  float sums[PER * V] = {};
  #pragma unroll
  for (int rank = 0; rank < RANKS; rank++) {
    if (rank == RANK) {
      #pragma unroll
      for (int i = 0; i < PER * V; i++) sums[i] += number(own[i]);
      continue;
    }
    const uint4* const from = (const uint4*)(inbox + pieces_of(rank, round));
    __align__(8) unsigned words[PER * PIECES * 2] = {};
    bool all = false;
    for (unsigned turn = 0; !all && (POLLS == 0 || turn < POLLS); turn++) {
      all = true;
      #pragma unroll
      for (int p = 0; p < PER; p++)
        #pragma unroll
        for (int j = 0; j < PIECES; j++)
          if (first[p] >= 0) all &= received(from + first[p] / EACH + j, words + (p * PIECES + j) * 2, round);
    }
    #pragma unroll
    for (int i = 0; i < PER * V; i++) sums[i] += number(((const E*)words)[i]);
  }
  #pragma unroll
  for (int i = 0; i < PER * V; i++) put(own[i], sums[i]);
}
// Called when a thread block has its sums: returns how many blocks had theirs before, which thread 0 alone knows.
__device__ __forceinline__ int blocks_before(char* inbox) {
  __syncthreads();  // all threads have read the number of the round
  return threadIdx.x == 0 ? atomicAdd((int*)(inbox + COUNTS) + 1, 1) : -1;
}
// The last one of some thread blocks ends the round.
__device__ __forceinline__ void end_round(char* inbox, int before, int blocks, unsigned round) {
  if (before != blocks - 1) return;
  unsigned* const counts = (unsigned*)(inbox + COUNTS);
  counts[0] = round;
  counts[1] = 0;
}
