  // The gated delta rule (arXiv:2412.06464) in chunks of 64 tokens, on tensor cores. A thread block has VALUES rows of the
  // states of a head, 8 a warp, and takes the sequences of at least LEAST rows, one after the other. Operands are those
  // of `delta_rule.cuh`; all but the states are in bfloat16.
  //
  // Of a chunk, D_i is what tokens up to i leave of the state S before it. With unit keys k and queries q:
  //   d_i = beta_i (v_i - D_i S k_i) - sum over j < i of A_ij d_j,   A_ij = beta_i D_i / D_j (k_i k_j)
  //   y_i = D_i S q_i + sum over j <= i of P_ij d_j,                 P_ij = D_i / D_j (q_i k_j)
  //   S' = D S + sum of (D / D_j) d_j k_j^T,                         D = D_63
  // PAIR_WARPS warps compute A and P of the next chunk, tiles of 16 x 16 on and below the diagonal, while the other
  // ones advance the states. In place of tiles on A's diagonal they store the inverses of 1 + A. Keys and queries are
  // multiplied as they are, in bfloat16, and scaled afterwards; other operands are sums of two numbers in bfloat16.
  constexpr int CHUNK = 64, TILES = CHUNK / 16, LOWER = TILES * (TILES + 1) / 2, PIECES = KEY_DIM / 8;
  constexpr float LOG2_E = 1.4426950408889634f;
  constexpr int KEYS = CHUNK * PIECES, SLICES = KEY_DIM / 16;
  extern __shared__ __align__(128) uint4 memory[];
  uint4* const rows_of_chunks = memory;  // [3][keys, queries][CHUNK][PIECES]
  // A and P, [2][LOWER][high, low][32], as lanes have a left operand:
  uint4* const systems = rows_of_chunks + 6 * KEYS;
  uint4* const outputs = systems + 4 * LOWER * 32;
  // [2][4][CHUNK]: beta_i, beta_i D_i and D_i, which scale products with keys and with queries, and D / D_i, which scales keys.
  float* const factors = (float*)(outputs + 4 * LOWER * 32);
  float* const ends = factors + 8 * CHUNK;                    // [2], D
  float* const past = ends + 4;                               // [CHUNK], logarithms of D_i to base 2
  float* const lengths = past + CHUNK;                        // [keys, queries][CHUNK], squared
  float* const row_exponents = lengths + 2 * CHUNK;           // [keys, queries][CHUNK], of factors of A and P,
  float* const column_exponents = row_exponents + 2 * CHUNK;  // [CHUNK], less these
  float* const diagonal = column_exponents + CHUNK;           // [TILES][16][20]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, quad = lane & 3;
  const int head = blockIdx.x / VALUE_PARTS, key_head = head / (HEADS / KEY_HEADS);
  const auto tile = [](int i, int j) { return i * (i + 1) / 2 + j; };
  const auto piece_at = [](int row, int piece) { return row * PIECES + (piece ^ (row & 7)); };
  wait_for_others();
  struct Chunk { int sequence, number, first, count; };
  const auto sequence_from = [&](int from) {
    for (; from < *rows; from += 32) {
      const int own = from + lane, count = own < *rows ? counts[own] : 0;
      const bool ends = !count || (count >= LEAST && own % gridDim.y == blockIdx.y);
      const int found = __reduce_min_sync(0xffffffffu, ends ? own : 1 << 30);
      if (found == 1 << 30) continue;
      if (found >= *rows || !counts[found]) break;
      return Chunk{found, 0, firsts[found], counts[found]};
    }
    return Chunk{-1, 0, 0, 0};
  };
  const auto following = [&](Chunk at) {
    if (at.sequence < 0) return at;
    if ((at.number + 1) * CHUNK < at.count) return Chunk{at.sequence, at.number + 1, at.first, at.count};
    return sequence_from(at.sequence + 1);
  };
  Chunk now = sequence_from(0);  // the chunk whose A and P are computed, or which the states pass
  if (now.sequence < 0) return;

  if (warp < PAIR_WARPS) {
    constexpr int SHARE = PAIR_WARPS / 2, SLOTS = (LOWER + SHARE - 1) / SHARE, THREADS = 32 * PAIR_WARPS;
    const float rate = expf(number(log_rates[head])), bias = number(step_biases[head]);
    // The tiles on the diagonal, then those below it, row by row.
    const auto row_of = [](int n) { return n < TILES ? n : 1 + (n > TILES) + (n > TILES + 2); };
    const auto column_of = [&](int n) { return n < TILES ? n : n - TILES - tile(row_of(n) - 1, 0); };
    const auto fetch = [&](Chunk at, int buffer) {
      constexpr int STEP = THREADS / 2 / PIECES;  // rows, a multiple of eight, so that `piece` has one place
      const int thread = threadIdx.x - THREADS / 2, row = thread / PIECES, piece = thread % PIECES;
      const int left = at.count - at.number * CHUNK - row;
      uint4* to = rows_of_chunks + buffer * 2 * KEYS + piece_at(row, piece);
      const auto* from = mixed + (size_t)(at.first + at.number * CHUNK + row) * MIXED_ROW + key_head * KEY_DIM + piece * 8;
      #pragma unroll
      for (int n = 0; n < CHUNK / STEP; n++, to += STEP * PIECES, from += (size_t)STEP * MIXED_ROW) {
        if (n * STEP < left) {
          copy_ahead(to, from + KEY_HEADS * KEY_DIM);
          copy_ahead(to + KEYS, from);
        } else {
          *to = to[KEYS] = make_uint4(0, 0, 0, 0);
        }
      }
    };
    typename Bare<decltype(*steps)>::Type next_step[2] = {};
    typename Bare<decltype(*betas)>::Type next_beta[2] = {};
    const auto read_gates = [&](Chunk at) {
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const int token = at.number * CHUNK + 2 * lane + i, row = at.first + token;
        if (token >= at.count) continue;
        next_step[i] = steps[(size_t)row * STEPS_ROW + head];
        next_beta[i] = betas[(size_t)row * BETAS_ROW + head];
      }
    };
    // Half of the warps multiply keys with keys, half queries with keys.
    const int of = warp / SHARE, share = warp % SHARE;
    if (of) fetch(now, 0);
    end_turn();
    if (warp == SHARE - 1) read_gates(now);
    for (int turn = 0; now.sequence >= 0; turn++) {
      const Chunk next = following(now);
      if (of && next.sequence >= 0) fetch(next, (turn + 1) % 3);
      end_turn();
      await_turns<1>();
      meet(1, THREADS);
      const uint4* const keys = rows_of_chunks + turn % 3 * 2 * KEYS;
      float* const own = factors + turn % 2 * 4 * CHUNK;
      if (warp == SHARE - 1) {
        float left[2] = {};
        #pragma unroll
        for (int i = 0; i < 2; i++) {
          const float x = number(next_step[i]) + bias;
          const bool inside = now.number * CHUNK + 2 * lane + i < now.count;
          if (inside && BOUNDED) left[i] = LOG2_E * MOST_FORGOTTEN * sigmoid(rate * x);
          else if (inside) left[i] = -LOG2_E * rate * (fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))));
          own[2 * lane + i] = inside ? MOST_CORRECTION * sigmoid(number(next_beta[i])) : 0.f;
        }
        float all = left[0] + left[1];
        #pragma unroll
        for (int by = 1; by < 32; by *= 2) {
          const float before = __shfl_sync(0xffffffffu, all, max(lane - by, 0));
          if (lane >= by) all += before;
        }
        const float before = __shfl_sync(0xffffffffu, all, max(lane - 1, 0));
        past[2 * lane] = (lane ? before : 0.f) + left[0];
        past[2 * lane + 1] = all;
        read_gates(next);
      }
      const auto left_at = [&](int i, int slice) { return piece_at(i * 16 + (lane & 15), slice * 2 + (lane >> 4)); };
      const auto keep_length = [&](float* to, float low, float next_low, float high, float next_high) {
        if (group >> 1 != quad) return;
        to[group] = group & 1 ? next_low : low;
        to[group + 8] = group & 1 ? next_high : high;
      };
      if (of)
        #pragma unroll
        for (int i = share; i < TILES; i += SHARE) {  // queries with themselves
          float squares[8] = {};
          #pragma unroll
          for (int slice = 0; slice < SLICES; slice++) {
            unsigned a[4];
            matrices(a, keys + KEYS + left_at(i, slice));
            product(squares, a[0], a[1], a[2], a[3], a[0], a[2]);
            product(squares + 4, a[0], a[1], a[2], a[3], a[1], a[3]);
          }
          keep_length(lengths + CHUNK + i * 16, squares[0], squares[1], squares[6], squares[7]);
        }
      float found[SLOTS][8] = {};
      #pragma unroll
      for (int slice = 0; slice < SLICES; slice++)
        #pragma unroll
        for (int n = 0; n < SLOTS; n++) {
          const int number = min(share + n * SHARE, LOWER - 1), i = row_of(number), j = column_of(number);
          unsigned a[4], b[4];
          matrices(a, keys + of * KEYS + left_at(i, slice));
          matrices(b, keys + piece_at(j * 16 + (lane >> 4) * 8 + (lane & 7), slice * 2 + (lane >> 3 & 1)));
          product(found[n], a[0], a[1], a[2], a[3], b[0], b[1]);
          product(found[n] + 4, a[0], a[1], a[2], a[3], b[2], b[3]);
        }
      #pragma unroll
      for (int n = 0; n < SLOTS; n++) {
        const int number = share + n * SHARE;
        if (!of && number < TILES) keep_length(lengths + number * 16, found[n][0], found[n][1], found[n][6], found[n][7]);
      }
      meet(1, THREADS);
      if (threadIdx.x < 2 * CHUNK) {
        const int row = threadIdx.x % CHUNK;
        const bool query = threadIdx.x >= CHUNK;
        const float scale = rsqrtf(lengths[threadIdx.x] + UNIT_EPS) * (query ? rsqrtf((float)KEY_DIM) : 1.f);
        const float left = power(past[row]), beta = own[row];
        if (query) {
          own[2 * CHUNK + row] = left * scale;
        } else {
          own[CHUNK + row] = beta * left * scale;
          own[3 * CHUNK + row] = power(past[CHUNK - 1] - past[row]) * scale;
          column_exponents[row] = past[row] - log2f(scale);
          if (row == CHUNK - 1) ends[turn % 2] = left;
        }
        row_exponents[threadIdx.x] = past[row] + log2f(query ? scale : beta * scale);
      }
      meet(1, THREADS);
      #pragma unroll
      for (int n = 0; n < SLOTS; n++) {
        const int number = min(share + n * SHARE, LOWER - 1), i = row_of(number), j = column_of(number);
        #pragma unroll
        for (int e = 0; e < 8; e++) {
          const int row = i * 16 + group + e / 2 % 2 * 8, column = j * 16 + e / 4 * 8 + 2 * quad + e % 2;
          const float x = found[n][e] * power(row_exponents[of * CHUNK + row] - column_exponents[column]);
          found[n][e] = column < row + of ? x : 0.f;
        }
      }
      uint4* const to = (of ? outputs : systems) + turn % 2 * 2 * LOWER * 32;
      #pragma unroll
      for (int n = 0; n < SLOTS; n++) {
        const int number = share + n * SHARE, i = row_of(number), j = column_of(number);
        if (number >= LOWER) continue;
        if (of || number >= TILES) {
          unsigned high[4], low[4];
          #pragma unroll
          for (int part = 0; part < 4; part++) in_parts(high[part], low[part], found[n][2 * part], found[n][2 * part + 1]);
          to[tile(i, j) * 64 + lane] = make_uint4(high[0], high[1], high[2], high[3]);
          to[tile(i, j) * 64 + 32 + lane] = make_uint4(low[0], low[1], low[2], low[3]);
          continue;
        }
        // The inverse of a tile on the diagonal. A lane computes a column; both halves of a warp do the same.
        float* const square = diagonal + i * 320;
        #pragma unroll
        for (int e = 0; e < 8; e++) square[(group + e / 2 % 2 * 8) * 20 + e / 4 * 8 + 2 * quad + e % 2] = found[n][e];
        __syncwarp();
        const int column = lane % 16;
        unsigned short* const halves = (unsigned short*)(to + tile(i, i) * 64);
        float x[16];
        #pragma unroll
        for (int row = 0; row < 16; row++) {
          x[row] = row == column;
          #pragma unroll
          for (int k = 0; k < row; k++) x[row] -= square[row * 20 + k] * x[k];
          unsigned high, low;
          in_parts(high, low, x[row], 0.f);
          const int at = (row % 8 * 4 + column % 8 / 2) * 8 + row / 8 * 2 + column / 8 * 4 + column % 2;
          halves[at] = (unsigned short)high;
          halves[256 + at] = (unsigned short)low;
        }
      }
      __syncthreads();
      now = next;
    }
    __syncthreads();
    return;
  }

  float kept[SLICES][4] = {};  // S^T: 16 keys by 8 values
  const int v0 = blockIdx.x % VALUE_PARTS * VALUES + (warp - PAIR_WARPS) * 8 + 2 * quad;
  const auto place = [&](int slot, int slice, int e) {
    return (((size_t)slot * HEADS + head) * VALUE_DIM + v0 + e % 2) * KEY_DIM + slice * 16 + group + e / 2 * 8;
  };
#if DEFERRED
  const auto changes_at = [&](int slot, int e) {
    return changes + (((size_t)slot * HEADS + head) * VALUE_DIM + v0 + e) * (1 + DEFERRED);
  };
#endif
  unsigned value[TILES][2];
  const auto read_chunk = [&] {
    if (now.sequence < 0) return;
    #pragma unroll
    for (int i = 0; i < TILES; i++)
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        const int token = now.number * CHUNK + i * 16 + h * 8 + group;
        const auto* from = mixed + (size_t)(now.first + token) * MIXED_ROW + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v0;
        value[i][h] = token < now.count ? *(const unsigned*)from : 0;
      }
    if (now.number) return;
    const int slot = sources[now.sequence];
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++)
      #pragma unroll
      for (int e = 0; e < 4; e++) kept[slice][e] = slot < 0 ? 0.f : state[place(slot, slice, e)];
#if DEFERRED
    if (slot < 0) return;
    const float* const waiting = changes_at(slot, 0);
    for (int n = 0; n < (int)waiting[0]; n++) {
      const float factor = change_factors[((size_t)slot * HEADS + head) * (1 + DEFERRED) + 1 + n];
      const auto* const own = change_keys + (((size_t)slot * DEFERRED + n) * KEY_HEADS + key_head) * KEY_DIM + group;
      #pragma unroll
      for (int slice = 0; slice < SLICES; slice++)
        #pragma unroll
        for (int e = 0; e < 4; e++)
          kept[slice][e] = fmaf(waiting[e % 2 * (1 + DEFERRED) + 1 + n], number(own[slice * 16 + e / 2 * 8]), factor * kept[slice][e]);
    }
#endif
  };
  read_chunk();
  __syncthreads();
  for (int turn = 0; now.sequence >= 0; turn++) {
    const uint4* const keys = rows_of_chunks + turn % 3 * 2 * KEYS;
    const uint4* const system = systems + turn % 2 * 2 * LOWER * 32 + lane;
    const uint4* const output = outputs + turn % 2 * 2 * LOWER * 32 + lane;
    const float* const own = factors + turn % 2 * 4 * CHUNK;
    float with_keys[TILES][4] = {}, with_queries[TILES][4] = {};  // products of the states
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      unsigned high[2], low[2], a[4];
      transposed_parts(high, low, kept[slice]);
      #pragma unroll
      for (int i = 0; i < TILES; i++) {
        const int at = piece_at(i * 16 + (lane & 15), slice * 2 + (lane >> 4));
        matrices(a, keys + at);
        product(with_keys[i], a[0], a[1], a[2], a[3], high[0], high[1]);
        product(with_keys[i], a[0], a[1], a[2], a[3], low[0], low[1]);
        matrices(a, keys + KEYS + at);
        product(with_queries[i], a[0], a[1], a[2], a[3], high[0], high[1]);
        product(with_queries[i], a[0], a[1], a[2], a[3], low[0], low[1]);
      }
    }
    const float whole = ends[turn % 2];
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++)
      #pragma unroll
      for (int e = 0; e < 4; e++) kept[slice][e] *= whole;
    unsigned high[TILES][2], low[TILES][2];  // of d
    #pragma unroll
    for (int i = 0; i < TILES; i++) {
      float sums[2][4] = {}, d[2][4] = {};
      #pragma unroll
      for (int j = 0; j < i; j++) add_product(sums, system + tile(i, j) * 64, high[j], low[j]);
      #pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = i * 16 + e / 2 * 8 + group;
        const unsigned pair = value[i][e / 2];
        const float v = __uint_as_float(e % 2 ? pair & 0xFFFF0000u : pair << 16);
        with_keys[i][e] = own[row] * v - own[CHUNK + row] * with_keys[i][e] - (sums[0][e] + sums[1][e]);
        with_queries[i][e] *= own[2 * CHUNK + row];
      }
      transposed_parts(high[i], low[i], with_keys[i]);
      add_product(d, system + tile(i, i) * 64, high[i], low[i]);
      #pragma unroll
      for (int e = 0; e < 4; e++) d[0][e] += d[1][e];
      transposed_parts(high[i], low[i], d[0]);
      #pragma unroll
      for (int e = 0; e < 4; e++) d[0][e] *= own[3 * CHUNK + i * 16 + e / 2 * 8 + group];
      unsigned scaled_high[2], scaled_low[2], a[4];
      transposed_parts(scaled_high, scaled_low, d[0]);
      #pragma unroll
      for (int slice = 0; slice < SLICES; slice++) {
        turned_matrices(a, keys + piece_at(i * 16 + (lane >> 4) * 8 + (lane & 7), slice * 2 + (lane >> 3 & 1)));
        product(kept[slice], a[0], a[1], a[2], a[3], scaled_high[0], scaled_high[1]);
        product(kept[slice], a[0], a[1], a[2], a[3], scaled_low[0], scaled_low[1]);
      }
      float more[2][4] = {};
      #pragma unroll
      for (int j = 0; j <= i; j++) add_product(more, output + tile(i, j) * 64, high[j], low[j]);
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        const int token = now.number * CHUNK + i * 16 + h * 8 + group;
        float sum[2];
        #pragma unroll
        for (int e = 0; e < 2; e++) sum[e] = with_queries[i][h * 2 + e] + more[0][h * 2 + e] + more[1][h * 2 + e];
        auto* const to = y + ((size_t)(now.first + token) * HEADS + head) * VALUE_DIM + v0;
        if (token < now.count) *(unsigned*)to = pack(sum[0], sum[1]);
      }
    }
    if ((now.number + 1) * CHUNK >= now.count)
      for (int n = 0; n < TARGETS; n++) {
        const int target = targets[now.sequence * TARGETS + n];
        if (target < 0) continue;
#if DEFERRED
        if (group == 0) *changes_at(target, 0) = *changes_at(target, 1) = 0.f;
#endif
        #pragma unroll
        for (int slice = 0; slice < SLICES; slice++)
          #pragma unroll
          for (int e = 0; e < 4; e++) to_state[place(target, slice, e)] = kept[slice][e];
      }
    now = following(now);
    read_chunk();  // while the first warps may still compute
    __syncthreads();
  }
