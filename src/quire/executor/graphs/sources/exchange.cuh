// Exchanges the rows of several ranks, whose memory each can write to: each thread block sends its pieces to the same
// block of every other rank, waits for theirs, and then adds the ranks' pieces up or puts them side by side.
//
// inboxes [RANKS]: address of each rank's inbox, as this rank reaches it. An inbox has, in order: a count of rounds for
// each of its own blocks, a flag of each rank's blocks, and two slots for what each of these sends. A flag is the round
// of which the slot holds the pieces. Blocks of two ranks take turns: a block that has the flag of a round knows that the
// other has read the slot of the round before, so two slots suffice, whatever is launched next.
//
// The flag is stored after all threads' pieces (a release at system scope behind a barrier), and the slot is read after
// the flag, past the first-level cache, which may hold what an earlier round brought.
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
    #pragma unroll
    for (int rank = 0; rank < RANKS; rank++) {
      if (rank == RANK) continue;
      Piece* to = (Piece*)((char*)inboxes[rank] + slot + ((size_t)RANK * MOST_BLOCKS + block) * SLOT);
      to[n * THREADS + thread] = own[n];
    }
  }
  __syncthreads();
  if (thread < RANKS && thread != RANK) {
    tell((unsigned*)((char*)inboxes[thread] + FLAGS) + RANK * MOST_BLOCKS + block, round);
    await((const unsigned*)(inbox + FLAGS) + thread * MOST_BLOCKS + block, round);
  }
  __syncthreads();
  #pragma unroll
  for (int n = 0; n < UNROLL; n++) {
    const size_t at = first + (size_t)n * BLOCKS * THREADS + thread;
    if (at >= count) continue;
    float sums[ELEMENTS] = {};
    #pragma unroll
    for (int rank = 0; rank < RANKS; rank++) {
      const char* from = inbox + slot + ((size_t)rank * MOST_BLOCKS + block) * SLOT;
      const Piece piece = rank == RANK ? own[n] : __ldcv((const Piece*)from + n * THREADS + thread);
      if (GATHERED) ((Piece*)y)[at / PIECES * (PIECES * RANKS) + rank * PIECES + at % PIECES] = piece;
      #pragma unroll
      for (int e = 0; e < ELEMENTS; e++) sums[e] += number(((const E*)&piece)[e]);
    }
    if (GATHERED) continue;
    Piece sum;
    #pragma unroll
    for (int e = 0; e < ELEMENTS; e++) put(((E*)&sum)[e], sums[e]);
    ((Piece*)y)[at] = sum;
  }
}
if (thread == 0) rounds[block] = round;
