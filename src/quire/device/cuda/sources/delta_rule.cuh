  // The gated delta rule (arXiv:2412.06464), token by token. A warp has OWN rows of a head's state and takes
  // all rows of a sequence: `count` of them, from row `first` on, with the state in `slot` before (zeros if it
  // is negative). `keep` stores the state after them in a slot of `to`. mixed [T, queries, keys, values], as they were
  // projected; y [T, HEADS, VALUE_DIM]; state [slots, HEADS, VALUE_DIM, KEY_DIM]. BY_CHANNEL: each column
  // of a state forgets by itself.
  constexpr int EACH = (KEY_DIM + 31) / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int head = blockIdx.x / PARTS, v0 = (blockIdx.x % PARTS * WARPS + warp) * OWN;
  const int key_head = head / (HEADS / KEY_HEADS);
  const bool idle = !count || v0 >= VALUE_DIM;
  const auto place = [&](int slot, int v, int k) {
    return (((size_t)slot * HEADS + head) * VALUE_DIM + v0 + v) * KEY_DIM + k;
  };
  float kept[OWN][EACH], step_bias[EACH], rate = 0.f;
  if (!idle) {
    #pragma unroll
    for (int v = 0; v < OWN; v++)
      #pragma unroll
      for (int e = 0; e < EACH; e++) {
        const int k = lane + 32 * e;
        kept[v][e] = slot < 0 || k >= KEY_DIM ? 0.f : number(state[place(slot, v, k)]);
      }
    rate = expf(number(log_rates[head]));
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int k = lane + 32 * e;
      step_bias[e] = BY_CHANNEL ? (k < KEY_DIM ? number(step_biases[head * KEY_DIM + k]) : 0.f) : number(step_biases[head]);
    }
  }
  wait_for_others();
  if (idle) return;
  const auto forgotten = [&](float x) {
    if (BOUNDED) return expf(MOST_FORGOTTEN * sigmoid(rate * x));
    return expf(-rate * (fmaxf(x, 0.f) + log1pf(expf(-fabsf(x)))));
  };
  for (int row = first; row < first + count; row++) {
    const auto* from = mixed + (size_t)row * MIXED_ROW;
    float query[EACH], key[EACH], left[EACH], sums[2] = {};
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int k = lane + 32 * e, at = key_head * KEY_DIM + k;
      query[e] = k < KEY_DIM ? number(from[at]) : 0.f;
      key[e] = k < KEY_DIM ? number(from[KEY_HEADS * KEY_DIM + at]) : 0.f;
      sums[0] += query[e] * query[e];
      sums[1] += key[e] * key[e];
    }
    sum_up<32, 2>(sums, (float*)0);
    const float query_scale = rsqrtf(sums[0] + UNIT_EPS) * rsqrtf((float)KEY_DIM), key_scale = rsqrtf(sums[1] + UNIT_EPS);
    const float beta = MOST_CORRECTION * sigmoid(number(betas[(size_t)row * BETAS_ROW + head]));
    const float own = BY_CHANNEL ? 0.f : forgotten(number(steps[(size_t)row * STEPS_ROW + head]) + step_bias[0]);
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int k = lane + 32 * e;
      query[e] *= query_scale;
      key[e] *= key_scale;
      left[e] = own;
      if (BY_CHANNEL && k < KEY_DIM)
        left[e] = forgotten(number(steps[(size_t)row * STEPS_ROW + head * KEY_DIM + k]) + step_bias[e]);
    }
    float found[OWN] = {};
    #pragma unroll
    for (int v = 0; v < OWN; v++)
      #pragma unroll
      for (int e = 0; e < EACH; e++) {
        kept[v][e] *= left[e];
        found[v] += kept[v][e] * key[e];
      }
    sum_up<32, OWN>(found, (float*)0);
    float read[OWN] = {};
    #pragma unroll
    for (int v = 0; v < OWN; v++) {
      const float value = number(from[2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + v0 + v]);
      const float change = (value - found[v]) * beta;
      #pragma unroll
      for (int e = 0; e < EACH; e++) {
        kept[v][e] += change * key[e];
        read[v] += kept[v][e] * query[e];
      }
    }
    sum_up<32, OWN>(read, (float*)0);
    #pragma unroll
    for (int v = 0; v < OWN; v++)
      if (lane == v) put(y[((size_t)row * HEADS + head) * VALUE_DIM + v0 + v], read[v]);
  }
  const auto keep = [&](int slot) {
    #pragma unroll
    for (int v = 0; v < OWN; v++)
      #pragma unroll
      for (int e = 0; e < EACH; e++) {
        const int k = lane + 32 * e;
        if (k < KEY_DIM) put(to[place(slot, v, k)], kept[v][e]);
      }
  };
