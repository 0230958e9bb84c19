// Sums of few rows, whose ranks write to each other's inboxes; see inboxes.py. A piece is 8 bytes of a row. It travels with
// the number of its round beside each 4 bytes, in one store, so that nothing is sent but the pieces.
__device__ __forceinline__ void sent(uint4* to, const unsigned* words, unsigned round) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};"
               :: "l"(to), "r"(words[0]), "r"(round), "r"(words[1]) : "memory");
}
