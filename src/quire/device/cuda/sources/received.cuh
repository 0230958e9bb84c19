// Reads a piece. Returns whether it is that of the round.
__device__ __forceinline__ bool received(const uint4* from, unsigned* words, unsigned round) {
  unsigned one, two;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(one), "=r"(words[1]), "=r"(two) : "l"(from) : "memory");
  return one == round && two == round;
}
