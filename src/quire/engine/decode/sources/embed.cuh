  // Rows of the embedding table by token, from codes of 4 bits, times MULTIPLIER; and their norms.
  const int row = blockIdx.x;
  if (row >= *rows) return;
  const size_t token = tokens[row];
  uint4 weight[PER];
  load(weight, norm0);
  float v[PER][8];
  #pragma unroll
  for (int p = 0; p < PER; p++) {
    const int at = threadIdx.x + p * THREADS;
    const bool inside = at < EIGHTS;
    const unsigned word = inside ? codes[token * EIGHTS + at] : 0u;
    const size_t group = token * (HIDDEN / GROUP) + (inside ? at * 8 / GROUP : 0);
    const float scale = inside ? (float)scales[group] : 0.f, bias = inside ? (float)biases[group] : 0.f;
    #pragma unroll
    for (int i = 0; i < 8; i++)
      v[p][i] = rounded(rounded((float)((word >> (4 * i)) & 15u) * scale + bias) * MULTIPLIER);
  }
  store(x + (size_t)row * HIDDEN, v);
  store_normed(out0 + (size_t)row * HIDDEN, v, norm_factor(v), weight);
