  // One row of a sequence over plain blocks, where `attend` takes several: its structure is that of
  // `packed`, its operands come from shared memory as they are (`ldmatrix`). With CODED blocks hold codes,
  // which a warp reads as numbers into shared memory first; the parameters are then those of `tokens`.
  //
  // What a warp reads first it fetches before the kernel that this one waits for is done (READY), as
  // keys are there already but for those that the step writes: `fresh`, in a tile's last place, is the
  // first of them. Where one thread block sees all keys of a row, the
  // result is written at once, and `combine` has nothing to do.
  //
  // With STORES_DIGITS the result is also written as digits, see `digits.cuh`.
  //
  // With MOST_TILES a thread block takes every gridDim.x-th tile, of so many at most; those with a row come
  // first. Otherwise it takes one.
#ifndef V_STRIDE
#define V_STRIDE V_DIM
#endif
#ifndef CODED
#define CODED 0
#endif
#ifndef MOST_TILES
#define MOST_TILES 0
#endif
#ifndef STORES_DIGITS
#define STORES_DIGITS 0
#endif
  constexpr int SHARE = V_DIM > 128 ? V_DIM / 128 : 1, STREAMS = 4 / SHARE;
  constexpr int K_OWN = K_DIM / SHARE, V_OWN = V_DIM / SHARE;
  constexpr int COLUMNS = (PART + 7) / 8;             // times eight query heads
  constexpr int UNIT = 32, TILES_OF = UNIT / 16;      // keys that a warp takes at a time
  // Pieces of 16 bytes of a vector change places within eight, so the row of one is whole eights.
  constexpr int K_CHUNKS = K_OWN / 8, K_ROW = (K_CHUNKS + 7) / 8 * 128;
  constexpr int V_CHUNKS = V_OWN / 8, V_ROW = (V_CHUNKS + 7) / 8 * 128;
#if CODED
  constexpr int WARP = UNIT * (K_ROW > V_ROW ? K_ROW : V_ROW);  // values come when keys have been scored
#else
  constexpr int WARP = UNIT * (K_ROW + V_ROW);
#endif
  extern __shared__ __align__(16) unsigned char shared[];
  float* met = (float*)(shared + 4 * WARP);           // [2, 4, TILES_OF * COLUMNS, 32, 4], where shared
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, group = lane >> 2;
  const int stream = warp % STREAMS, share = warp / STREAMS;
  unsigned char* keys_here = shared + warp * WARP;
  unsigned char* values_here = keys_here + (CODED ? 0 : UNIT * K_ROW);

#if MOST_TILES
  for (int number = blockIdx.x; number < MOST_TILES && tiles[number * 6 + 1]; number += gridDim.x) {
  __syncthreads();  // all have read what is in shared memory of the tile before
  const int* tile = tiles + number * 6;
#else
  const int* tile = tiles + blockIdx.x * 6;
#endif
  const int row = tile[0], low = tile[2], high = tile[3];
  const int* blocks = table + tile[4];
  const int kv_head = blockIdx.y / PARTS, head0 = kv_head * GROUP + blockIdx.y % PARTS * PART;
  const int first_pass = low / UNIT, each = units_of_split(low, high, splits);
  const int begin = first_pass + split * each, end = min((high + UNIT - 1) / UNIT, begin + each);
  const auto vector0 = [&](int block, int pass) {
    return ((size_t)block * KV_HEADS + kv_head) * BLOCK + pass * UNIT % BLOCK;
  };
  const auto block_of = [&](int pass) { return blocks[pass * UNIT / BLOCK]; };
#if CODED
  if (ends_without_keys(begin >= end, stats, (size_t)row * HEADS + head0, tile[1] * PART, split, splits)) return;
#if CODEBOOK
  __shared__ float key_more[1 << K_BITS], value_more[1 << V_BITS];
  for (int n = threadIdx.x; n < 1 << K_BITS; n += 128) key_more[n] = key_levels[n];
  for (int n = threadIdx.x; n < 1 << V_BITS; n += 128) value_more[n] = value_levels[n];
  __syncthreads();
#else
  const __half *key_more = key_biases, *value_more = value_biases;
#endif
  const auto read_keys = [&](int pass) {
    __syncwarp();
    const size_t vector = vector0(block_of(pass), pass);
#if BY_CHANNEL
    expand_channels<K_OWN, K_BITS, K_ROW>(keys, key_scales, key_more, vector / BLOCK * K_DIM + share * K_OWN, vector % BLOCK / UNIT, keys_here, lane);
#else
    expand_tokens<K_OWN, K_DIM, K_GROUP, K_BITS, K_ROW>(keys, key_scales, key_more, vector, share * K_OWN, keys_here, lane);
#endif
    __syncwarp();
  };
  // Values may be the first V_DIM of V_SIZE elements.
  const auto read_values = [&](int pass) {
    __syncwarp();
    const size_t vector = vector0(block_of(pass), pass);
#if BY_CHANNEL && IN_KEY
    expand_channels<V_OWN, V_BITS, V_ROW>(values, value_scales, value_more, vector / BLOCK * V_SIZE + share * V_OWN, vector % BLOCK / UNIT, values_here, lane);
#else
    expand_tokens<V_OWN, V_SIZE, V_GROUP, V_BITS, V_ROW>(values, value_scales, value_more, vector, share * V_OWN, values_here, lane);
#endif
    __syncwarp();
  };
#else
  const int fresh = tile[5];
  if (begin >= end) {
#if MOST_TILES
    continue;
#endif
#if ORDERED
    READY;
#endif
    return;
  }

  const auto fetch_key = [&](const T* vector, int at, int chunk) {
    copy_ahead(keys_here + at * K_ROW + (chunk ^ (at & 7)) * 16, vector + share * K_OWN + chunk * 8);
  };
  const auto fetch_value = [&](const T* vector, int at, int chunk) {
    copy_ahead(values_here + at * V_ROW + (chunk ^ (at & 7)) * 16, vector + share * V_OWN + chunk * 8);
  };
  const auto fetch_keys = [&](int block, int pass) {
    const T* from = keys + vector0(block, pass) * K_DIM;
    #pragma unroll
    for (int i = 0; i < K_CHUNKS; i++) {
      const int n = i * 32 + lane, at = n / K_CHUNKS;
      fetch_key(from + at * K_DIM, at, n % K_CHUNKS);
    }
  };
  const auto fetch_values = [&](int block, int pass) {
    const T* from = values + vector0(block, pass) * V_STRIDE;
    #pragma unroll
    for (int i = 0; i < V_CHUNKS; i++) {
      const int n = i * 32 + lane, at = n / V_CHUNKS;
      fetch_value(from + at * V_STRIDE, at, n % V_CHUNKS);
    }
  };
  int following = 0;  // the block of the unit after this one
  if (begin + stream < end) {
    const int pass = begin + stream, block = block_of(pass);
    if (pass + STREAMS < end) following = block_of(pass + STREAMS);
    fetch_keys(block, pass);
    end_turn();
    fetch_values(block, pass);
    end_turn();
  }
#ifdef READY
  READY;
#endif
#endif

  unsigned queries[COLUMNS][K_OWN / 16][2];
  float most[COLUMNS][2], total[COLUMNS][2], out[COLUMNS][V_OWN / 16][4];
  #pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    const int m = c * 8 + group;
    #pragma unroll
    for (int k = 0; k < K_OWN / 16; k++)
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const T* own = q + ((size_t)row * HEADS + head0 + m) * K_DIM + share * K_OWN + k * 16 + i * 8 + quad * 2;
        queries[c][k][i] = m < PART ? *(const unsigned*)own : 0u;
      }
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
#if defined(READY) && !CODED
  // Queries are on their way meanwhile.
  if (begin + stream < end && (begin + stream + 1) * UNIT > fresh) {
    const int pass = begin + stream, stop = min(high - pass * UNIT, UNIT);
    const size_t vector = vector0(block_of(pass), pass);
    await_all();
    for (int at = max(fresh - pass * UNIT, 0); at < stop; at++) {
      for (int n = lane; n < K_CHUNKS; n += 32) fetch_key(keys + (vector + at) * K_DIM, at, n);
      for (int n = lane; n < V_CHUNKS; n += 32) fetch_value(values + (vector + at) * V_STRIDE, at, n);
    }
    end_turn();
    await_all();
  }
#endif
  const float scale = numbers[0], cap = numbers[1];

  // Which row and which chunk a lane names to `ldmatrix`, of 16 rows and two chunks.
  const int lane_row = lane & 15, lane_chunk = lane >> 4;              // matrices by rows first
  const int turned_row = (lane & 7) + (lane >> 4) * 8, turned_chunk = lane >> 3 & 1;  // by chunks first
  for (int pass = begin + stream; pass < end; pass += STREAMS) {
#if !CODED
    const int next = following;
    if (pass + 2 * STREAMS < end) following = block_of(pass + 2 * STREAMS);
#endif
    float s[COLUMNS][TILES_OF][4];
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++)
      #pragma unroll
      for (int t = 0; t < TILES_OF; t++)
        #pragma unroll
        for (int i = 0; i < 4; i++) s[c][t][i] = 0.f;
#if CODED
    read_keys(pass);
#else
    await_turn();
#endif
    #pragma unroll
    for (int k = 0; k < K_OWN / 16; k++)
      #pragma unroll
      for (int t = 0; t < TILES_OF; t++) {
        unsigned a[4];
        const int at = t * 16 + lane_row;
        matrices(a, keys_here + at * K_ROW + ((k * 2 + lane_chunk) ^ (at & 7)) * 16);
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          product(s[c][t], a[0], a[1], a[2], a[3], queries[c][k][0], queries[c][k][1]);
      }
#if !CODED
    __syncwarp();
    if (pass + STREAMS < end) fetch_keys(next, pass + STREAMS);
    end_turn();
#endif

    if (SHARE > 1) {
      constexpr int N = TILES_OF * COLUMNS;
      add_shares<SHARE, STREAMS, N>(s[0][0], (float4*)met + (pass - begin) / STREAMS % 2 * (4 * N * 32), warp, stream, lane);
    }

    unsigned weights[COLUMNS][TILES_OF][2];
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      float now[2] = {-1e30f, -1e30f};
      #pragma unroll
      for (int t = 0; t < TILES_OF; t++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const int key = pass * UNIT + t * 16 + group + (i < 2 ? 0 : 8);
          float x = s[c][t][i] * scale;
          if (CAPPED) x = cap * tanhf(x / cap);
          s[c][t][i] = key >= low && key < high ? x : -1e30f;
          now[i & 1] = fmaxf(now[i & 1], s[c][t][i]);
        }
      bool moved = false;
      float kept[2];
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        now[h] = fmaxf(column_max(now[h]), most[c][h]);
        moved = moved || now[h] > most[c][h];
        kept[h] = power(most[c][h] - now[h]);
        most[c][h] = now[h];
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
      for (int t = 0; t < TILES_OF; t++) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          s[c][t][i] = power(s[c][t][i] - most[c][i & 1]);
          total[c][i & 1] += s[c][t][i];
        }
        #pragma unroll
        for (int i = 0; i < 2; i++) weights[c][t][i] = transposed(pack(s[c][t][2 * i], s[c][t][2 * i + 1]));
      }
    }

#if CODED
    read_values(pass);
#else
    await_turn();
#endif
    #pragma unroll
    for (int e = 0; e < V_OWN / 16; e++)
      #pragma unroll
      for (int t = 0; t < TILES_OF; t++) {
        unsigned a[4];
        const int at = t * 16 + turned_row;
        turned_matrices(a, values_here + at * V_ROW + ((e * 2 + turned_chunk) ^ (at & 7)) * 16);
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          product(out[c][e], a[0], a[1], a[2], a[3], weights[c][t][0], weights[c][t][1]);
      }
#if !CODED
    __syncwarp();
    if (pass + STREAMS < end) fetch_values(next, pass + STREAMS);
    end_turn();
#endif
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
    for (int e = 0; e < V_OWN / 16; e++)
      #pragma unroll
      for (int i = 0; i < 4; i++)
        own_sums[(c * 8 + quad * 2 + (i & 1)) * V_OWN + e * 16 + group + (i < 2 ? 0 : 8)] = out[c][e][i];
  }
  __syncthreads();
#if CODED
  store_split<STREAMS, ROWS, V_OWN, WARP>(found, shared, (size_t)row * HEADS + head0, split, splits, partial, stats);
#else
  const bool alone = split == 0 && end * UNIT >= high;
#if STORES_DIGITS
  __shared__ __align__(16) T finished[PART * V_DIM];
#endif
  for (int n = threadIdx.x; n < PART * V_DIM; n += 128) {
    const int m = n / V_DIM, d = n % V_DIM;
    const float* element = (const float*)(shared + d / V_OWN * STREAMS * WARP) + m * V_OWN + d % V_OWN;
    const Joined all = joined<STREAMS, ROWS>(found, m, element, WARP / sizeof(float));
    const size_t place = (size_t)row * HEADS + head0 + m, at = place * splits + split;
    if (alone) {
#if SINKS
      const float sum = all.sum + power((float)sinks[head0 + m] * 1.4426950408889634f - all.best);
#else
      const float sum = all.sum;
#endif
      const T x = (T)(all.x / sum);
      result[place * V_DIM + d] = x;
#if STORES_DIGITS
      finished[n] = x;
#endif
    } else {
      partial[at * V_DIM + d] = all.x;
      if (d == 0) {
        stats[at * 2] = all.best;
        stats[at * 2 + 1] = all.sum;
      }
    }
  }
#if STORES_DIGITS
  if (alone) {
    __syncthreads();
    store_all_digits(digits_of_row(digits, row, HEADS * V_DIM), head0 * V_DIM, finished, PART * V_DIM);
  }
#endif
#endif
#if MOST_TILES
  }
  READY;
#endif
