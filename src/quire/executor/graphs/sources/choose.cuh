  // The LIMIT keys of highest score that each row sees, ascending, in `chosen` [T, LIMIT]; of equal scores
  // the first ones. A row that sees no more than LIMIT chooses all. `found` gets a tile for each row whose
  // keys are those, side by side in blocks of their own (ROOM tokens for a row). A thread block for a row.
  __shared__ int bins[256], sums[2][THREADS / 32];
  __shared__ int bin, rest;
  const int row = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  wait_for_others();
  const int* tile = tiles + row * 6;
  const int low = tile[2], n = row < *rows ? tile[3] - low : 0;
  if (threadIdx.x == 0) {
    int* own = found + row * 6;
    own[0] = row, own[1] = 1, own[2] = 0, own[3] = min(n, LIMIT), own[4] = row * (ROOM / BLOCK), own[5] = 0;
  }
  int* to = chosen + (size_t)row * LIMIT;
  if (n <= LIMIT) {
    for (int i = threadIdx.x; i < n; i += THREADS) to[i] = low + i;
    return;
  }
  const float* own = scores + (size_t)row * CAPACITY;
  // Integers in the order of the scores; 0 and -0 are equal.
  const auto ranked = [&](int i) {
    const unsigned bits = __float_as_uint(own[i] == 0.f ? 0.f : own[i]);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  };
  // The least rank that is chosen, eight bits at a time, and how many keys of it are.
  unsigned least = 0;
  int room = LIMIT;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += THREADS) bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
      const unsigned rank = ranked(i);
      if (shift == 24 || rank >> (shift + 8) == least >> (shift + 8)) atomicAdd(&bins[rank >> shift & 255], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int at = 255, needed = room;
      while (bins[at] < needed) needed -= bins[at--];
      bin = at;
      rest = needed;
    }
    __syncthreads();
    least |= (unsigned)bin << shift;
    room = rest;
  }
  // Each thread takes neighbours, so that what is chosen before them is known by one sum over threads.
  const int each = (n + THREADS - 1) / THREADS, begin = min((int)threadIdx.x * each, n), end = min(begin + each, n);
  int above = 0, equal = 0;
  for (int i = begin; i < end; i++) {
    const unsigned rank = ranked(i);
    above += rank > least;
    equal += rank == least;
  }
  int above_before = above, equal_before = equal;
  for (int by = 1; by < 32; by *= 2) {
    const int more_above = __shfl_up_sync(0xffffffffu, above_before, by);
    const int more_equal = __shfl_up_sync(0xffffffffu, equal_before, by);
    if (lane >= by) above_before += more_above, equal_before += more_equal;
  }
  if (lane == 31) sums[0][warp] = above_before, sums[1][warp] = equal_before;
  __syncthreads();
  above_before -= above;
  equal_before -= equal;
  for (int w = 0; w < warp; w++) above_before += sums[0][w], equal_before += sums[1][w];
  for (int i = begin; i < end; i++) {
    const unsigned rank = ranked(i);
    if (rank > least) {
      to[above_before++ + min(equal_before, room)] = low + i;
    } else if (rank == least) {
      if (equal_before < room) to[above_before + equal_before] = low + i;
      equal_before++;
    }
  }
