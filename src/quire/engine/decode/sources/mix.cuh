  // What a block gives is added to the residual stream; then the norms that the next blocks read.
  // DENSE: `y`, a row each. TOP: the outputs of so many experts, weighted. Both may have a norm of
  // their own, and so may their sum (POST). SCALED: the sum with the stream is multiplied.
  const int row = blockIdx.x;
  if (row >= *rows) return;
  const size_t begin = (size_t)row * HIDDEN;
  uint4 stream[PER], dense[PER], own[PER], dense_weight[PER], expert_weight[PER], post_weight[PER];
  uint4 weight0[PER], weight1[PER], weight2[PER];
  if (DENSE_NORM) load(dense_weight, dense_norm);
  if (EXPERT_NORM) load(expert_weight, expert_norm);
  if (POST) load(post_weight, post_norm);
  load(weight0, norm0);
  if (OUTS > 1) load(weight1, norm1);
  if (OUTS > 2) load(weight2, norm2);
  wait_for_others();
  load(stream, x + begin);
  if (DENSE) load(dense, y + begin);
  float sum[PER][8], v[PER][8];
  #pragma unroll
  for (int p = 0; p < PER; p++)
    #pragma unroll
    for (int i = 0; i < 8; i++) sum[p][i] = 0.f;
#if TOP
  #pragma unroll
  for (int k = 0; k < TOP; k++) {
    const float share = weights[row * TOP + k];
    load(own, experts + ((size_t)row * TOP + k) * HIDDEN);
    #pragma unroll
    for (int p = 0; p < PER; p++) {
      unpack(own[p], v[p]);
      #pragma unroll
      for (int i = 0; i < 8; i++) sum[p][i] += share * v[p][i];
    }
  }
  #pragma unroll
  for (int p = 0; p < PER; p++)
    #pragma unroll
    for (int i = 0; i < 8; i++) sum[p][i] = rounded(sum[p][i]);
  if (EXPERT_NORM) normed(sum, expert_weight);
#endif
#if DENSE
  #pragma unroll
  for (int p = 0; p < PER; p++) unpack(dense[p], v[p]);
  if (DENSE_NORM) normed(v, dense_weight);
  #pragma unroll
  for (int p = 0; p < PER; p++)
    #pragma unroll
    for (int i = 0; i < 8; i++) sum[p][i] = rounded(sum[p][i] + v[p][i]);
#endif
  if (POST) normed(sum, post_weight);
  #pragma unroll
  for (int p = 0; p < PER; p++) {
    unpack(stream[p], v[p]);
    #pragma unroll
    for (int i = 0; i < 8; i++) {
      v[p][i] = rounded(v[p][i] + sum[p][i]);
      if (SCALED) v[p][i] = rounded(v[p][i] * (float)*scalar);
    }
  }
  store(x + begin, v);
  const float factor = norm_factor(v);
  store_normed(out0 + begin, v, factor, weight0);
  if (OUTS > 1) store_normed(out1 + begin, v, factor, weight1);
  if (OUTS > 2) store_normed(out2 + begin, v, factor, weight2);
