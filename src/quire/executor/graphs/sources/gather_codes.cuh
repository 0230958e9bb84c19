  // Copies each row's chosen keys [T, LIMIT], as `gather` does, from blocks of codes: as numbers in the
  // model's coordinates. BY_CHANNEL full blocks are coded; keys from the row's own block on, which is where
  // the coded ones end, are in its tail as written. A warp for each key; a lane has elements lane, lane + 32
  // and so on.
  constexpr int E = DIM / 32;
  const int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  wait_for_others();
  if (row >= *rows) return;
  const int count = found[row * 6 + 3], filled = (count + 31) / 32 * 32;
  const int* blocks = table + tiles[row * 6 + 4];
  for (int n = blockIdx.y * (THREADS / 32) + warp; n < filled; n += gridDim.y * (THREADS / 32)) {
    float x[E] = {};
    if (n < count) {
      const int key = chosen[(size_t)row * LIMIT + n];
      const size_t block = blocks[key / BLOCK], token = key % BLOCK;
#if BY_CHANNEL
      const bool written = key >= coded[row * 6 + 3];
      #pragma unroll
      for (int e = 0; e < E; e++) {
        const int d = e * 32 + lane;
        const size_t channel = block * DIM + d;
        unsigned code = 0;
        if (written) {
          x[e] = (float)tail_keys[((size_t)tails[row] * BLOCK + token) * DIM + d];
        } else {
          codes_from<1, KEY_BITS>(keys + channel * (BLOCK * KEY_BITS / 32), (int)token, &code);
          x[e] = number(code, __half2float(key_scales[channel]), key_more + channel, 0);
        }
      }
#else
      constexpr int GROUPS = CODEBOOK ? 1 : DIM / KEY_GROUP;
      const size_t vector = block * BLOCK + token;
      #pragma unroll
      for (int e = 0; e < E; e++) {
        const int d = e * 32 + lane, group = CODEBOOK ? 0 : d / KEY_GROUP;
        unsigned code;
        codes_from<1, KEY_BITS>(keys + vector * (DIM * KEY_BITS / 32), d, &code);
        x[e] = number(code, __half2float(key_scales[vector * GROUPS + group]),
                      key_more + (CODEBOOK ? 0 : vector * GROUPS), group);
      }
#if TURNED
      transformed<E>(x, 1.f);
      #pragma unroll
      for (int e = 0; e < E; e++) x[e] *= signs[e * 32 + lane];
#endif
#endif
    }
    T* own = to + ((size_t)row * ROOM + n) * DIM;
    #pragma unroll
    for (int e = 0; e < E; e++) own[e * 32 + lane] = (T)x[e];
  }
