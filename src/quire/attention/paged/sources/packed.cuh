  // One row of a sequence over full blocks of 64 tokens in page codes, 4 or 8 bits.
  // key codes [blocks * KV_HEADS, K_DIM, 64], a scale and a bias for each channel; value codes
  // [blocks * KV_HEADS, 64, V_DIM], a scale and a bias for each token's V_GROUP elements.
  // What comes out is in the values' rotated coordinates, to be turned back by `join`.
  //
  // A thread block has four warps. Each takes blocks of its own and all query heads of a KV head, so
  // none waits for another; STREAMS of them take different blocks, and 4 / STREAMS different
  // elements of the values, by registers. At the end they are joined through shared memory.
  //
  // Codes of two channels (or tokens) side by side make an operand, as 128 + n; the queries (or the
  // weights) carry the scale. What 128 and the biases add is a product of its own, in `extra`.
  constexpr int STREAMS = V_DIM > 128 ? 2 : 4;
  constexpr int V_OWN = V_DIM > 128 ? V_DIM / 2 : V_DIM;  // elements of the values that a warp adds up
  constexpr int CHUNKS = V_OWN / 64;
  extern __shared__ __align__(16) unsigned char shared[];
  T* q_tile = (T*)shared;                             // [16, K_DIM + 8]
  constexpr int Q_STRIDE = K_DIM + 8;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, group = lane >> 2;
  const int* tile = tiles + blockIdx.x * 6;
  const int row = tile[0], low = tile[2], high = tile[3];
  const int* blocks = table + tile[4];
  const int kv_head = blockIdx.y / PARTS, head0 = kv_head * GROUP + blockIdx.y % PARTS * PART;
  const int split = blockIdx.z, splits = gridDim.z;
  const float scale = numbers[0], cap = numbers[1];
  const int first_pass = low / 64, passes = max((high + 63) / 64 - first_pass, 0);
  const int each = (max((passes + splits - 1) / splits, 2) + STREAMS - 1) / STREAMS * STREAMS;
  const int begin = first_pass + split * each, end = min(first_pass + passes, begin + each);
  if (begin >= end) {
    for (int m = threadIdx.x; m < PART; m += 128) {
      const size_t at = ((size_t)row * HEADS + head0 + m) * splits + split;
      stats[at * 2] = -1e30f;
      stats[at * 2 + 1] = 0.f;
    }
    return;
  }
  for (int i = threadIdx.x; i < 16 * (K_DIM / 8); i += 128) {
    const int m = i / (K_DIM / 8), part = i % (K_DIM / 8);
    uint4 value = make_uint4(0, 0, 0, 0);
    if (m < PART) value = ((const uint4*)(q + ((size_t)row * HEADS + head0 + m) * K_DIM))[part];
    *(uint4*)(q_tile + m * Q_STRIDE + part * 8) = value;
  }
  __syncthreads();
  const int stream = warp % STREAMS, v_first = warp / STREAMS * V_OWN;
  float most[2] = {-1e30f, -1e30f}, total[2] = {0.f, 0.f};
  float out[CHUNKS][8][4], v_extra[CHUNKS][4];
  #pragma unroll
  for (int c = 0; c < CHUNKS; c++)
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      v_extra[c][i] = 0.f;
      #pragma unroll
      for (int j = 0; j < 8; j++) out[c][j][i] = 0.f;
    }
  const unsigned less = pack(-128.f, -128.f);

  for (int pass = begin + stream; pass < end; pass += STREAMS) {
    const size_t head = (size_t)blocks[pass] * KV_HEADS + kv_head;
    // Scores: tile t has the keys 8 * (0 to 7) + t of the block.
    float s[8][4], extra[4] = {};
    #pragma unroll
    for (int t = 0; t < 8; t++)
      #pragma unroll
      for (int i = 0; i < 4; i++) s[t][i] = 0.f;
    #pragma unroll
    for (int d = 0; d < K_DIM; d += 16) {
      const size_t channel = head * K_DIM + d + quad * 4;  // of four that the lane reads
      Words codes[4];
      #pragma unroll
      for (int i = 0; i < 4; i++) codes[i] = read_words<K_BITS>(k_codes + (channel + i) * (2 * K_BITS) + group * (K_BITS / 4));
      const uint2 scales = *(const uint2*)(k_scales + channel), biases = *(const uint2*)(k_biases + channel);
      const float2 s01 = halves(scales.x), s23 = halves(scales.y), b01 = halves(biases.x), b23 = halves(biases.y);
      const uint2 qa = *(const uint2*)(q_tile + group * Q_STRIDE + d + quad * 4);
      const uint2 qb = *(const uint2*)(q_tile + (group + 8) * Q_STRIDE + d + quad * 4);
      const unsigned a0 = times(qa.x, s01), a1 = times(qb.x, s01), a2 = times(qa.y, s23), a3 = times(qb.y, s23);
      product(extra, qa.x, qb.x, qa.y, qb.y, pack(b01.x, b01.y), pack(b23.x, b23.y));
      product(extra, a0, a1, a2, a3, less, less);
#if K_BITS == 8
      const unsigned h0 = sixteenfold(a0), h1 = sixteenfold(a1), h2 = sixteenfold(a2), h3 = sixteenfold(a3);
      product(extra, h0, h1, h2, h3, less, less);
#endif
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const unsigned c0 = codes_of<K_BITS>(codes[0], i, 0), c1 = codes_of<K_BITS>(codes[1], i, 0);
        const unsigned c2 = codes_of<K_BITS>(codes[2], i, 0), c3 = codes_of<K_BITS>(codes[3], i, 0);
        float* x = s[first_of<K_BITS>(i)];
        float* y = s[second_of<K_BITS>(i)];
        product(x, a0, a1, a2, a3, __byte_perm(c0, c1, 0x5410), __byte_perm(c2, c3, 0x5410));
        product(y, a0, a1, a2, a3, __byte_perm(c0, c1, 0x7632), __byte_perm(c2, c3, 0x7632));
#if K_BITS == 8
        const unsigned e0 = codes_of<8>(codes[0], i, 4), e1 = codes_of<8>(codes[1], i, 4);
        const unsigned e2 = codes_of<8>(codes[2], i, 4), e3 = codes_of<8>(codes[3], i, 4);
        product(x, h0, h1, h2, h3, __byte_perm(e0, e1, 0x5410), __byte_perm(e2, e3, 0x5410));
        product(y, h0, h1, h2, h3, __byte_perm(e0, e1, 0x7632), __byte_perm(e2, e3, 0x7632));
#endif
      }
    }
    // Weights of this warp's block.
    float now[2] = {most[0], most[1]};
    #pragma unroll
    for (int t = 0; t < 8; t++)
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = pass * 64 + 8 * (quad * 2 + (i & 1)) + t, h = i >> 1;
        float x = (s[t][i] + extra[i]) * scale;
        if (CAPPED) x = cap * tanhf(x / cap);
        x = key >= low && key < high ? x : -1e30f;
        s[t][i] = x;
        now[h] = fmaxf(now[h], x);
      }
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      now[h] = row_max(now[h]);
      const float kept = exp2f(most[h] - now[h]);
      most[h] = now[h];
      float sum = 0.f;
      #pragma unroll
      for (int t = 0; t < 8; t++)
        #pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; i++) {
          s[t][i] = s[t][i] > -1e29f ? exp2f(s[t][i] - now[h]) : 0.f;
          sum += s[t][i];
        }
      total[h] = total[h] * kept + sum;
      #pragma unroll
      for (int c = 0; c < CHUNKS; c++)
        #pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; i++) {
          v_extra[c][i] *= kept;
          #pragma unroll
          for (int j = 0; j < 8; j++) out[c][j][i] *= kept;
        }
    }
    // Values: of each 64 elements, tile j has the elements 8 * (0 to 7) + j.
    #pragma unroll
    for (int u = 0; u < 4; u++) {
      const size_t token = head * 64 + quad * 16 + 2 * u;  // and 8, 1 and 9 after it
      const unsigned p0 = pack(s[2 * u][0], s[2 * u][1]), p1 = pack(s[2 * u][2], s[2 * u][3]);
      const unsigned p2 = pack(s[2 * u + 1][0], s[2 * u + 1][1]), p3 = pack(s[2 * u + 1][2], s[2 * u + 1][3]);
      #pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        const int element = v_first + c * 64;
        Words codes[4];
        float scales[4], biases[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const size_t at = token + (i & 1) * 8 + (i >> 1);
          codes[i] = read_words<V_BITS>(v_codes + (at * V_DIM + element) / 32 * V_BITS + group * (V_BITS / 4));
          scales[i] = (float)v_scales[at * (V_DIM / V_GROUP) + element / V_GROUP];
          biases[i] = (float)v_biases[at * (V_DIM / V_GROUP) + element / V_GROUP];
        }
        const unsigned a0 = pack(s[2 * u][0] * scales[0], s[2 * u][1] * scales[1]);
        const unsigned a1 = pack(s[2 * u][2] * scales[0], s[2 * u][3] * scales[1]);
        const unsigned a2 = pack(s[2 * u + 1][0] * scales[2], s[2 * u + 1][1] * scales[3]);
        const unsigned a3 = pack(s[2 * u + 1][2] * scales[2], s[2 * u + 1][3] * scales[3]);
        product(v_extra[c], p0, p1, p2, p3, pack(biases[0], biases[1]), pack(biases[2], biases[3]));
        product(v_extra[c], a0, a1, a2, a3, less, less);
#if V_BITS == 8
        const unsigned h0 = sixteenfold(a0), h1 = sixteenfold(a1), h2 = sixteenfold(a2), h3 = sixteenfold(a3);
        product(v_extra[c], h0, h1, h2, h3, less, less);
#endif
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const unsigned c0 = codes_of<V_BITS>(codes[0], i, 0), c1 = codes_of<V_BITS>(codes[1], i, 0);
          const unsigned c2 = codes_of<V_BITS>(codes[2], i, 0), c3 = codes_of<V_BITS>(codes[3], i, 0);
          float* x = out[c][first_of<V_BITS>(i)];
          float* y = out[c][second_of<V_BITS>(i)];
          product(x, a0, a1, a2, a3, __byte_perm(c0, c1, 0x5410), __byte_perm(c2, c3, 0x5410));
          product(y, a0, a1, a2, a3, __byte_perm(c0, c1, 0x7632), __byte_perm(c2, c3, 0x7632));
#if V_BITS == 8
          const unsigned e0 = codes_of<8>(codes[0], i, 4), e1 = codes_of<8>(codes[1], i, 4);
          const unsigned e2 = codes_of<8>(codes[2], i, 4), e3 = codes_of<8>(codes[3], i, 4);
          product(x, h0, h1, h2, h3, __byte_perm(e0, e1, 0x5410), __byte_perm(e2, e3, 0x5410));
          product(y, h0, h1, h2, h3, __byte_perm(e0, e1, 0x7632), __byte_perm(e2, e3, 0x7632));
#endif
        }
      }
    }
  }

  // The warps' streams together, one after the other, in shared memory: [16, V_DIM] and two a row.
  float* joined = (float*)shared;
  float* found = joined + 16 * V_DIM;  // [4, 16, 2]: most and total
  __syncthreads();
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const float sum = row_sum(total[h]);
    if (quad == 0) {
      found[(warp * 16 + group + h * 8) * 2] = most[h];
      found[(warp * 16 + group + h * 8) * 2 + 1] = sum;
    }
  }
  __syncthreads();
  float factor[2], best[2], sums[2];
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    best[h] = -1e30f;
    sums[h] = 0.f;
    #pragma unroll
    for (int w = 0; w < STREAMS; w++) best[h] = fmaxf(best[h], found[(w * 16 + group + h * 8) * 2]);
    #pragma unroll
    for (int w = 0; w < STREAMS; w++) {
      const float* own = found + (w * 16 + group + h * 8) * 2;
      sums[h] += own[1] * exp2f(own[0] - best[h]);
    }
    factor[h] = exp2f(most[h] - best[h]);
  }
  for (int turn = 0; turn < STREAMS; turn++) {
    if (turn == stream) {
      #pragma unroll
      for (int c = 0; c < CHUNKS; c++)
        #pragma unroll
        for (int j = 0; j < 8; j++)
          #pragma unroll
          for (int i = 0; i < 4; i++) {
            const int h = i >> 1;
            float* to = joined + (group + h * 8) * V_DIM + v_first + c * 64 + 8 * (quad * 2 + (i & 1)) + j;
            const float x = (out[c][j][i] + v_extra[c][i]) * factor[h];
            *to = turn == 0 ? x : *to + x;
          }
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < PART * V_DIM; i += 128) {
    const size_t at = ((size_t)row * HEADS + head0 + i / V_DIM) * splits + split;
    partial[at * V_DIM + i % V_DIM] = joined[i];
  }
  if (warp == 0 && quad == 0)
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int m = group + h * 8;
      if (m >= PART) continue;
      const size_t at = ((size_t)row * HEADS + head0 + m) * splits + split;
      stats[at * 2] = best[h];
      stats[at * 2 + 1] = sums[h];
    }
