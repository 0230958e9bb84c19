  // q [T, HEADS, K_DIM], keys [blocks * KV_HEADS, BLOCK, K_DIM], values [..., V_DIM],
  // tiles [n, 6]: first row, rows, lowest key, key past the highest, place of block 0 in `table`, unused
  // visible [T, 2]: first and last key, numbers: [0] scale * log2(e), [1] softcap * log2(e)
  constexpr int QUERIES = TILES * 16;
  // Keys are multiplied 32 elements at a time, and each lane adds up a power of two of a value's: behind
  // shorter vectors (of 80 or 96) stand zeros.
  constexpr int K_PARTS = (K_DIM + 31) / 32, V_PADDED = V_DIM <= 64 ? 64 : V_DIM <= 128 ? 128 : V_DIM;
  constexpr int Q_STRIDE = K_PARTS * 32 + 8, P_STRIDE = 64 + 8;
#ifndef V_STRIDE
#define V_STRIDE V_DIM
#endif
  constexpr int E = V_PADDED / 32;  // neighbouring elements of a value that a lane adds up
  extern __shared__ __align__(16) unsigned char shared[];
  T* q_tile = (T*)shared;                                   // [QUERIES, Q_STRIDE]
  T* weights = q_tile + QUERIES * Q_STRIDE;                 // [2, QUERIES, P_STRIDE]
  float* maxima = (float*)(weights + 2 * QUERIES * P_STRIDE);  // [2, 4, QUERIES]
  float* totals = maxima + 8 * QUERIES;                     // [4, QUERIES]

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, group = lane >> 2;
  const int* tile = tiles + blockIdx.x * 6;
  const int row0 = tile[0], rows = tile[1], low = tile[2], high = tile[3];
  const int* blocks = table + tile[4];
  const int kv_head = blockIdx.y / PARTS, head0 = kv_head * GROUP + blockIdx.y % PARTS * PART;
  const int vectors = rows * PART;
  const float scale = numbers[0], cap = numbers[1];

  // Of this split: keys [begin, end), in whole passes of 64.
  const int first_pass = low / 64, passes = (high + 63) / 64 - first_pass;
#ifndef LEAST_PASSES
#define LEAST_PASSES 2
#endif
  const int each = max((passes + splits - 1) / splits, LEAST_PASSES);
  const int begin = first_pass + split * each, end = min(first_pass + passes, begin + each);
#ifdef READY
  READY;
#endif
#if SPLIT
  if (begin >= end) {  // too few keys for so many: `combine` takes nothing from here
    for (int m = threadIdx.x; m < vectors; m += 128) {
      const size_t at = ((size_t)(row0 + m / PART) * HEADS + head0 + m % PART) * splits + split;
      stats[at * 2] = -1e30f;
      stats[at * 2 + 1] = 0.f;
    }
    return;
  }
#endif

  for (int i = threadIdx.x; i < QUERIES * (K_PARTS * 4); i += 128) {
    const int m = i / (K_PARTS * 4), part = i % (K_PARTS * 4);
    uint4 value = make_uint4(0, 0, 0, 0);
    if (m < vectors && part < K_DIM / 8)
      value = ((const uint4*)(q + ((size_t)(row0 + m / PART) * HEADS + head0 + m % PART) * K_DIM))[part];
    *(uint4*)(q_tile + m * Q_STRIDE + part * 8) = value;
  }
  int first[TILES][2], last[TILES][2];
  float most[TILES][2], total[TILES][2], out[TILES][E][4];
  #pragma unroll
  for (int t = 0; t < TILES; t++) {
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int m = t * 16 + group + h * 8, row = row0 + m / PART;
      first[t][h] = m < vectors ? visible[2 * row] : 0;
      last[t][h] = m < vectors ? visible[2 * row + 1] : -1;
      most[t][h] = -1e30f;
      total[t][h] = 0.f;
    }
    #pragma unroll
    for (int e = 0; e < E; e++)
      for (int i = 0; i < 4; i++) out[t][e][i] = 0.f;
  }
  __syncthreads();

  const T* k_row[2];
  const auto key_part = [&](const T* row, int d) {
    return K_DIM % 32 == 0 || d * 32 + quad * 8 < K_DIM ? *(const uint4*)(row + d * 32) : make_uint4(0, 0, 0, 0);
  };
  // Whether the value's elements that this lane adds up are inside it.
  const bool inside = V_PADDED == V_DIM || warp * (V_PADDED / 4) + group * E < V_DIM;
#if AHEAD
  uint4 k_next[2][K_PARTS];  // keys of the pass to come
  uint4 v_now[2][8][E / 8 ? E / 8 : 1];
#endif
  const auto load_keys = [&](int pass) {
    #pragma unroll
    for (int n = 0; n < 2; n++) {
      const int key = max(min(pass * 64 + warp * 16 + n * 8 + group, high - 1), low);
      const size_t block = blocks[key / BLOCK];
      k_row[n] = keys + ((block * KV_HEADS + kv_head) * BLOCK + key % BLOCK) * K_DIM + quad * 8;
#if AHEAD
      #pragma unroll
      for (int d = 0; d < K_PARTS; d++) k_next[n][d] = key_part(k_row[n], d);
#endif
    }
  };
#if AHEAD
  if (begin < end) load_keys(begin);
#endif
  for (int pass = begin; pass < end; pass++) {
    const int parity = pass & 1;
    T* w_tile = weights + parity * QUERIES * P_STRIDE;
    float* m_tile = maxima + parity * 4 * QUERIES;

    // Scores of this warp's 16 keys.
    float s[TILES][2][4];
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      for (int n = 0; n < 2; n++)
        for (int i = 0; i < 4; i++) s[t][n][i] = 0.f;
    const int key0 = pass * 64 + warp * 16;
#if !AHEAD
    load_keys(pass);
#endif
    #pragma unroll
    for (int d = 0; d < K_PARTS; d++) {
#if AHEAD
      const uint4 k0 = k_next[0][d], k1 = k_next[1][d];
#else
      const uint4 k0 = key_part(k_row[0], d), k1 = key_part(k_row[1], d);
#endif
      #pragma unroll
      for (int t = 0; t < TILES; t++) {
        const uint4 qa = *(const uint4*)(q_tile + (t * 16 + group) * Q_STRIDE + d * 32 + quad * 8);
        const uint4 qb = *(const uint4*)(q_tile + (t * 16 + group + 8) * Q_STRIDE + d * 32 + quad * 8);
        product(s[t][0], qa.x, qb.x, qa.y, qb.y, k0.x, k0.y);
        product(s[t][0], qa.z, qb.z, qa.w, qb.w, k0.z, k0.w);
        product(s[t][1], qa.x, qb.x, qa.y, qb.y, k1.x, k1.y);
        product(s[t][1], qa.z, qb.z, qa.w, qb.w, k1.z, k1.w);
      }
    }
#if AHEAD
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const int key = pass * 64 + half * 32 + quad * 8;
      const size_t block = blocks[max(min(key, high - 1), low) / BLOCK];
      const T* v_row = values + ((block * KV_HEADS + kv_head) * BLOCK + key % BLOCK) * V_STRIDE + (inside ? warp * (V_PADDED / 4) + group * E : 0);
      #pragma unroll
      for (int j = 0; j < 8; j++) {
        const T* from = v_row + (size_t)j * V_STRIDE;
        if (E == 2) v_now[half][j][0].x = *(const unsigned*)from;
        else if (E == 4) { const uint2 x = *(const uint2*)from; v_now[half][j][0].x = x.x; v_now[half][j][0].y = x.y; }
        else {
          #pragma unroll
          for (int c = 0; c < E / 8; c++) v_now[half][j][c] = ((const uint4*)from)[c];
        }
      }
    }
    if (pass + 1 < end) load_keys(pass + 1);
#endif
    #pragma unroll
    for (int t = 0; t < TILES; t++) {
      float now[2] = {-1e30f, -1e30f};
      #pragma unroll
      for (int n = 0; n < 2; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const int key = key0 + n * 8 + quad * 2 + (i & 1), h = i >> 1;
          float x = s[t][n][i] * scale;
          if (CAPPED) x = cap * tanhf(x / cap);
          x = key >= first[t][h] && key <= last[t][h] ? x : -1e30f;
          s[t][n][i] = x;
          now[h] = fmaxf(now[h], x);
        }
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        now[h] = row_max(now[h]);
        if (quad == 0) m_tile[warp * QUERIES + t * 16 + group + h * 8] = now[h];
      }
    }
    __syncthreads();

    // Weights of this warp's keys, for all warps; what was added up before is rescaled.
    #pragma unroll
    for (int t = 0; t < TILES; t++) {
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        const int m = t * 16 + group + h * 8;
        float now = most[t][h];
        #pragma unroll
        for (int w = 0; w < 4; w++) now = fmaxf(now, m_tile[w * QUERIES + m]);
        const float kept = exp2f(most[t][h] - now);
        most[t][h] = now;
        float sum = 0.f;
        #pragma unroll
        for (int n = 0; n < 2; n++) {
          // A row that sees nothing yet has the same floor as its scores: its weights are none.
          const float a = s[t][n][2 * h] > -1e29f ? exp2f(s[t][n][2 * h] - now) : 0.f;
          const float b = s[t][n][2 * h + 1] > -1e29f ? exp2f(s[t][n][2 * h + 1] - now) : 0.f;
          sum += a + b;
          *(unsigned*)(w_tile + m * P_STRIDE + warp * 16 + n * 8 + quad * 2) = pack(a, b);
        }
        total[t][h] = total[t][h] * kept + sum;
        #pragma unroll
        for (int e = 0; e < E; e++) {
          out[t][e][2 * h] *= kept;
          out[t][e][2 * h + 1] *= kept;
        }
      }
    }
    __syncthreads();

    // This warp's quarter of the values of all 64 keys.
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 pa[TILES], pb[TILES];
      #pragma unroll
      for (int t = 0; t < TILES; t++) {
        pa[t] = *(const uint4*)(w_tile + (t * 16 + group) * P_STRIDE + half * 32 + quad * 8);
        pb[t] = *(const uint4*)(w_tile + (t * 16 + group + 8) * P_STRIDE + half * 32 + quad * 8);
      }
      const int key = pass * 64 + half * 32 + quad * 8;
      // Eight neighbouring keys lie in one block. Those past the end have no weight, but must be numbers.
      const size_t block = blocks[max(min(key, high - 1), low) / BLOCK];
      const T* v_row = values + ((block * KV_HEADS + kv_head) * BLOCK + key % BLOCK) * V_STRIDE + (inside ? warp * (V_PADDED / 4) + group * E : 0);
      (void)v_row;
      #pragma unroll
      for (int pair = 0; pair < 4; pair += 2) {  // keys 0 to 3, then 4 to 7, of the eight
        unsigned v[4][E / 2];
        #pragma unroll
        for (int j = 0; j < 4; j++) {
#if AHEAD
          const uint4* x = v_now[half][pair * 2 + j];
          v[j][0] = x[0].x;
          if (E >= 4) v[j][1] = x[0].y;
          #pragma unroll
          for (int c = 0; c < E / 8; c++) {
            v[j][4 * c] = x[c].x; v[j][4 * c + 1] = x[c].y; v[j][4 * c + 2] = x[c].z; v[j][4 * c + 3] = x[c].w;
          }
          continue;
#endif
          const T* from = v_row + (size_t)(pair * 2 + j) * V_STRIDE;
          if (E == 2) {
            v[j][0] = *(const unsigned*)from;
          } else if (E == 4) {
            const uint2 x = *(const uint2*)from;
            v[j][0] = x.x; v[j][1] = x.y;
          } else {
            #pragma unroll
            for (int c = 0; c < E / 8; c++) {
              const uint4 x = ((const uint4*)from)[c];
              v[j][4 * c] = x.x; v[j][4 * c + 1] = x.y; v[j][4 * c + 2] = x.z; v[j][4 * c + 3] = x.w;
            }
          }
        }
        #pragma unroll
        for (int c = 0; c < E / 2; c++) {
          const unsigned even0 = __byte_perm(v[0][c], v[1][c], 0x5410), odd0 = __byte_perm(v[0][c], v[1][c], 0x7632);
          const unsigned even1 = __byte_perm(v[2][c], v[3][c], 0x5410), odd1 = __byte_perm(v[2][c], v[3][c], 0x7632);
          #pragma unroll
          for (int t = 0; t < TILES; t++) {
            const unsigned a0 = pair ? pa[t].z : pa[t].x, a2 = pair ? pa[t].w : pa[t].y;
            const unsigned a1 = pair ? pb[t].z : pb[t].x, a3 = pair ? pb[t].w : pb[t].y;
            product(out[t][2 * c], a0, a1, a2, a3, even0, even1);
            product(out[t][2 * c + 1], a0, a1, a2, a3, odd0, odd1);
          }
        }
      }
    }
  }

  #pragma unroll
  for (int t = 0; t < TILES; t++)
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const float sum = row_sum(total[t][h]);
      if (quad == 0) totals[warp * QUERIES + t * 16 + group + h * 8] = sum;
    }
  __syncthreads();
  #pragma unroll
  for (int t = 0; t < TILES; t++)
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int m = t * 16 + group + h * 8;
      if (m >= vectors) continue;
      float sum = 0.f;
      #pragma unroll
      for (int w = 0; w < 4; w++) sum += totals[w * QUERIES + m];
      const size_t place = (size_t)(row0 + m / PART) * HEADS + head0 + m % PART;
      const size_t at = SPLIT ? place * splits + split : place;
      float factor = 1.f;
      if (!SPLIT) {
        if (SINKS) {
          const float sink = (float)sinks[head0 + m % PART] * 1.4426950408889634f, now = fmaxf(most[t][h], sink);
          factor = exp2f(most[t][h] - now);
          sum = sum * factor + exp2f(sink - now);
        }
        factor /= sum;
      } else if (warp == 0 && quad == 0) {
        stats[at * 2] = most[t][h];
        stats[at * 2 + 1] = sum;
      }
      #pragma unroll
      for (int e = 0; e < E; e++)
        #pragma unroll
        for (int i = 0; i < 2; i++) {
          const int d = warp * (V_PADDED / 4) + (quad * 2 + i) * E + e;
          if (V_PADDED > V_DIM && d >= V_DIM) continue;
          const float x = out[t][e][2 * h + i] * factor;
          if (SPLIT) partial[at * V_DIM + d] = x; else result[at * V_DIM + d] = (T)x;
        }
    }
