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

    // A warp for each token; a lane has elements lane, lane + 32 and so on.
    const T* values = (const T*)store[7] + tail * DIM;
    constexpr int E = DIM / 32, OF = V_GROUP / 32;
    constexpr float TOP = (1 << V_BITS) - 1;
    for (int token = warp; token < 64; token += THREADS / 32) {
      float x[E];
      #pragma unroll
      for (int e = 0; e < E; e++) x[e] = (float)values[token * DIM + e * 32 + lane] * signs[e * 32 + lane];
      #pragma unroll
      for (int half = 1; half < 32; half *= 2)
        #pragma unroll
        for (int e = 0; e < E; e++) {
          const float other = __shfl_xor_sync(0xffffffffu, x[e], half);
          x[e] = lane & half ? other - x[e] : x[e] + other;
        }
      #pragma unroll
      for (int half = 1; half < E; half *= 2)
        #pragma unroll
        for (int e = 0; e < E; e++)
          if (!(e & half)) {
            const float a = x[e], b = x[e + half];
            x[e] = a + b;
            x[e + half] = a - b;
          }
      #pragma unroll
      for (int e = 0; e < E; e++) x[e] *= rsqrtf((float)DIM);
      #pragma unroll
      for (int g = 0; g < DIM / V_GROUP; g++) {
        const float* own = x + g * OF;
        float codes[OF], low = 1e38f, high = -1e38f, mean = 0.f;
        #pragma unroll
        for (int i = 0; i < OF; i++) {
          low = fminf(low, own[i]);
          high = fmaxf(high, own[i]);
          mean += own[i];
        }
        #pragma unroll
        for (int by = 16; by > 0; by /= 2) {
          low = fminf(low, __shfl_xor_sync(0xffffffffu, low, by));
          high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, by));
        }
        mean = lanes_sum(mean) * (1.f / V_GROUP);
        float scale = stored((high - low) / TOP), bias = stored(low);
        for (int fit = 0; fit < 3; fit++) {
          const float inverse = scale == 0.f ? 0.f : 1.f / scale;
          float code_mean = 0.f;
          #pragma unroll
          for (int i = 0; i < OF; i++) {
            codes[i] = code_of(own[i], bias, inverse, TOP);
            code_mean += codes[i];
          }
          if (fit == 2) break;
          code_mean = lanes_sum(code_mean) * (1.f / V_GROUP);
          float spread = 0.f, product = 0.f;
          #pragma unroll
          for (int i = 0; i < OF; i++) {
            const float centred = codes[i] - code_mean;
            spread += centred * centred;
            product += centred * own[i];
          }
          spread = lanes_sum(spread);
          product = lanes_sum(product);
          if (spread != 0.f) {
            scale = stored(product / fmaxf(spread, 0.25f));
            bias = stored(mean - scale * code_mean);
          }
        }
        const size_t at = head * 64 + token;
        constexpr int EACH = 32 / V_BITS;
        #pragma unroll
        for (int i = 0; i < OF; i++) {
          // Lanes add up their codes to words, as integers that a float holds in two halves.
          const unsigned code = (unsigned)codes[i] << (V_BITS * (lane % EACH));
          float low_half = code & 0xFFFFu, high_half = code >> 16;
          #pragma unroll
          for (int by = 1; by < EACH; by *= 2) {
            low_half += __shfl_xor_sync(0xffffffffu, low_half, by);
            high_half += __shfl_xor_sync(0xffffffffu, high_half, by);
          }
          if (lane % EACH == 0)
            ((unsigned*)store[3])[(at * DIM + g * V_GROUP + i * 32 + lane) / EACH] =
                (unsigned)low_half | (unsigned)high_half << 16;
        }
        if (lane == 0) {
          ((__half*)store[4])[at * (DIM / V_GROUP) + g] = __float2half(scale);
          ((__half*)store[5])[at * (DIM / V_GROUP) + g] = __float2half(bias);
        }
      }
    }
  }
