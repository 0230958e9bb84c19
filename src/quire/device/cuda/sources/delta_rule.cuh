  // The gated delta rule (arXiv:2412.06464), token by token. Eight lanes share OWN rows of a head's state and take
  // all rows of a sequence: `count` of them, from row `first` on, with the state in `slot` before (zeros if it
  // is negative). `keep` stores the state after them in a slot of `to`. mixed [T, queries, keys, values], as they were
  // projected; y [T, HEADS, VALUE_DIM]; state [slots, HEADS, VALUE_DIM, KEY_DIM]. BY_CHANNEL: each column
  // of a state forgets by itself. A token's operands are read while the one before is computed.
  // A lane has four neighbouring columns of every 32. A state's products with key and query are taken before the
  // token changes it: S' = a S + d k^T gives S' q = a (S q) + (k q) d.
  // Up to DEFERRED updates (a, d, k) of a state wait beside it: reading it makes them up, by the arithmetic that would
  // have made them at once. Where the caller `defers`, a sequence's only token leaves its own there, and the state as it
  // is. changes [slots, HEADS, VALUE_DIM, 1 + DEFERRED]: how many wait, then the d of each; change_keys [slots, DEFERRED,
  // KEY_HEADS, KEY_DIM]; change_factors [slots, HEADS, 1 + DEFERRED]: unused, then the a of each.
  // CONVOLVED: mixed are inputs of a causal convolution with `taps` and `bias`. A thread has four of the channels that its
  // thread block reads, and shares their results. Thread blocks of a key head read the same inputs of earlier tokens: that
  // which is the last to have read them stores the new ones. inputs [slots, TAPS - 1, channels]; arrivals, 0 [T, KEY_HEADS].
  constexpr int PIECES = (KEY_DIM + 31) / 32, COLUMNS = 4 * PIECES;
  const int part = threadIdx.x & 7, warp = threadIdx.x >> 5;
  const int head = blockIdx.x / PARTS;
  const int v0 = ((blockIdx.x % PARTS * WARPS + warp) * 4 + (threadIdx.x & 31) / 8) * OWN;
  const int key_head = head / (HEADS / KEY_HEADS);
  const bool idle = !count || v0 >= VALUE_DIM;
  using State = typename Bare<decltype(*state)>::Type;
  using Mixed = typename Bare<decltype(*mixed)>::Type;
  const auto column = [&](int piece) { return piece * 32 + part * 4; };
  const auto place = [&](int slot, int v, int piece) {
    return (((size_t)slot * HEADS + head) * VALUE_DIM + v0 + v) * KEY_DIM + column(piece);
  };
  // Reads of the state are on their way before any other, which would delay them where registers are scarce.
  float kept[OWN][COLUMNS];
  if (!idle) {
    #pragma unroll
    for (int v = 0; v < OWN; v++)
      #pragma unroll
      for (int piece = 0; piece < PIECES; piece++) {
        Pack<State, 4> found[1];
        load<State, 4, 4>(found, state + place(max(slot, 0), v, piece), slot >= 0 && column(piece) < KEY_DIM);
        #pragma unroll
        for (int i = 0; i < 4; i++) kept[v][piece * 4 + i] = number(found[0].at[i]);
      }
  }
#if DEFERRED
  // A warp copies what waits for its rows to memory of its own.
  using Key = typename Bare<decltype(*change_keys)>::Type;
  constexpr int WAITING = 1 + DEFERRED, LINES = KEY_DIM * (int)sizeof(Key) / 16;
  __shared__ __align__(16) Key waiting_keys[WARPS][DEFERRED][KEY_DIM];
  __shared__ __align__(16) float waiting[WARPS][4 * OWN + 1][WAITING];  // the last one: factors
  const int lane = threadIdx.x & 31;
  const auto changes_at = [&](int slot, int v) { return changes + (((size_t)slot * HEADS + head) * VALUE_DIM + v) * WAITING; };
  const auto keys_at = [&](int slot, int n) { return change_keys + (((size_t)slot * DEFERRED + n) * KEY_HEADS + key_head) * KEY_DIM; };
  const auto factors_at = [&](int slot) { return change_factors + ((size_t)slot * HEADS + head) * WAITING; };
  const bool waits = !idle && slot >= 0;
  __syncwarp();
  if (waits) {
    for (int i = lane; i < OWN * WAITING; i += 32)
      copy_ahead((uint4*)waiting[warp] + i, (const uint4*)changes_at(slot, v0 - lane / 8 * OWN) + i);
    for (int i = lane; i < DEFERRED * LINES; i += 32)
      copy_ahead((uint4*)waiting_keys[warp] + i, (const uint4*)keys_at(slot, i / LINES) + i % LINES);
    if (lane < WAITING / 4) copy_ahead((uint4*)waiting[warp][4 * OWN] + lane, (const uint4*)factors_at(slot) + lane);
  }
#endif
#if CONVOLVED
  constexpr int ROWS = WARPS * 4 * OWN, LOCAL = 2 * KEY_DIM + ROWS, SHARING = HEADS / KEY_HEADS * PARTS;
  constexpr int QUERIES = KEY_HEADS * KEY_DIM, CHANNELS = 2 * QUERIES + HEADS * VALUE_DIM;
  using Inputs = Pack<Mixed, 4>;
  __shared__ __align__(16) float results[2][LOCAL];
  __shared__ Inputs window[TAPS][LOCAL / 4], own_taps[TAPS][LOCAL / 4];  // a thread reads what it has copied
  __shared__ int arrived;
  const int local = threadIdx.x * 4, value_at = blockIdx.x % PARTS * ROWS;
  const int channel = local < KEY_DIM       ? key_head * KEY_DIM + local
                      : local < 2 * KEY_DIM ? QUERIES + key_head * KEY_DIM + local - KEY_DIM
                                            : 2 * QUERIES + head * VALUE_DIM + value_at + local - 2 * KEY_DIM;
  const bool convolves = !idle && local < LOCAL;
  const auto input_at = [&](int slot, int n) { return inputs + ((size_t)slot * (TAPS - 1) + n) * CHANNELS + channel; };
  if (convolves)
    #pragma unroll
    for (int n = 0; n < TAPS; n++) {
      copy_half_ahead(&own_taps[n][threadIdx.x], taps + channel * TAPS + n * 4);
      if (n == TAPS - 1) continue;
      if (slot >= 0) copy_half_ahead(&window[n][threadIdx.x], input_at(slot, n));
      else window[n][threadIdx.x] = Inputs{};
    }
#endif
#if DEFERRED || CONVOLVED
  end_turn();
#endif
  wait_for_others();
  if (idle) return;
  float rate = 0.f;
  const auto forgotten = [&](float x) {
    if (BOUNDED) return expf(MOST_FORGOTTEN * sigmoid(rate * x));
    return expf(-rate * (fmaxf(x, 0.f) + log1pf(expf(-fabsf(x)))));
  };
#if !CONVOLVED
  Pack<Mixed, 4> next_query[PIECES], next_key[PIECES];
  float next_value[OWN];
#endif
  float next_beta, next_step = 0.f;
  const auto read_token = [&](int row) {
    const auto* from = mixed + (size_t)row * MIXED_ROW;
#if CONVOLVED
    if (convolves) copy_half_ahead(&window[TAPS - 1][threadIdx.x], from + channel);
    end_turn();
#else
    #pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      const auto* own = from + key_head * KEY_DIM + column(piece);
      load<Mixed, 4, 4>(next_query + piece, own, column(piece) < KEY_DIM);
      load<Mixed, 4, 4>(next_key + piece, own + KEY_HEADS * KEY_DIM, column(piece) < KEY_DIM);
    }
    #pragma unroll
    for (int v = 0; v < OWN; v++)
      next_value[v] = number(from[2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v0 + v]);
#endif
    next_beta = number(betas[(size_t)row * BETAS_ROW + head]);
    if (!BY_CHANNEL) next_step = number(steps[(size_t)row * STEPS_ROW + head]) + number(step_biases[head]);
  };
  read_token(first);
  rate = expf(number(log_rates[head]));
#if DEFERRED
  int updates = 0;
  if (waits) {
    await_turns<0>();
    __syncwarp();
    const float (*const own)[WAITING] = waiting[warp] + lane / 8 * OWN;
    updates = (int)own[0][0];
    #pragma unroll 1
    for (int n = 0; n < updates; n++) {
      const float factor = waiting[warp][4 * OWN][1 + n];
      #pragma unroll
      for (int piece = 0; piece < PIECES; piece++) {
        Pack<Key, 4> key[1];
        load<Key, 4, 4>(key, waiting_keys[warp][n] + column(piece), column(piece) < KEY_DIM);
        #pragma unroll
        for (int v = 0; v < OWN; v++)
          #pragma unroll
          for (int i = 0; i < 4; i++) {
            float& at = kept[v][piece * 4 + i];
            at = fmaf(own[v][1 + n], number(key[0].at[i]), factor * at);
          }
      }
    }
  }
  __syncwarp();
  const bool defer = defers && updates < DEFERRED;
#else
  constexpr bool defer = false;
#endif
  for (int row = first; row < first + count; row++) {
#if CONVOLVED
    float* const result = results[(row - first) % 2];
    if (convolves) {
      await_turns<0>();
      Inputs given[TAPS], tapped[TAPS];
      #pragma unroll
      for (int n = 0; n < TAPS; n++) given[n] = window[n][threadIdx.x], tapped[n] = own_taps[n][threadIdx.x];
      #pragma unroll
      for (int n = 1; n < TAPS; n++) window[n - 1][threadIdx.x] = given[n];
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        float own[TAPS], tap[TAPS];
        #pragma unroll
        for (int n = 0; n < TAPS; n++) {
          own[n] = number(given[n].at[i]);
          tap[n] = number(tapped[(i * TAPS + n) / 4].at[(i * TAPS + n) % 4]);
        }
        result[local + i] = ROUNDED(convolved(own, tap, BIASED ? number(bias[channel + i]) : 0.f));
      }
    }
    __syncthreads();
    if (row == first && threadIdx.x == 0) {  // all threads have read the inputs of earlier tokens
      int* const counter = arrivals + sequence * KEY_HEADS + key_head;
      arrived = atomicAdd(counter, 1);
      if (arrived == SHARING - 1) *counter = 0;
    }
    const auto query_at = [&](int c) { return result[column(c / 4) + c % 4]; };
    const auto key_at = [&](int c) { return result[KEY_DIM + column(c / 4) + c % 4]; };
    const auto value_of = [&](int v) { return result[2 * KEY_DIM + v0 - value_at + v]; };
#else
    const auto query_at = [&](int c) { return number(next_query[c / 4].at[c % 4]); };
    const auto key_at = [&](int c) { return number(next_key[c / 4].at[c % 4]); };
    const auto value_of = [&](int v) { return next_value[v]; };
#endif
    float query[COLUMNS], key[COLUMNS], value[OWN], lengths[3] = {};  // also the product of both
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const bool inside = !CONVOLVED || column(c / 4) < KEY_DIM;
      query[c] = inside ? query_at(c) : 0.f;
      key[c] = inside ? key_at(c) : 0.f;
      lengths[0] += query[c] * query[c];
      lengths[1] += key[c] * key[c];
      lengths[2] += query[c] * key[c];
    }
    #pragma unroll
    for (int v = 0; v < OWN; v++) value[v] = value_of(v);
    const float beta = MOST_CORRECTION * sigmoid(next_beta), left = BY_CHANNEL ? 1.f : forgotten(next_step);
    if (row + 1 < first + count) read_token(row + 1);
    if (BY_CHANNEL)
      #pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        const int k = column(c / 4) + c % 4, at = head * KEY_DIM + k;
        const float own = k < KEY_DIM ? forgotten(number(steps[(size_t)row * STEPS_ROW + at]) + number(step_biases[at])) : 0.f;
        #pragma unroll
        for (int v = 0; v < OWN; v++) kept[v][c] *= own;
      }
    sum_up<8, 3>(lengths, (float*)0);
    const float query_scale = rsqrtf(lengths[0] + UNIT_EPS) * rsqrtf((float)KEY_DIM), key_scale = rsqrtf(lengths[1] + UNIT_EPS);
    float found[2 * OWN] = {};  // products with the key, then those with the query
    #pragma unroll
    for (int v = 0; v < OWN; v++)
      #pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        found[v] += kept[v][c] * key[c];
        found[OWN + v] += kept[v][c] * query[c];
      }
    sum_up<8, 2 * OWN>(found, (float*)0);
    float change[OWN];
    #pragma unroll
    for (int v = 0; v < OWN; v++) {
      change[v] = (value[v] - left * key_scale * found[v]) * beta * key_scale;
      const float read = fmaf(change[v], lengths[2], left * found[OWN + v]) * query_scale;
      if (part == v) put(y[((size_t)row * HEADS + head) * VALUE_DIM + v0 + v], read);
    }
    if (!defer) {
      #pragma unroll
      for (int v = 0; v < OWN; v++)
        #pragma unroll
        for (int c = 0; c < COLUMNS; c++) kept[v][c] = fmaf(change[v], key[c], left * kept[v][c]);
      continue;
    }
#if DEFERRED
    #pragma unroll
    for (int v = 0; v < OWN; v++) {
      float* const own = changes_at(slot, v0 + v);
      if (part == v) own[0] = updates + 1, own[1 + updates] = change[v];
    }
    if (v0 > 0) continue;
    if (part == 0) factors_at(slot)[1 + updates] = left;
    if (head % (HEADS / KEY_HEADS) > 0) continue;
    #pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      Pack<Key, 4> own[1];
      #pragma unroll
      for (int i = 0; i < 4; i++) put(own[0].at[i], key[piece * 4 + i]);
      if (column(piece) < KEY_DIM) store<Key, 4, 4>(keys_at(slot, updates) + column(piece), own);
    }
#endif
  }
  const auto keep = [&](int slot) {
#if DEFERRED
    #pragma unroll
    for (int v = 0; v < OWN; v++)
      if (part == v) *changes_at(slot, v0 + v) = 0.f;
#endif
    #pragma unroll
    for (int v = 0; v < OWN; v++)
      #pragma unroll
      for (int piece = 0; piece < PIECES; piece++) {
        Pack<State, 4> own[1];
        #pragma unroll
        for (int i = 0; i < 4; i++) put(own[0].at[i], kept[v][piece * 4 + i]);
        if (column(piece) < KEY_DIM) store<State, 4, 4>(to + place(slot, v, piece), own);
      }
  };
#if CONVOLVED
  const auto keep_inputs = [&] {
    __syncthreads();
    if (!convolves || (local < 2 * KEY_DIM && arrived < SHARING - 1)) return;
    #pragma unroll 1
    for (int n = 0; n < TARGETS; n++)
      #pragma unroll
      for (int i = 0; i < TAPS - 1; i++)
        if (own_targets[n] >= 0) *(Inputs*)input_at(own_targets[n], i) = window[i][threadIdx.x];
  };
#endif
