  // One row of a sequence over full blocks of 64 tokens in page codes.
  // key codes [blocks * KV_HEADS, K_DIM, 64], a scale and a bias for each channel; value codes
  // [blocks * KV_HEADS, 64, V_DIM], a scale and a bias for each token's V_GROUP elements.
  // What comes out is in the values' rotated coordinates, to be turned back by `join`.
  //
  // A thread block has four warps. SHARE of them take a block of keys together, each its part of the
  // channels, then of the values' elements: they add up scores through shared memory. The others take
  // other blocks; at the end all are joined. A warp fetches its codes by itself: keys while it adds
  // up values, values while it scores keys.
  //
  // Codes are the rows of a product, query heads its columns. The queries carry the scales of the
  // channels, the weights those of the tokens, so that codes go in as 1024 + n. What 1024 and the
  // biases add is found apart.
  constexpr int SHARE = V_DIM > 128 ? V_DIM / 128 : 1, STREAMS = 4 / SHARE;
  constexpr int K_OWN = K_DIM / SHARE, V_OWN = V_DIM / SHARE;
  constexpr int COLUMNS = (PART + 7) / 8;             // times eight query heads
  constexpr int K_ROW = 8 * K_BITS;                   // bytes of a channel's codes
  constexpr int V_ROW = V_OWN * V_BITS / 8;           // bytes of a token's codes that a warp reads
  constexpr int V_GROUPS = V_DIM / V_GROUP, OWN_GROUPS = V_OWN / V_GROUP, RUNS = V_OWN / 64;
  constexpr int V_AT = K_OWN * (K_ROW + 4), CODES = V_AT + 64 * (V_ROW + 4 * V_GROUPS);
  constexpr int SUMS = 8 * COLUMNS * V_OWN * 4, WARP = CODES > SUMS ? CODES : SUMS;  // bytes of a warp
  constexpr unsigned ONES = 0x3C003C00u;
  extern __shared__ __align__(16) unsigned char shared[];
  float* met = (float*)(shared + 4 * WARP);           // [2, 4, 4 * COLUMNS, 32, 4] scores, where shared
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, group = lane >> 2;
  const int stream = warp % STREAMS, share = warp / STREAMS;
  unsigned char* k_codes_here = shared + warp * WARP;
  unsigned char* v_codes_here = k_codes_here + V_AT;
  const __half* k_scales_here = (const __half*)(k_codes_here + K_OWN * K_ROW);
  const __half* v_scales_here = (const __half*)(v_codes_here + 64 * V_ROW);
  const __half* v_scales_of = v_scales_here + share * OWN_GROUPS;

  const int* tile = tiles + blockIdx.x * 6;
  const int row = tile[0], low = tile[2], high = tile[3];
  const int* blocks = table + tile[4];
  const int kv_head = blockIdx.y / PARTS, head0 = kv_head * GROUP + blockIdx.y % PARTS * PART;
  const int first_pass = low / 64, passes = max((high + 63) / 64 - first_pass, 0);
  const int each = (max((passes + splits - 1) / splits, 2) + STREAMS - 1) / STREAMS * STREAMS;
  const int begin = first_pass + split * each, end = min(first_pass + passes, begin + each);

  const auto fetch_keys = [&](int block) {
    const size_t head = (size_t)block * KV_HEADS + kv_head, channel0 = head * K_DIM + share * K_OWN;
    const unsigned char* from = (const unsigned char*)k_codes + channel0 * K_ROW;
    constexpr int EACH = chunk_of<K_ROW>(), CHUNKS = K_ROW / EACH, ALL = K_OWN * CHUNKS;
    #pragma unroll
    for (int i = 0; i < (ALL + 31) / 32; i++) {
      const int n = i * 32 + lane, at = n / CHUNKS, chunk = n % CHUNKS;
      const int channel = (at & ~15) | (at & 3) << 2 | (at >> 2 & 3);
      if (ALL % 32 == 0 || n < ALL) copy_chunk<K_ROW>(k_codes_here, at, chunk, from + channel * K_ROW + chunk * EACH);
    }
    #pragma unroll
    for (int n = lane; n < K_OWN / 4; n += 32) {
      const bool scale = n < K_OWN / 8;
      const __half* own = (scale ? k_scales : k_biases) + channel0 + (scale ? n : n - K_OWN / 8) * 8;
      copy_ahead((unsigned char*)k_scales_here + n * 16, own);
    }
  };
  const auto fetch_values = [&](int block) {
    const size_t token0 = ((size_t)block * KV_HEADS + kv_head) * 64;
    const unsigned char* from = (const unsigned char*)v_codes + token0 * (V_DIM * V_BITS / 8) + share * V_ROW;
    constexpr int EACH = chunk_of<V_ROW>(), CHUNKS = V_ROW / EACH;
    #pragma unroll
    for (int i = 0; i < 64 * CHUNKS / 32; i++) {
      const int n = i * 32 + lane, at = n / CHUNKS, chunk = n % CHUNKS;
      const int token = (at & 3) << 4 | (at >> 2 & 1) << 3 | at >> 3;
      copy_chunk<V_ROW>(v_codes_here, at, chunk, from + token * (V_DIM * V_BITS / 8) + chunk * EACH);
    }
    #pragma unroll
    for (int n = lane; n < 16 * V_GROUPS; n += 32) {
      const bool scale = n < 8 * V_GROUPS;
      const int eight = scale ? n : n - 8 * V_GROUPS;
      const __half* own = (scale ? v_scales : v_biases) + token0 * V_GROUPS + eight * 8;
      copy_ahead((unsigned char*)v_scales_here + (n - eight + place_of_eight<V_GROUPS>(eight)) * 16, own);
    }
  };
  int following = 0;  // the block after this one
  if (begin + stream < end) {
    const int block = blocks[begin + stream];
    if (begin + stream + STREAMS < end) following = blocks[begin + stream + STREAMS];
    fetch_keys(block);
    end_turn();
    fetch_values(block);
    end_turn();
  }
  if (ends_without_keys(begin >= end, stats, (size_t)row * HEADS + head0, tile[1] * PART, split, splits)) return;

  // Queries as a product's columns. A power of two for each head keeps them within float16.
  unsigned queries[COLUMNS][K_OWN / 16][2];
  float factor[COLUMNS][2];  // of columns 2 * quad and the next, back to scores
  #pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    const int m = c * 8 + group;
    uint2 own[K_OWN / 16];
    float largest = 0.f;
    #pragma unroll
    for (int k = 0; k < K_OWN / 16; k++) {
      own[k] = make_uint2(0, 0);
      if (m < PART) own[k] = *(const uint2*)(q + ((size_t)row * HEADS + head0 + m) * K_DIM + share * K_OWN + k * 16 + quad * 4);
      const T* four = (const T*)&own[k];
      #pragma unroll
      for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf((float)four[i]));
    }
    largest = row_max(largest);
    const unsigned exponent = min(max(__float_as_uint(largest) & 0x7F800000u, 0x01000000u), 0x7D000000u);
    const float smaller = __uint_as_float(0x7E800000u - exponent);
    #pragma unroll
    for (int k = 0; k < K_OWN / 16; k++) {
      const T* four = (const T*)&own[k];
      queries[c][k][0] = pack16((float)four[0] * smaller, (float)four[1] * smaller);
      queries[c][k][1] = pack16((float)four[2] * smaller, (float)four[3] * smaller);
    }
    const float larger = __uint_as_float(exponent) * 2.f * numbers[0];
    factor[c][0] = __shfl_sync(0xffffffffu, larger, quad * 8);
    factor[c][1] = __shfl_sync(0xffffffffu, larger, quad * 8 + 4);
  }
  const float cap = numbers[1];

  float most[COLUMNS][2], total[COLUMNS][2], out[COLUMNS][RUNS][4][4];
  float v_ones[COLUMNS][OWN_GROUPS][4], v_bias[COLUMNS][OWN_GROUPS][2];
  #pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      #pragma unroll
      for (int e = 0; e < RUNS * 4; e++) out[c][e / 4][e % 4][i] = 0.f;
      #pragma unroll
      for (int g = 0; g < OWN_GROUPS; g++) v_ones[c][g][i] = 0.f;
    }
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      most[c][h] = -1e30f;
      total[c][h] = 0.f;
      #pragma unroll
      for (int g = 0; g < OWN_GROUPS; g++) v_bias[c][g][h] = 0.f;
    }
  }

  for (int pass = begin + stream; pass < end; pass += STREAMS) {
    const int next = following;
    if (pass + 2 * STREAMS < end) following = blocks[pass + 2 * STREAMS];

    // Scores: tile t has the keys first_of(t) of each eight, then the second ones.
    float s[COLUMNS][4][4], k_ones[COLUMNS][4], k_bias[COLUMNS][4];
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++)
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        k_ones[c][i] = k_bias[c][i] = 0.f;
        #pragma unroll
        for (int t = 0; t < 4; t++) s[c][t][i] = 0.f;
      }
    await_turn();
    #pragma unroll
    for (int k = 0; k < K_OWN / 16; k++) {
      const uint2 scales = *(const uint2*)(k_scales_here + k * 16 + quad * 4);
      const uint2 biases = *(const uint2*)(k_scales_here + K_OWN + k * 16 + quad * 4);
      unsigned x[8], y[8];
      pairs<K_BITS>(words_at<K_ROW, K_BITS>(k_codes_here, k * 16 + quad, group),
                    words_at<K_ROW, K_BITS>(k_codes_here, k * 16 + 4 + quad, group), x);
      pairs<K_BITS>(words_at<K_ROW, K_BITS>(k_codes_here, k * 16 + 8 + quad, group),
                    words_at<K_ROW, K_BITS>(k_codes_here, k * 16 + 12 + quad, group), y);
      #pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        const unsigned q0 = queries[c][k][0], q1 = queries[c][k][1];
        const unsigned b0 = times16(q0, scales.x), b1 = times16(q1, scales.y);
        product16(k_bias[c], biases.x, biases.x, biases.y, biases.y, q0, q1);
        product16(k_ones[c], ONES, ONES, ONES, ONES, b0, b1);
        #pragma unroll
        for (int t = 0; t < 4; t++)
          product16(s[c][t], x[first_of(t)], x[second_of(t)], y[first_of(t)], y[second_of(t)], b0, b1);
      }
    }
    __syncwarp();
    if (pass + STREAMS < end) fetch_keys(next);
    end_turn();

    #pragma unroll
    for (int c = 0; c < COLUMNS; c++)
      #pragma unroll
      for (int t = 0; t < 4; t++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const float x = (s[c][t][i] - 1024.f * k_ones[c][i]) * weight_of<K_BITS>(t) + k_bias[c][i];
          s[c][t][i] = x * factor[c][i & 1];
        }
    if (SHARE > 1)
      add_shares<SHARE, STREAMS, 4 * COLUMNS>(s[0][0], (float4*)met + (pass - begin) / STREAMS % 2 * (4 * 4 * COLUMNS * 32), warp, stream, lane);

    // Weights, times 256: what is left of small ones in float16 suffices.
    const bool all = pass * 64 >= low && pass * 64 + 64 <= high;
    unsigned weights[COLUMNS][8];
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      if (CAPPED || !all)
        #pragma unroll
        for (int t = 0; t < 4; t++)
          #pragma unroll
          for (int i = 0; i < 4; i++) {
            const int key = pass * 64 + 8 * group + (i < 2 ? first_of(t) : second_of(t));
            float x = s[c][t][i];
            if (CAPPED) x = cap * tanhf(x / cap);
            s[c][t][i] = key >= low && key < high ? x : -1e30f;
          }
      bool moved = false;
      float kept[2];
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        float now = fmaxf(s[c][0][h], s[c][0][h + 2]);
        #pragma unroll
        for (int t = 1; t < 4; t++) now = fmaxf(now, fmaxf(s[c][t][h], s[c][t][h + 2]));
        now = fmaxf(column_max(now) - 8.f, most[c][h]);
        moved = moved || now > most[c][h];
        kept[h] = power(most[c][h] - now);
        most[c][h] = now;
      }
      if (__any_sync(0xffffffffu, moved)) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          #pragma unroll
          for (int e = 0; e < RUNS * 4; e++) out[c][e / 4][e % 4][i] *= kept[i & 1];
          #pragma unroll
          for (int g = 0; g < OWN_GROUPS; g++) v_ones[c][g][i] *= kept[i & 1];
        }
        #pragma unroll
        for (int h = 0; h < 2; h++) {
          total[c][h] *= kept[h];
          #pragma unroll
          for (int g = 0; g < OWN_GROUPS; g++) v_bias[c][g][h] *= kept[h];
        }
      }
      #pragma unroll
      for (int t = 0; t < 4; t++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          s[c][t][i] = power(s[c][t][i] - most[c][i & 1]);
          total[c][i & 1] += s[c][t][i];
        }
        weights[c][first_of(t)] = pack16(s[c][t][0], s[c][t][1]);
        weights[c][second_of(t)] = pack16(s[c][t][2], s[c][t][3]);
      }
    }

    // Values: of each 64 elements, tile t has the elements first_of(t) of each eight, then the second ones.
    await_turn();
    unsigned columns[COLUMNS][OWN_GROUPS][8];
    #pragma unroll
    for (int j = 0; j < 8; j++)
      #pragma unroll
      for (int g = 0; g < OWN_GROUPS; g++) {
        const __half* at = v_scales_of + place_of_eight<V_GROUPS>((group * 8 + j) * V_GROUPS / 8) * 8 + j * V_GROUPS % 8 + g;
        const __half2 scale = __half2half2(*at);
        const float bias = __half2float(at[64 * V_GROUPS]);
        const int t = (j >> 2) + 2 * (j & 1), i = j & 2;  // where this token's weights are
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          columns[c][g][j] = transposed(times16(weights[c][j], *(const unsigned*)&scale));
          v_bias[c][g][0] += s[c][t][i] * bias;
          v_bias[c][g][1] += s[c][t][i + 1] * bias;
        }
      }
    #pragma unroll
    for (int u = 0; u < 4; u++) {
      #pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        #pragma unroll
        for (int g = 0; g < OWN_GROUPS; g++)
          product16(v_ones[c][g], ONES, ONES, ONES, ONES, columns[c][g][first_of(u)], columns[c][g][second_of(u)]);
      #pragma unroll
      for (int e = 0; e < RUNS; e++) {
        unsigned x[8], y[8];
        const int at0 = first_of(u) * 8 + quad, at1 = second_of(u) * 8 + quad, run = e * 8 + group;
        pairs<V_BITS>(words_at<V_ROW, V_BITS>(v_codes_here, at0, run),
                      words_at<V_ROW, V_BITS>(v_codes_here, at0 + 4, run), x);
        pairs<V_BITS>(words_at<V_ROW, V_BITS>(v_codes_here, at1, run),
                      words_at<V_ROW, V_BITS>(v_codes_here, at1 + 4, run), y);
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          #pragma unroll
          for (int t = 0; t < 4; t++) {
            const unsigned* column = columns[c][e * 64 / V_GROUP];
            product16(out[c][e][t], x[first_of(t)], x[second_of(t)], y[first_of(t)], y[second_of(t)],
                      column[first_of(u)], column[second_of(u)]);
          }
      }
    }
    __syncwarp();
    if (pass + STREAMS < end) fetch_values(next);
    end_turn();
  }

  // The warps' streams together, through shared memory: of each warp [8 * COLUMNS, V_OWN].
  constexpr int ROWS = 8 * COLUMNS;
  float* own_sums = (float*)(shared + warp * WARP);
  float* found = (float*)(shared + 4 * WARP);  // [4, ROWS, 2]: most and total
  __syncthreads();
  #pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    store_totals(found + (warp * ROWS + c * 8) * 2, most[c], total[c], quad, group);
    #pragma unroll
    for (int h = 0; h < 2; h++)
      #pragma unroll
      for (int g = 0; g < OWN_GROUPS; g++) v_bias[c][g][h] = column_sum(v_bias[c][g][h]);
    #pragma unroll
    for (int e = 0; e < RUNS; e++)
      #pragma unroll
      for (int t = 0; t < 4; t++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const int g = e * 64 / V_GROUP, d = e * 64 + group * 8 + (i < 2 ? first_of(t) : second_of(t));
          own_sums[(c * 8 + quad * 2 + (i & 1)) * V_OWN + d] =
              (out[c][e][t][i] - 1024.f * v_ones[c][g][i]) * weight_of<V_BITS>(t) + v_bias[c][g][i & 1];
        }
  }
  __syncthreads();
  store_split<STREAMS, ROWS, V_OWN, WARP>(found, shared, (size_t)row * HEADS + head0, split, splits, partial, stats);
