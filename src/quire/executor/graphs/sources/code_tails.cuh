  // Codes the tails that this step's rows have filled, as `quire.cache.formats.page` does: keys by
  // channel, values by token after their rotation. A thread block for each KV head and layer.
  // stores [layers, 8]: addresses of codes, scales and biases of keys, of values, then of tails; or
  // [layers, 4], those of keys and one tail, where values are the starts of keys (V_DIM is 0).
  constexpr int PARTS = V_DIM ? 6 : 3;
  const long long* store = stores + blockIdx.y * (V_DIM ? 8 : 4);
  const int kv_head = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int row = 0; row < *rows; row++) {
    if (offsets[row] != 63) continue;
    const size_t head = (size_t)blocks[row] * KV_HEADS + kv_head;
    const size_t tail = ((size_t)tails[row] * KV_HEADS + kv_head) * 64;
    const T* keys = (const T*)store[PARTS] + tail * K_DIM;
    for (int channel = threadIdx.x; channel < K_DIM; channel += THREADS) {
      float x[64];
      #pragma unroll
      for (int t = 0; t < 64; t++) x[t] = (float)keys[t * K_DIM + channel];
      const size_t at = head * K_DIM + channel;
      code_alone<K_BITS, 2>(x, (unsigned*)store[0] + at * (2 * K_BITS), (__half*)store[1] + at, (__half*)store[2] + at,
                            K_REACH);
    }
#if V_DIM
    // A warp for each token.
    const T* values = (const T*)store[7] + tail * V_DIM;
    constexpr int E = V_DIM / 32, GROUPS = V_DIM / V_GROUP;
    for (int token = warp; token < 64; token += THREADS / 32) {
      float x[E];
      #pragma unroll
      for (int e = 0; e < E; e++) x[e] = (float)values[token * V_DIM + e * 32 + lane];
      turned<E>(x, signs, rsqrtf((float)V_DIM));
      const size_t at = head * 64 + token;
      code_vector<E, V_GROUP, V_BITS, 2>(x, (unsigned*)store[3] + at * (V_DIM * V_BITS / 32),
                                         (__half*)store[4] + at * GROUPS, (__half*)store[5] + at * GROUPS, V_REACH);
    }
#endif
  }
