  // A causal convolution over the last TAPS tokens of each channel, a thread a channel. Thread blocks of
  // a sequence take all its rows, AHEAD of which are read at a time. y [T, CHANNELS]; state [slots, TAPS - 1, CHANNELS].
  const int c = blockIdx.x * THREADS + threadIdx.x;
  const bool idle = !count || c >= CHANNELS;
  float window[TAPS], tap[TAPS];
  if (!idle) {
    const int slot = sources[sequence];
    #pragma unroll
    for (int i = 0; i < TAPS - 1; i++)
      window[i] = slot < 0 ? 0.f : number(state[((size_t)slot * (TAPS - 1) + i) * CHANNELS + c]);
    #pragma unroll
    for (int i = 0; i < TAPS; i++) tap[i] = number(taps[c * TAPS + i]);
  }
  wait_for_others();
  if (idle) return;
  constexpr int AHEAD = 8;
  const int last = first + count - 1;
  for (int row = first; row <= last; row += AHEAD) {
    float next[AHEAD];
    #pragma unroll
    for (int i = 0; i < AHEAD; i++) next[i] = number(x[(size_t)min(row + i, last) * X_ROW + c]);
    #pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (row + i > last) break;
      window[TAPS - 1] = next[i];
      float sum = 0.f;
      #pragma unroll
      for (int n = 0; n < TAPS; n++) sum += window[n] * tap[n];
      if (BIASED) sum = ROUNDED(sum) + number(bias[c]);
      sum = ROUNDED(sum);
      put(y[(size_t)(row + i) * CHANNELS + c], SILU ? silu(sum) : sum);
      #pragma unroll
      for (int n = 0; n < TAPS - 1; n++) window[n] = window[n + 1];
    }
  }
  for (int n = 0; n < TARGETS; n++) {
    const int slot = targets[sequence * TARGETS + n];
    if (slot < 0) continue;
    #pragma unroll
    for (int i = 0; i < TAPS - 1; i++) put(state[((size_t)slot * (TAPS - 1) + i) * CHANNELS + c], window[i]);
  }
