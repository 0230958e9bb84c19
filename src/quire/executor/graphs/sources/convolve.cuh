  // A causal convolution over the last TAPS tokens of each channel, of a sequence's rows from `begin` to `end`, AHEAD of
  // which are read at a time. A thread has EACH neighbouring channels. Threads of a sequence's first row store its state,
  // which no others read. y [T, CHANNELS]; state [slots, TAPS - 1, CHANNELS].
  const int c = (blockIdx.x * THREADS + threadIdx.x) * EACH;
  const bool idle = !count || c >= CHANNELS;
  const int beyond = first + count, earlier = begin - (TAPS - 1), latest = beyond - (TAPS - 1);
  const bool starts = begin == first;
  Channels<EACH> window[TAPS], kept[TAPS - 1];
  float tap[EACH][TAPS], offset[EACH];
  if (!idle) {
    const int slot = sources[sequence];
    // An input before the sequence's rows.
    const auto stored = [&](int row) {
      return slot < 0 ? Channels<EACH>{} : read_channels<EACH>(state + ((size_t)slot * (TAPS - 1) + TAPS - 1 + row - first) * CHANNELS + c);
    };
    #pragma unroll
    for (int i = 0; i < TAPS - 1; i++) {
      if (earlier + i < first) window[i] = stored(earlier + i);
      if (starts && latest + i < first) kept[i] = stored(latest + i);
    }
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
      #pragma unroll
      for (int i = 0; i < TAPS; i++) tap[e][i] = number(taps[(c + e) * TAPS + i]);
      if (BIASED) offset[e] = number(bias[c + e]);
    }
  }
  wait_for_others();
  if (idle) return;
  #pragma unroll
  for (int i = 0; i < TAPS - 1; i++) {
    if (earlier + i >= first) window[i] = read_channels<EACH>(x + (size_t)(earlier + i) * X_ROW + c);
    if (starts && latest + i >= first) kept[i] = read_channels<EACH>(x + (size_t)(latest + i) * X_ROW + c);
  }
  for (int row = begin; row < end; row += AHEAD) {
    Channels<EACH> next[AHEAD];
    #pragma unroll
    for (int i = 0; i < AHEAD; i++) next[i] = read_channels<EACH>(x + (size_t)min(row + i, end - 1) * X_ROW + c);
    #pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (row + i >= end) break;
      window[TAPS - 1] = next[i];
      Channels<EACH> result;
      #pragma unroll
      for (int e = 0; e < EACH; e++) {
        float inputs[TAPS];
        #pragma unroll
        for (int n = 0; n < TAPS; n++) inputs[n] = window[n].at[e];
        result.at[e] = convolved(inputs, tap[e], BIASED ? offset[e] : 0.f);
      }
      write_channels(y + (size_t)(row + i) * CHANNELS + c, result);
      #pragma unroll
      for (int n = 0; n < TAPS - 1; n++) window[n] = window[n + 1];
    }
  }
  for (int n = 0; starts && n < TARGETS; n++) {
    const int slot = targets[sequence * TARGETS + n];
    if (slot < 0) continue;
    #pragma unroll
    for (int i = 0; i < TAPS - 1; i++) write_channels(state + ((size_t)slot * (TAPS - 1) + i) * CHANNELS + c, kept[i]);
  }
