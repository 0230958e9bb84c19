  // Single rows over codes of single tokens: affine codes, or numbers of a codebook's levels.
  // q [T, HEADS, K_DIM] in the keys' coordinates as coded
  // keys: codes [blocks * KV_HEADS, BLOCK, K_DIM], a scale and a bias for each K_GROUP of a token's, or
  // with a CODEBOOK a scale for each token and the levels; values likewise
  // tiles [n, 6]: row, 1 or with no row 0, lowest key, key past the highest, place of block 0 in `table`, -
  // numbers: [0] scale * log2(e), [1] softcap * log2(e)
  // partial [T, HEADS, splits, V_DIM], stats [T, HEADS, splits, 2]: largest score, sum of weights. What
  // comes out is in the values' coordinates as coded; `portable_merge` joins it.
  //
  // A thread block has four warps. SHARE of them take 64 keys together, each its part of the vectors'
  // elements: they add up scores through shared memory. The others take other keys; at the end all are
  // joined. A warp fetches its codes by itself: keys while it adds up values, values while it scores.
  //
  // Codes are the rows of a product, query heads its columns, both in float16. Affine codes become numbers
  // there. Levels are small whole numbers, exact there; a token's scale multiplies its score, or its weight.
  constexpr int SHARE = V_DIM > 128 ? V_DIM / 128 : 1, STREAMS = 4 / SHARE;
  constexpr int K_OWN = K_DIM / SHARE, V_OWN = V_DIM / SHARE;
  constexpr int COLUMNS = (PART + 7) / 8;                                    // times eight query heads
  constexpr int K_ROW = K_OWN * K_BITS / 8, V_ROW = V_OWN * V_BITS / 8;       // bytes of a token's codes
  // Strides by which the lanes of a load meet in few banks.
  constexpr int K_STRIDE = K_ROW + (K_BITS == 8 ? 16 : 0), V_STRIDE = V_ROW + (V_ROW % 16 ? 8 : 16);
  constexpr int K_RUN = K_ROW / 4, V_RUN = V_ROW / 8;                         // bytes that a lane reads at a time
  constexpr int K_SCALES = CODEBOOK ? 1 : K_OWN / K_GROUP, V_SCALES = CODEBOOK ? 1 : V_OWN / V_GROUP;
  constexpr int K_SCALES_AT = 64 * K_STRIDE, V_AT = K_SCALES_AT + (CODEBOOK ? 128 : 256) * K_SCALES;
  constexpr int V_SCALES_AT = V_AT + 64 * V_STRIDE, ALL = V_SCALES_AT + (CODEBOOK ? 128 : 256) * V_SCALES;
  constexpr int SUMS = 32 * COLUMNS * V_OWN, WARP = ALL > SUMS ? ALL : SUMS;  // bytes
  extern __shared__ __align__(16) unsigned char shared[];
  float* met = (float*)(shared + 4 * WARP);           // [2, 4, 4 * COLUMNS, 32, 4] scores, where shared
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, group = lane >> 2;
  const int stream = warp % STREAMS, share = warp / STREAMS;
  unsigned char* keys_here = shared + warp * WARP;
  unsigned char* values_here = keys_here + V_AT;
  const __half* k_scales_here = (const __half*)(keys_here + K_SCALES_AT);
  const __half* v_scales_here = (const __half*)(keys_here + V_SCALES_AT);

  const int* tile = tiles + blockIdx.x * 6;
  const int row = tile[0], low = tile[2], high = tile[3];
  const int* blocks = table + tile[4];
  const int kv_head = blockIdx.y / PARTS, head0 = kv_head * GROUP + blockIdx.y % PARTS * PART;
  const int first_pass = low / 64, passes = max((high + 63) / 64 - first_pass, 0);
  const int each = (max((passes + splits - 1) / splits, 2) + STREAMS - 1) / STREAMS * STREAMS;
  const int begin = first_pass + split * each, end = min(first_pass + passes, begin + each);
#if CODEBOOK
  const Levels k_levels = levels_of<K_BITS>(key_levels), v_levels = levels_of<V_BITS>(value_levels);
#endif
  if (ends_without_keys(begin >= end, stats, (size_t)row * HEADS + head0, tile[1] * PART, split, splits)) return;

  // The first of 64 tokens, among those of all blocks and heads.
  const auto token0 = [&](int pass) {
    return ((size_t)blocks[pass * 64 / BLOCK] * KV_HEADS + kv_head) * BLOCK + pass * 64 % BLOCK;
  };
  const auto fetch_scales = [&](unsigned char* to, const __half* from, size_t token, int own, int all) {
    if (SHARE == 1 || CODEBOOK) {  // they lie together
      for (int n = lane; n < 8 * own; n += 32) copy_ahead(to + n * 16, (const unsigned char*)(from + token * own) + n * 16);
    } else {
      #pragma unroll
      for (int n = lane; n < 64; n += 32)
        copy_few_ahead(to + n * own * 2, from + (token + n) * all + share * own, own * 2);
    }
  };
  const auto fetch_keys = [&](size_t token) {
    copy_rows<K_ROW, K_ROW * SHARE, K_STRIDE>(keys_here, (const unsigned char*)keys + token * (K_ROW * SHARE) + share * K_ROW, lane);
    fetch_scales((unsigned char*)k_scales_here, key_scales, token, K_SCALES, K_SCALES * SHARE);
#if !CODEBOOK
    fetch_scales((unsigned char*)(k_scales_here + 64 * K_SCALES), key_biases, token, K_SCALES, K_SCALES * SHARE);
#endif
  };
  const auto fetch_values = [&](size_t token) {
    copy_rows<V_ROW, V_ROW * SHARE, V_STRIDE>(values_here, (const unsigned char*)values + token * (V_ROW * SHARE) + share * V_ROW, lane);
    fetch_scales((unsigned char*)v_scales_here, value_scales, token, V_SCALES, V_SCALES * SHARE);
#if !CODEBOOK
    fetch_scales((unsigned char*)(v_scales_here + 64 * V_SCALES), value_biases, token, V_SCALES, V_SCALES * SHARE);
#endif
  };
  size_t following = 0;  // the tokens after these
  if (begin + stream < end) {
    const size_t token = token0(begin + stream);
    if (begin + stream + STREAMS < end) following = token0(begin + stream + STREAMS);
    fetch_keys(token);
    end_turn();
    fetch_values(token);
    end_turn();
  }

  // Queries as a product's columns: a lane has a run of neighbouring elements of a head's. A power of two
  // for each head keeps them within the range of float16.
  constexpr int PAIRS = K_OWN / 8;  // of a run
  unsigned queries[COLUMNS][PAIRS];
  float factor[COLUMNS][2];  // of columns 2 * quad and the next, back to scores
  #pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    const int m = c * 8 + group;
    const Q* from = q + ((size_t)row * HEADS + head0 + m) * K_DIM + share * K_OWN + quad * 2 * PAIRS;
    constexpr int EACH = 16 / sizeof(Q);
    float own[2 * PAIRS], largest = 0.f;
    #pragma unroll
    for (int begin = 0; begin < 2 * PAIRS; begin += EACH) {
      const uint4 few = m < PART ? *(const uint4*)(from + begin) : make_uint4(0, 0, 0, 0);
      #pragma unroll
      for (int n = 0; n < EACH; n++) {
        own[begin + n] = (float)((const Q*)&few)[n];
        largest = fmaxf(largest, fabsf(own[begin + n]));
      }
    }
    largest = row_max(largest);
    const unsigned exponent = min(max(__float_as_uint(largest) & 0x7F800000u, 0x01000000u), 0x7D000000u);
    const float smaller = __uint_as_float(0x7E800000u - exponent);
    #pragma unroll
    for (int p = 0; p < PAIRS; p++)
      queries[c][p] = pack16(own[first_code<K_BITS>(p)] * smaller, own[second_code<K_BITS>(p)] * smaller);
    const float larger = __uint_as_float(exponent) * 2.f * numbers[0] * (CODEBOOK ? 0x1p24f : 1.f);
    factor[c][0] = __shfl_sync(0xffffffffu, larger, quad * 8);
    factor[c][1] = __shfl_sync(0xffffffffu, larger, quad * 8 + 4);
  }
  const float cap = numbers[1];

  float most[COLUMNS][2], total[COLUMNS][2], out[COLUMNS][V_OWN / 16][4];
  int longest = 0;  // with a CODEBOOK: the largest exponent of a value's scale, by which weights are divided
  #pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      most[c][h] = -1e30f;
      total[c][h] = 0.f;
    }
    #pragma unroll
    for (int e = 0; e < V_OWN / 16; e++)
      #pragma unroll
      for (int i = 0; i < 4; i++) out[c][e][i] = 0.f;
  }

  for (int pass = begin + stream; pass < end; pass += STREAMS) {
    const size_t next = following;
    if (pass + 2 * STREAMS < end) following = token0(pass + 2 * STREAMS);

    // Scores: tile t has the tokens 16 * t and so on, a lane those of rows `group` and `group + 8`.
    float s[COLUMNS][4][4];
    await_turn();
    #pragma unroll
    for (int t = 0; t < 4; t++) {
      #pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        #pragma unroll
        for (int i = 0; i < 4; i++) s[c][t][i] = 0.f;
      unsigned run[2][(K_RUN + 3) / 4];
#if CODEBOOK
      float scale[2];
#else
      unsigned scale[2], bias[2];
#endif
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        const int token = t * 16 + h * 8 + group;
        read_run<K_RUN>(keys_here + token * K_STRIDE + quad * K_RUN, run[h]);
#if CODEBOOK
        scale[h] = __half2float(k_scales_here[token]);
#else
        const __half* own = k_scales_here + token * K_SCALES + quad * (K_OWN / 4) / K_GROUP;
        scale[h] = side_by_side(own, own);
        bias[h] = side_by_side(own + 64 * K_SCALES, own + 64 * K_SCALES);
#endif
      }
      #pragma unroll
      for (int begin = 0; begin < PAIRS; begin += 4) {
        unsigned a[2][4];
        #pragma unroll
        for (int h = 0; h < 2; h++) {
#if CODEBOOK
          level_pairs(fields<K_BITS>(run[h], begin / 4), k_levels, a[h]);
#else
          #pragma unroll
          for (int n = 0; n < 4; n++)
            a[h][n] = affine16(neighbours<K_BITS>(run[h], begin + n), K_BITS == 4 && n % 2, scale[h], bias[h]);
#endif
        }
        #pragma unroll
        for (int n = 0; n < 4; n += 2)
          #pragma unroll
          for (int c = 0; c < COLUMNS; c++)
            product16(s[c][t], a[0][n], a[1][n], a[0][n + 1], a[1][n + 1], queries[c][begin + n], queries[c][begin + n + 1]);
      }
      #pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          s[c][t][i] *= factor[c][i & 1];
#if CODEBOOK
          s[c][t][i] *= scale[i >> 1];
#endif
        }
    }
    __syncwarp();
    if (pass + STREAMS < end) fetch_keys(next);
    end_turn();

    if (SHARE > 1)
      add_shares<SHARE, STREAMS, 4 * COLUMNS>(s[0][0], (float4*)met + (pass - begin) / STREAMS % 2 * (4 * 4 * COLUMNS * 32), warp, stream, lane);

    // Weights: times 256, what is left of small ones in float16 suffices. Values come after them.
    const bool all = pass * 64 >= low && pass * 64 + 64 <= high;
    unsigned weights[COLUMNS][4][2];
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      if (CAPPED || !all)
        #pragma unroll
        for (int t = 0; t < 4; t++)
          #pragma unroll
          for (int i = 0; i < 4; i++) {
            const int key = pass * 64 + t * 16 + group + (i < 2 ? 0 : 8);
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
        for (int h = 0; h < 2; h++) total[c][h] *= kept[h];
        #pragma unroll
        for (int e = 0; e < V_OWN / 16; e++)
          #pragma unroll
          for (int i = 0; i < 4; i++) out[c][e][i] *= kept[i & 1];
      }
      #pragma unroll
      for (int t = 0; t < 4; t++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          s[c][t][i] = power(s[c][t][i] - most[c][i & 1]);
          total[c][i & 1] += s[c][t][i];
        }
    }

    await_turn();
#if CODEBOOK
    // Scales count in a power of two that none of those seen so far reaches: of exponent e, 2^(e - 14).
    const unsigned two = ((const unsigned*)v_scales_here)[lane];
    const int key0 = pass * 64 + 2 * lane, before = longest;
    const int first = key0 >= low && key0 < high ? (two & 0xFFFFu) >> 10 : 0;
    const int second = key0 + 1 >= low && key0 + 1 < high ? two >> 26 : 0;
    longest = max(longest, __reduce_max_sync(0xffffffffu, max(first, second)));
    if (longest != before) {
      const float smaller = __uint_as_float((127 + before - longest) << 23);
      #pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        #pragma unroll
        for (int e = 0; e < V_OWN / 16; e++)
          #pragma unroll
          for (int i = 0; i < 4; i++) out[c][e][i] *= smaller;
    }
    const float unit = __uint_as_float((141 - longest) << 23);
#endif
    #pragma unroll
    for (int t = 0; t < 4; t++) {
#if CODEBOOK
      const float scale[2] = {__half2float(v_scales_here[t * 16 + group]) * unit,
                              __half2float(v_scales_here[t * 16 + 8 + group]) * unit};
#endif
      #pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        #pragma unroll
        for (int h = 0; h < 2; h++)
#if CODEBOOK
          weights[c][t][h] = transposed(pack16(s[c][t][2 * h] * scale[h], s[c][t][2 * h + 1] * scale[h]));
#else
          weights[c][t][h] = transposed(pack16(s[c][t][2 * h], s[c][t][2 * h + 1]));
#endif
      // A lane has a run of neighbouring elements of four tokens; tile e has the elements
      // code_at(2 * e) of each run, then those of code_at(2 * e + 1).
      unsigned run[4][(V_RUN + 3) / 4];
#if !CODEBOOK
      unsigned scale[2], bias[2];
#endif
      #pragma unroll
      for (int n = 0; n < 4; n++) {
        const int token = t * 16 + n / 2 * 8 + quad * 2 + n % 2;
        read_run<V_RUN>(values_here + token * V_STRIDE + group * V_RUN, run[n]);
#if !CODEBOOK
        if (n % 2) continue;
        const __half* own = v_scales_here + token * V_SCALES + group * (V_OWN / 8) / V_GROUP;
        scale[n / 2] = side_by_side(own, own + V_SCALES);
        bias[n / 2] = side_by_side(own + 64 * V_SCALES, own + 65 * V_SCALES);
#endif
      }
      #pragma unroll
      for (int e = 0; e < V_OWN / 16; e += 2) {
        unsigned a[2][4];
        #pragma unroll
        for (int h = 0; h < 2; h++) {
          const unsigned *even = run[2 * h], *odd = run[2 * h + 1];
#if CODEBOOK
          level_pairs(fields_across<V_BITS>(even, odd, e / 2), v_levels, a[h]);
#else
          #pragma unroll
          for (int n = 0; n < 4; n++)
            a[h][n] = affine16(across<V_BITS>(even, odd, 2 * e + n), V_BITS == 4 && n % 2, scale[h], bias[h]);
#endif
        }
        #pragma unroll
        for (int n = 0; n < 2; n++)
          #pragma unroll
          for (int c = 0; c < COLUMNS; c++)
            product16(out[c][e + n], a[0][2 * n], a[0][2 * n + 1], a[1][2 * n], a[1][2 * n + 1], weights[c][t][0], weights[c][t][1]);
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
  const float back = CODEBOOK ? __uint_as_float((longest - 14 + 24 + 127) << 23) : 1.f;
  __syncthreads();
  #pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    store_totals(found + (warp * ROWS + c * 8) * 2, most[c], total[c], quad, group);
    #pragma unroll
    for (int e = 0; e < V_OWN / 16; e++)
      #pragma unroll
      for (int i = 0; i < 4; i++)
        own_sums[(c * 8 + quad * 2 + (i & 1)) * V_OWN + group * (V_OWN / 8) + code_at<V_BITS, 4>(2 * e + (i >> 1))] = out[c][e][i] * back;
  }
  __syncthreads();
  store_split<STREAMS, ROWS, V_OWN, WARP>(found, shared, (size_t)row * HEADS + head0, split, splits, partial, stats);
