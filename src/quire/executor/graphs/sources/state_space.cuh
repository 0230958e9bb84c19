  // A state space, token by token. LANES threads have the STATE numbers of one element of a head; thread
  // blocks of a sequence take all its rows. values and y [T, HEADS, HEAD_DIM]; keys and
  // queries [T, GROUPS, STATE]; steps [T, HEADS]; rates [HEADS], or [HEADS, STATE] where BY_CHANNEL.
  constexpr int EACH = (STATE + LANES - 1) / LANES;
  const int lane = threadIdx.x % LANES;
  const int line = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
  const bool there = line < HEADS * HEAD_DIM;
  const int head = there ? line / HEAD_DIM : 0, group = head / (HEADS / GROUPS);
  float kept[EACH], rate[EACH];
  const int slot = count ? sources[sequence] : -1;
  #pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int k = lane + LANES * e;
    const bool inside = there && k < STATE;
    kept[e] = slot < 0 || !inside ? 0.f : number(state[((size_t)slot * (HEADS * HEAD_DIM) + line) * STATE + k]);
    rate[e] = !inside ? 0.f : BY_CHANNEL ? number(rates[head * STATE + k]) : number(rates[head]);
  }
  wait_for_others();
  if (!count) return;
  for (int row = first; row < first + count; row++) {
    const float step = number(steps[(size_t)row * STEPS_ROW + head]);
    const float value = there ? number(values[(size_t)row * VALUES_ROW + line]) : 0.f;
    const float decay = BY_CHANNEL ? 0.f : expf(rate[0] * step);
    float read[1] = {};
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int k = lane + LANES * e;
      const bool inside = k < STATE;
      const float key = inside ? number(keys[(size_t)row * KEYS_ROW + group * STATE + k]) : 0.f;
      const float query = inside ? number(queries[(size_t)row * QUERIES_ROW + group * STATE + k]) : 0.f;
      kept[e] = kept[e] * (BY_CHANNEL ? expf(rate[e] * step) : decay) + value * key;
      read[0] += kept[e] * query;
    }
    sum_up<LANES, 1>(read, (float*)0);
    if (there && lane == 0) put(y[(size_t)row * (HEADS * HEAD_DIM) + line], read[0]);
  }
  for (int n = 0; there && n < TARGETS; n++) {
    const int to = targets[sequence * TARGETS + n];
    if (to < 0) continue;
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int k = lane + LANES * e;
      if (k < STATE) put(state[((size_t)to * (HEADS * HEAD_DIM) + line) * STATE + k], kept[e]);
    }
  }
