  // Queries in the coordinates of coded keys; keys and values as codes in their rows' slots of the pool.
  // A warp for each vector.
  // q and turned_q [T, HEADS, HEAD_DIM], keys and values [T, KV_HEADS, HEAD_DIM]
  const int row = blockIdx.x, head = blockIdx.y * (THREADS / 32) + (threadIdx.x >> 5);
  if (row >= *rows || head >= HEADS + 2 * KV_HEADS) return;
  if (head < HEADS) {
    constexpr int E = HEAD_DIM / 32;
    const size_t at = ((size_t)row * HEADS + head) * HEAD_DIM + (threadIdx.x & 31);
    float x[E];
    #pragma unroll
    for (int e = 0; e < E; e++) x[e] = (float)q[at + e * 32];
    if (QUERY_TURNED) turned<E>(x, signs, QUERY_SCALE);
    #pragma unroll
    for (int e = 0; e < E; e++) turned_q[at + e * 32] = (QUERY)x[e];
    return;
  }
  const int kv_head = (head - HEADS) % KV_HEADS;
  const size_t from = ((size_t)row * KV_HEADS + kv_head) * HEAD_DIM;
  const size_t to = ((size_t)blocks[row] * KV_HEADS + kv_head) * BLOCK + offsets[row];
  if (head < HEADS + KV_HEADS) {
    encode_vector<K_CODING>(keys + from, to, K_TURNED ? signs : nullptr, K_SCALE, K_REACH,
                            CODEBOOK ? key_edges : nullptr, key_words, key_scales, key_biases);
  } else {
    encode_vector<V_CODING>(values + from, to, V_TURNED ? signs : nullptr, V_SCALE, V_REACH,
                            CODEBOOK ? value_edges : nullptr, value_words, value_scales, value_biases);
  }
