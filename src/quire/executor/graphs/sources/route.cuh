  // The TOP best of EXPERT_COUNT experts of each row, and their weights: a softmax over the chosen,
  // or, without NORMALISE, over all. Then `group` puts pairs of row and expert in order. One thread
  // block; a warp a row.
  constexpr int EACH = EXPERT_COUNT / 32;
  const float NOTHING = __int_as_float(0xff800000);
  const int chosen_shape[1] = {*rows * TOP};
  {
    const int lane = threadIdx.x & 31;
    for (int row = threadIdx.x >> 5; row < *rows; row += blockDim.x >> 5) {
      float score[EACH];
      #pragma unroll
      for (int e = 0; e < EACH; e++) score[e] = (float)logits[(size_t)row * EXPERT_COUNT + e * 32 + lane];
      float all = 0.f, most = NOTHING;
#if !NORMALISE
      #pragma unroll
      for (int e = 0; e < EACH; e++) most = fmaxf(most, score[e]);
      for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, by));
      #pragma unroll
      for (int e = 0; e < EACH; e++) all += __expf(score[e] - most);
      for (int by = 16; by > 0; by /= 2) all += __shfl_xor_sync(0xffffffffu, all, by);
#endif
      float own = NOTHING;
      int own_expert = 0;
      for (int k = 0; k < TOP; k++) {
        float best = NOTHING;
        int expert = EXPERT_COUNT;
        #pragma unroll
        for (int e = 0; e < EACH; e++)
          if (score[e] > best) {
            best = score[e];
            expert = e * 32 + lane;
          }
        for (int by = 16; by > 0; by /= 2) {
          const float other = __shfl_xor_sync(0xffffffffu, best, by);
          const int other_expert = __shfl_xor_sync(0xffffffffu, expert, by);
          if (other > best || (other == best && other_expert < expert)) {
            best = other;
            expert = other_expert;
          }
        }
        // Whatever the logits are: all experts that are named exist, and none is named twice.
        if (expert >= EXPERT_COUNT) expert = k;
        #pragma unroll
        for (int e = 0; e < EACH; e++)
          if (e * 32 + lane == expert) score[e] = NOTHING;
        if (lane == k) {
          own = best;
          own_expert = expert;
        }
      }
      const float top = __shfl_sync(0xffffffffu, own, 0);
      float weight = lane < TOP ? __expf(own - top) : 0.f;
#if NORMALISE
      all = weight;
      for (int by = 16; by > 0; by /= 2) all += __shfl_xor_sync(0xffffffffu, all, by);
#else
      weight = lane < TOP ? __expf(own - most) : 0.f;
#endif
      if (lane < TOP) {
        weight = weight / all * SCALE;
#if PER_EXPERT
        weight *= (float)per_expert[own_expert];
#endif
        chosen[row * TOP + lane] = own_expert;
        weights[row * TOP + lane] = __bfloat162float(__float2bfloat16(weight));
      }
    }
  }
  __syncthreads();
