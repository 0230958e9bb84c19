  // Tokens of chunks behind those of their tails, in blocks of 64, and the codes of those blocks that
  // are full. Thread blocks [n, parts, heads]: of block and head, THREADS channels of keys, or 16 values.
  // tails [tails * heads, 64, -], fresh [rows, heads, -]
  // blocks [n, 5]: the tail, its tokens in the block, those up to the chunk's end, the row of the block's
  // first token, and the block's number among those that are full, or -1
  constexpr int K_PARTS = (K_DIM + THREADS - 1) / THREADS;
  const int head = blockIdx.z, heads = gridDim.z;
  const int* own_block = blocks + blockIdx.x * 5;
  const int begun = own_block[1], end = own_block[2], row = own_block[3], number = own_block[4];
  const size_t tail0 = ((size_t)own_block[0] * heads + head) * 64;
  const size_t written = (size_t)blockIdx.x * heads + head, coded = (size_t)number * heads + head;
  if (blockIdx.y < K_PARTS) {
    const int channel = blockIdx.y * THREADS + threadIdx.x;
    if (channel >= K_DIM) return;
    T* to = keys + written * (64 * K_DIM) + channel;
    float x[64];
    #pragma unroll
    for (int i = 0; i < 64; i++) {
      T own = (T)0.f;
      if (i < begun) own = tail_keys[(tail0 + i) * K_DIM + channel];
      else if (i < end) own = fresh_keys[((size_t)(row + i) * heads + head) * K_DIM + channel];
      to[i * K_DIM] = own;
      x[i] = (float)own;
    }
    const size_t at = coded * K_DIM + channel;
    if (number >= 0) code_alone<K_BITS, K_FITS>(x, k_words + at * (2 * K_BITS), k_scales + at, k_biases + at, K_REACH);
    return;
  }
  const int first = (blockIdx.y - K_PARTS) * 16;
  for (int i = first + (threadIdx.x >> 5); i < first + 16; i += THREADS / 32) {
    const int lane = threadIdx.x & 31;
    const T* from = fresh_values + ((size_t)(row + i) * heads + head) * V_DIM;
    if (i < begun) from = tail_values + (tail0 + i) * V_DIM;
    T* to = values + (written * 64 + i) * V_DIM;
    constexpr int E = V_DIM / 32;
    float x[E];
    #pragma unroll
    for (int e = 0; e < E; e++) {
      const T own = i < end ? from[e * 32 + lane] : (T)0.f;
      to[e * 32 + lane] = own;
      x[e] = (float)own;
    }
    if (number < 0) continue;
    turned<E>(x, value_signs, V_SCALE);
    encode_vector<V_CODING>(x, coded * 64 + i, V_REACH, nullptr, v_words, v_scales, v_biases);
  }
