// Exchanges the rows of several ranks, whose memory each can write to: each thread sends its pieces to the same thread of
// every other rank, waits for theirs, and then adds the ranks' pieces up or puts them side by side.
//
// inboxes [RANKS]: address of each rank's inbox, as this rank reaches it. An inbox has a count of rounds for each of its
// own blocks, and two slots for what each rank's blocks send. A piece of up to 8 bytes travels with the number of its
// round beside each 4 bytes, in one store, so that nothing is sent but the pieces, and no thread waits for another one's.
// Two threads take turns: one that has the piece of a round knows that the other has read that of the round before, so
// two slots suffice, whatever is launched next.
char* const inbox = (char*)inboxes[RANK];
unsigned* const rounds = (unsigned*)inbox;
const int block = blockIdx.x, thread = threadIdx.x;
unsigned round = rounds[block];
const size_t count = (size_t)*rows * PIECES;
for (size_t first = (size_t)block * THREADS; first < count; first += (size_t)BLOCKS * THREADS * UNROLL) {
  round++;
  const size_t slot = SLOTS + (size_t)(round & 1) * RANKS * MOST_BLOCKS * SLOT;
  Piece own[UNROLL];
  #pragma unroll
  for (int n = 0; n < UNROLL; n++) {
    const size_t at = first + (size_t)n * BLOCKS * THREADS + thread;
    if (at >= count) continue;
    own[n] = ((const Piece*)x)[at];
    __align__(8) unsigned words[2] = {};
    *(Piece*)words = own[n];
    #pragma unroll
    for (int rank = 0; rank < RANKS; rank++) {
      if (rank == RANK) continue;
      char* to = (char*)inboxes[rank] + slot + ((size_t)RANK * MOST_BLOCKS + block) * SLOT;
      sent((uint4*)to + n * THREADS + thread, words, round);
    }
  }
  #pragma unroll
  for (int n = 0; n < UNROLL; n++) {
    const size_t at = first + (size_t)n * BLOCKS * THREADS + thread;
    if (at >= count) continue;
    float sums[ELEMENTS] = {};
    #pragma unroll
    for (int rank = 0; rank < RANKS; rank++) {
      __align__(8) unsigned words[2] = {};
      if (rank == RANK) {
        *(Piece*)words = own[n];
      } else {
        const char* from = inbox + slot + ((size_t)rank * MOST_BLOCKS + block) * SLOT;
        const uint4* const piece = (const uint4*)from + n * THREADS + thread;
        for (unsigned turn = 0; POLLS == 0 || turn < POLLS; turn++)
          if (received(piece, words, round)) break;
      }
      if (GATHERED) ((Piece*)y)[at / PIECES * (PIECES * RANKS) + rank * PIECES + at % PIECES] = *(Piece*)words;
      #pragma unroll
      for (int e = 0; e < ELEMENTS; e++) sums[e] += number(((const E*)words)[e]);
    }
    if (GATHERED) continue;
    Piece sum;
    #pragma unroll
    for (int e = 0; e < ELEMENTS; e++) put(((E*)&sum)[e], sums[e]);
    ((Piece*)y)[at] = sum;
  }
}
__syncthreads();
if (thread == 0) rounds[block] = round;
