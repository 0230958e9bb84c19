  // A causal convolution over the last TAPS tokens of each channel, a thread a channel. Thread blocks of
  // a sequence's first row take all its rows. y [T, CHANNELS]; state [slots, TAPS - 1, CHANNELS].
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
  for (int row = first; row < first + count; row++) {
    window[TAPS - 1] = number(x[(size_t)row * X_ROW + c]);
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < TAPS; i++) sum += window[i] * tap[i];
    if (BIASED) sum = ROUNDED(sum) + number(bias[c]);
    sum = ROUNDED(sum);
    put(y[(size_t)row * CHANNELS + c], SILU ? silu(sum) : sum);
    #pragma unroll
    for (int i = 0; i < TAPS - 1; i++) window[i] = window[i + 1];
  }
  for (int n = 0; n < TARGETS; n++) {
    const int slot = targets[first * TARGETS + n];
    if (slot < 0) continue;
    #pragma unroll
    for (int i = 0; i < TAPS - 1; i++) put(state[((size_t)slot * (TAPS - 1) + i) * CHANNELS + c], window[i]);
  }
