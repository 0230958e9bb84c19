  // A causal convolution over the last TAPS tokens of each channel, a thread a channel. Thread blocks of
  // a sequence's first row take all its rows, AHEAD of which are read at a time. y [T, CHANNELS]; state [slots, TAPS - 1, CHANNELS].
  const int c = blockIdx.x * THREADS + threadIdx.x, first = blockIdx.y;
  const int count = first < *rows && c < CHANNELS ? counts[first] : 0;
  float window[TAPS], tap[TAPS];
  if (count) {
    const int slot = sources[first];
    #pragma unroll
    for (int i = 0; i < TAPS - 1; i++)
      window[i] = slot < 0 ? 0.f : number(state[((size_t)slot * (TAPS - 1) + i) * CHANNELS + c]);
    #pragma unroll
    for (int i = 0; i < TAPS; i++) tap[i] = number(taps[c * TAPS + i]);
  }
  wait_for_others();
  if (!count) return;
  constexpr int AHEAD = 16;
  for (int row = first; row < first + count; row += AHEAD) {
    float next[AHEAD];
    #pragma unroll
    for (int i = 0; i < AHEAD; i++)
      next[i] = row + i < first + count ? number(x[(size_t)(row + i) * X_ROW + c]) : 0.f;
    #pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (row + i >= first + count) break;
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
    const int slot = targets[first * TARGETS + n];
    if (slot < 0) continue;
    #pragma unroll
    for (int i = 0; i < TAPS - 1; i++) put(state[((size_t)slot * (TAPS - 1) + i) * CHANNELS + c], window[i]);
  }
