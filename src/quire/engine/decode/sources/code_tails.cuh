  // Codes the tails that this step's rows have filled, as `quire.cache.formats.page` does: keys by
  // channel, values by token after their rotation. A thread block for each KV head and layer.
  // stores [layers, 8]: addresses of codes, scales and biases of keys, of values, then of tails.
  const long long* store = stores + blockIdx.y * 8;
  const int kv_head = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int row = 0; row < *rows; row++) {
    if (offsets[row] != 63) continue;
    const size_t head = (size_t)blocks[row] * KV_HEADS + kv_head;
    const size_t tail = ((size_t)tails[row] * KV_HEADS + kv_head) * 64;
    const T* keys = (const T*)store[6] + tail * DIM;
    for (int channel = threadIdx.x; channel < DIM; channel += THREADS) {
      float x[64], codes[64], scale, bias;
      float low = 1e38f, high = -1e38f, mean = 0.f;
      #pragma unroll
      for (int t = 0; t < 64; t++) {
        x[t] = (float)keys[t * DIM + channel];
        low = fminf(low, x[t]);
        high = fmaxf(high, x[t]);
        mean += x[t];
      }
      mean *= 1.f / 64.f;
      constexpr float TOP = (1 << K_BITS) - 1;
      scale = stored((high - low) / TOP);
      bias = stored(low);
      for (int fit = 0; fit < 3; fit++) {
        const float inverse = scale == 0.f ? 0.f : 1.f / scale;
        float code_mean = 0.f;
        #pragma unroll
        for (int t = 0; t < 64; t++) {
          codes[t] = code_of(x[t], bias, inverse, TOP);
          code_mean += codes[t];
        }
        if (fit == 2) break;
        code_mean *= 1.f / 64.f;
        float spread = 0.f, product = 0.f;
        #pragma unroll
        for (int t = 0; t < 64; t++) {
          const float centred = codes[t] - code_mean;
          spread += centred * centred;
          product += centred * x[t];
        }
        if (spread != 0.f) {
          scale = stored(product / fmaxf(spread, 0.25f));
          bias = stored(mean - scale * code_mean);
        }
      }
      const size_t at = head * DIM + channel;
      constexpr int EACH = 32 / K_BITS;
      #pragma unroll
      for (int w = 0; w < 64 / EACH; w++) {
        unsigned word = 0;
        #pragma unroll
        for (int i = 0; i < EACH; i++) word |= (unsigned)codes[w * EACH + i] << (K_BITS * i);
        ((unsigned*)store[0])[at * (64 / EACH) + w] = word;
      }
      ((__half*)store[1])[at] = __float2half(scale);
      ((__half*)store[2])[at] = __float2half(bias);
    }

    // A warp for each token.
    const T* values = (const T*)store[7] + tail * DIM;
    constexpr int E = DIM / 32, GROUPS = DIM / V_GROUP;
    for (int token = warp; token < 64; token += THREADS / 32) {
      float x[E];
      #pragma unroll
      for (int e = 0; e < E; e++) x[e] = (float)values[token * DIM + e * 32 + lane];
      turned<E>(x, signs, rsqrtf((float)DIM));
      const size_t at = head * 64 + token;
      code_vector<E, V_GROUP, V_BITS, 2>(x, (unsigned*)store[3] + at * (DIM * V_BITS / 32),
                                         (__half*)store[4] + at * GROUPS, (__half*)store[5] + at * GROUPS);
    }
  }
