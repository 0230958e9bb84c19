  // Rows of sequences that generate, over blocks of keys and values, plain or coded.
  //
  // q [T, HEADS, K_DIM]
  // plain: keys [blocks * KV_HEADS, BLOCK, K_DIM], values [blocks * KV_HEADS, BLOCK, V_STRIDE]
  // coded: keys a token, codes [blocks * KV_HEADS, BLOCK, K_DIM], or BY_CHANNEL, [blocks * KV_HEADS,
  //   K_DIM, BLOCK], and a scale and a bias for each K_GROUP codes; values a token, with a scale and a
  //   bias for each V_GROUP. With a CODEBOOK codes are numbers of levels, which are multiplied by
  //   the scale. Queries have the keys' coordinates as coded, if they are not TURNED to these here by
  //   `signs` [K_DIM] and a Hadamard transform; what comes out has the values'.
  // tiles [n, 6]: first row, rows, lowest key, key past the highest, place of block 0 in `table`, -
  // visible [T, 2]: first and last key
  // numbers: [0] scale * log2(e), [1] softcap * log2(e)
  // partial [T, HEADS, splits, V_DIM], stats [T, HEADS, splits, 2]: largest score, sum of weights
  //
  // A thread group takes PART query heads of one KV head for the rows of one tile: VECTORS vectors.
  // It reads 64 keys at a time, in three steps with a barrier between: scores of all vectors, their
  // weights (a vector by one SIMD group), and the weighted sums (an element of all vectors by one
  // thread).
  SHARED float q_of[VECTORS * K_DIM];
  SHARED float scores[SLICES * VECTORS * 64];
  SHARED float weights[VECTORS * 64];
  SHARED float kept[VECTORS];
#if CODEBOOK
  SHARED float levels_of_keys[1 << K_BITS];
  SHARED float levels_of_values[1 << V_BITS];
#endif

  const int row0 = tiles[group_x * 6], rows = tiles[group_x * 6 + 1];
  const int low = tiles[group_x * 6 + 2], high = tiles[group_x * 6 + 3];
  const int place = tiles[group_x * 6 + 4];
  const int kv_head = group_y / PARTS, in_group = group_y % PARTS * PART;
  const int head0 = kv_head * GROUP + in_group;
  const int heads = GROUP - in_group < PART ? GROUP - in_group : PART;
  const float scale = numbers[0], cap = numbers[1];
  // Vector m is head m % PART of row m / PART. The last part of a group may have fewer heads, a
  // tile fewer rows: such vectors are computed from whatever is there, and stored nowhere.
#define EXISTS(m) ((m) < rows * PART && (m) % PART < heads)
#define HEAD_ROW(m) ((size_t)(row0 + (m) / PART) * HEADS + head0 + (m) % PART)
#define HEAD_BLOCK(key) ((size_t)table[place + (key) / BLOCK] * KV_HEADS + kv_head)
  // The code of `bits` bits from bit `bit` on, of words from number `at` on; lowest bits first. Codes of
  // 3, 5 and 6 bits may lie in two words.
#define CODE(words, at, bit, bits) \
  ((words[(at) + (bit) / 32] >> (bit) % 32 | \
    ((bit) % 32 + (bits) > 32 ? words[(at) + (bit) / 32 + 1] << (32 - (bit) % 32) % 32 : 0u)) & ((1u << (bits)) - 1u))

  // The elements of values that a thread adds up: of codes neighbours, in one
  // group, OWN being a power of two.
#if CODED
#define ELEMENT(n) ((unsigned)index * OWN + (n))
#define HAS_ELEMENT(n) (index * OWN < V_DIM)
#else
#define ELEMENT(n) ((n) * THREADS + index)
#define HAS_ELEMENT(n) (ELEMENT(n) < V_DIM)
#endif

  // Of this split: keys [begin, end) * 64.
  const int first_pass = low / 64;
  const int passes = high > low ? (high + 63) / 64 - first_pass : 0;
  const int share = (passes + splits - 1) / splits, each = share > 2 ? share : 2;
  const int begin = first_pass + group_z * each;
  const int end = first_pass + passes < begin + each ? first_pass + passes : begin + each;
  if (begin >= end) {  // too few keys for so many splits: `merge` takes nothing from here
    for (int m = index; m < VECTORS; m += THREADS) {
      if (!EXISTS(m)) continue;
      stats[(HEAD_ROW(m) * splits + group_z) * 2] = -1e30f;
      stats[(HEAD_ROW(m) * splits + group_z) * 2 + 1] = 0.0f;
    }
    return;
  }

  for (int i = index; i < VECTORS * K_DIM; i += THREADS) {
    const int m = i / K_DIM;
    q_of[i] = EXISTS(m) ? (float)q[HEAD_ROW(m) * K_DIM + i % K_DIM] : 0.0f;
#if TURNED
    q_of[i] *= signs[i % K_DIM];
#endif
  }
#if TURNED
  TURN(q_of, VECTORS * K_DIM, K_DIM)
#endif
#if CODEBOOK
  for (int i = index; i < 1 << K_BITS; i += THREADS) levels_of_keys[i] = key_levels[i];
  for (int i = index; i < 1 << V_BITS; i += THREADS) levels_of_values[i] = value_levels[i];
#endif
  float most[TURNS], total[TURNS];  // of the vectors that this SIMD group weighs
  UNROLL
  for (int turn = 0; turn < TURNS; turn++) {
    most[turn] = -1e30f;
    total[turn] = 0.0f;
  }
  float out[VECTORS][OWN];  // of the elements that this thread adds up
  UNROLL
  for (int m = 0; m < VECTORS; m++) {
    UNROLL
    for (int n = 0; n < OWN; n++) out[m][n] = 0.0f;
  }
  BARRIER();

  for (int pass = begin; pass < end; pass++) {
    const int key0 = pass * 64;
#if CODED
    // A thread has one key, and a slice of its elements.
    if (index < SLICES * 64) {
      const int slice = index / 64, key = key0 + index % 64;
      const int near = key < low ? low : key < high ? key : high - 1;
      const size_t head = HEAD_BLOCK(near);
      float sums[VECTORS];
      UNROLL
      for (int m = 0; m < VECTORS; m++) sums[m] = 0.0f;
#if BY_CHANNEL
      const int token = near % BLOCK;
      for (int d = slice * K_DIM / SLICES; d < (slice + 1) * K_DIM / SLICES; d++) {
        const size_t channel = head * K_DIM + d, group = channel * (BLOCK / K_GROUP) + token / K_GROUP;
        const float code = (float)CODE(keys, channel * (BLOCK * K_BITS / 32), token * K_BITS, K_BITS);
        const float k = code * (float)key_scales[group] + (float)key_biases[group];
        UNROLL
        for (int m = 0; m < VECTORS; m++) sums[m] += q_of[m * K_DIM + d] * k;
      }
#else
      // 32 codes at a time fill K_BITS words.
      const size_t first = (head * BLOCK + near % BLOCK) * (K_DIM / 32);
      for (int run = slice * (K_DIM / 32) / SLICES; run < (slice + 1) * (K_DIM / 32) / SLICES; run++) {
        unsigned words[K_BITS];
        UNROLL
        for (int n = 0; n < K_BITS; n++) words[n] = keys[(first + run) * K_BITS + n];
        const size_t group = (first + run) / (K_GROUP / 32);
        const float by = (float)key_scales[group];
#if !CODEBOOK
        const float bias = (float)key_biases[group];
#endif
        UNROLL
        for (int j = 0; j < 32; j++) {
          const unsigned code = CODE(words, 0, j * K_BITS, K_BITS);
#if CODEBOOK
          const float k = levels_of_keys[code] * by;
#else
          const float k = (float)code * by + bias;
#endif
          UNROLL
          for (int m = 0; m < VECTORS; m++) sums[m] += q_of[m * K_DIM + run * 32 + j] * k;
        }
      }
#endif
      UNROLL
      for (int m = 0; m < VECTORS; m++) scores[(slice * VECTORS + m) * 64 + index % 64] = sums[m];
    }
#else
    // A SIMD group has four keys at a time, a lane every 32nd of their elements.
    for (int j = warp * 4; j < 64; j += THREADS / 32 * 4) {
      size_t at[4];
      float sums[4][VECTORS];
      UNROLL
      for (int n = 0; n < 4; n++) {
        const int key = key0 + j + n;
        const int near = key < low ? low : key < high ? key : high - 1;
        at[n] = (HEAD_BLOCK(near) * BLOCK + near % BLOCK) * K_DIM;
        UNROLL
        for (int m = 0; m < VECTORS; m++) sums[n][m] = 0.0f;
      }
      for (int d = lane; d < K_DIM; d += 32) {
        UNROLL
        for (int n = 0; n < 4; n++) {
          const float k = (float)keys[at[n] + d];
          UNROLL
          for (int m = 0; m < VECTORS; m++) sums[n][m] += q_of[m * K_DIM + d] * k;
        }
      }
      UNROLL
      for (int n = 0; n < 4; n++) {
        UNROLL
        for (int m = 0; m < VECTORS; m++) {
          const float sum = sum_of_lanes(sums[n][m]);
          if (lane == 0) scores[m * 64 + j + n] = sum;
        }
      }
    }
#endif
    BARRIER();

    UNROLL
    for (int turn = 0; turn < TURNS; turn++) {
      const int m = turn * (THREADS / 32) + warp;
      if (EXISTS(m)) {
        const int row = row0 + m / PART;
        const int from = visible[row * 2] > low ? visible[row * 2] : low;
        const int to = visible[row * 2 + 1] < high ? visible[row * 2 + 1] + 1 : high;
        float x[2];
        UNROLL
        for (int h = 0; h < 2; h++) {
          const int j = h * 32 + lane, key = key0 + j;
          float score = 0.0f;
          UNROLL
          for (int s = 0; s < SLICES; s++) score += scores[(s * VECTORS + m) * 64 + j];
          score *= scale;
          if (CAPPED) score = cap * TANH(score / cap);
          x[h] = key >= from && key < to ? score : -1e30f;
        }
        const float here = max_of_lanes(x[0] > x[1] ? x[0] : x[1]);
        const float now = here > most[turn] ? here : most[turn];
        UNROLL
        for (int h = 0; h < 2; h++) {
          x[h] = x[h] > -1e29f ? EXP2(x[h] - now) : 0.0f;
          weights[(h * 32 + lane) * VECTORS + m] = x[h];
        }
        const float before = EXP2(most[turn] - now);
        total[turn] = total[turn] * before + sum_of_lanes(x[0] + x[1]);
        most[turn] = now;
        if (lane == 0) kept[m] = before;
      }
    }
    BARRIER();

    UNROLL
    for (int m = 0; m < VECTORS; m++) {
      UNROLL
      for (int n = 0; n < OWN; n++) out[m][n] *= kept[m];
    }
    const int from = low > key0 ? low : key0, past = high < key0 + 64 ? high : key0 + 64;
    const int to = HAS_ELEMENT(0) ? past : from;
    const size_t start = HEAD_BLOCK(from) * BLOCK + from % BLOCK;
    UNROLL_4
    for (int key = from; key < to; key++) {
      // 64 keys lie together where blocks are no shorter.
      const size_t token = BLOCK % 64 == 0 ? start + (key - from) : HEAD_BLOCK(key) * BLOCK + key % BLOCK;
#if CODED
      const size_t group = token * (V_DIM / V_GROUP) + ELEMENT(0) / V_GROUP;
      const float by = (float)value_scales[group];
#if !CODEBOOK
      const float bias = (float)value_biases[group];
#endif
#endif
      UNROLL
      for (int n = 0; n < OWN; n++) {
        if (HAS_ELEMENT(n)) {
#if CODED
          const unsigned code = CODE(values, token * (V_DIM * V_BITS / 32), ELEMENT(n) * V_BITS, V_BITS);
#if CODEBOOK
          const float v = levels_of_values[code] * by;
#else
          const float v = (float)code * by + bias;
#endif
#else
          const float v = (float)values[token * V_STRIDE + ELEMENT(n)];
#endif
          UNROLL
          for (int m = 0; m < VECTORS; m++) out[m][n] += weights[(key - key0) * VECTORS + m] * v;
        }
      }
    }
  }

  UNROLL
  for (int m = 0; m < VECTORS; m++) {
    UNROLL
    for (int n = 0; n < OWN; n++) {
      const int d = ELEMENT(n);
      if (EXISTS(m) && HAS_ELEMENT(n)) partial[(HEAD_ROW(m) * splits + group_z) * V_DIM + d] = out[m][n];
    }
  }
  UNROLL
  for (int turn = 0; turn < TURNS; turn++) {
    const int m = turn * (THREADS / 32) + warp;
    if (EXISTS(m) && lane == 0) {
      stats[(HEAD_ROW(m) * splits + group_z) * 2] = most[turn];
      stats[(HEAD_ROW(m) * splits + group_z) * 2 + 1] = total[turn];
    }
  }
