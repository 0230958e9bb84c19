  // A chunk's tokens behind those of its tail, in blocks of 64, and the codes of those blocks that are
  // full. Thread blocks [n * heads, parts]: of block and head, THREADS channels of keys, or 16 values.
  // tails [tails * heads, 64, -], fresh [tokens, heads, -], rows [heads]: of the tail
  // numbers: tokens before the chunk in its first block, those up to its end, heads
  constexpr int K_PARTS = (K_DIM + THREADS - 1) / THREADS;
  const int offset = numbers[0], end = numbers[1], heads = numbers[2];
  const int block = blockIdx.x / heads, head = blockIdx.x % heads, token0 = block * 64;
  const bool full = token0 + 64 <= end;
  const size_t tail0 = (size_t)rows[head] * 64;
  if (blockIdx.y < K_PARTS) {
    const int channel = blockIdx.y * THREADS + threadIdx.x;
    if (channel >= K_DIM) return;
    T* to = keys + (size_t)blockIdx.x * (64 * K_DIM) + channel;
    float x[64];
    #pragma unroll
    for (int i = 0; i < 64; i++) {
      const int token = token0 + i;
      T own = (T)0.f;
      if (token < offset) own = tail_keys[(tail0 + token) * K_DIM + channel];
      else if (token < end) own = fresh_keys[((size_t)(token - offset) * heads + head) * K_DIM + channel];
      to[i * K_DIM] = own;
      x[i] = (float)own;
    }
    const size_t at = (size_t)blockIdx.x * K_DIM + channel;
    if (full) code_alone<K_BITS, K_FITS>(x, k_words + at * (2 * K_BITS), k_scales + at, k_biases + at, K_REACH);
    return;
  }
  const int first = (blockIdx.y - K_PARTS) * 16;
  for (int i = first + (threadIdx.x >> 5); i < first + 16; i += THREADS / 32) {
    const int token = token0 + i, lane = threadIdx.x & 31;
    const T* from = fresh_values + ((size_t)(token - offset) * heads + head) * V_DIM;
    if (token < offset) from = tail_values + (tail0 + token) * V_DIM;
    T* to = values + ((size_t)blockIdx.x * 64 + i) * V_DIM;
    constexpr int E = V_DIM / 32;
    float x[E];
    #pragma unroll
    for (int e = 0; e < E; e++) {
      const T own = token < end ? from[e * 32 + lane] : (T)0.f;
      to[e * 32 + lane] = own;
      x[e] = (float)own;
    }
    if (!full) continue;
    turned<E>(x, value_signs, V_SCALE);
    encode_vector<V_CODING>(x, (size_t)blockIdx.x * 64 + i, V_REACH, nullptr, v_words, v_scales, v_biases);
  }
