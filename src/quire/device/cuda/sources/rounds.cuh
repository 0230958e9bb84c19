// Rounds of sums of few rows. All ranks' kernels are in the same round: one begins when the sum before is done.
__device__ __forceinline__ unsigned round_of(const char* inbox) {
  return *(const volatile unsigned*)(inbox + COUNTS) + 1;
}
// Bytes from an inbox to the pieces of a rank in it, row behind row. Who sends those of a round has got all of the
// round before, so the other one has read those of two rounds before, which lay in their place.
__device__ __forceinline__ size_t pieces_of(int rank, unsigned round) {
  return SUM_SLOTS + (size_t)((round & 1) * RANKS + rank) * SUM_SLOT;
}
