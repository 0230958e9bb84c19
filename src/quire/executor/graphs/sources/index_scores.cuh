  // How much each row wants each key that it sees, where they are more than LIMIT: the sum over HEADS of
  // weights * max(q . k, 0). q [T, HEADS, DIM], weights [T, HEADS], keys [blocks, BLOCK, DIM],
  // scores [T, CAPACITY], of which a row's first is its lowest key's. A thread block for a part of a row's
  // keys; a thread takes whole keys.
  __shared__ float queries[HEADS * DIM], factors[HEADS];
  const int row = blockIdx.x;
  wait_for_others();
  if (row >= *rows) return;
  const int* tile = tiles + row * 6;
  const int low = tile[2], high = tile[3];
  if (high - low <= LIMIT) return;
  const int* blocks = table + tile[4];
  for (int i = threadIdx.x; i < HEADS * DIM; i += THREADS) queries[i] = number(q[(size_t)row * HEADS * DIM + i]);
  for (int i = threadIdx.x; i < HEADS; i += THREADS) factors[i] = number(weights[(size_t)row * HEADS + i]);
  __syncthreads();
  for (int key = low + blockIdx.y * THREADS + threadIdx.x; key < high; key += gridDim.y * THREADS) {
    const auto* from = keys + ((size_t)blocks[key / BLOCK] * BLOCK + key % BLOCK) * DIM;
    float own[DIM];
    #pragma unroll
    for (int d = 0; d < DIM; d++) own[d] = number(from[d]);
    float score = 0.f;
    for (int h = 0; h < HEADS; h++) {
      float dot = 0.f;
      #pragma unroll
      for (int d = 0; d < DIM; d++) dot += own[d] * queries[h * DIM + d];
      score += factors[h] * fmaxf(dot, 0.f);
    }
    scores[(size_t)row * CAPACITY + key - low] = score;
  }
