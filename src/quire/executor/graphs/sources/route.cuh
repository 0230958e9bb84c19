  // The TOP best of EXPERT_COUNT experts of each row, and their weights, as the routers of
  // `models/layers/routers.py` say: the last of equal ones. A warp a row.
  // SCORES: 0 softmax, 1 sigmoid, 2 SparseMixer. PROBABLE: softmax ranks probabilities, not logits.
  // ALONE: there is one row, whose pairs are tiles of their own in `order` and `tiles`, see `group.cuh`.
  // OPEN of GROUPS groups of experts are open to a row, ranked by the sum of their COUNTED best.
  constexpr int EACH = (EXPERT_COUNT + 31) / 32;
  const float NOTHING = __int_as_float(0xff800000);
  {
    const int lane = threadIdx.x & 31;
    const int warps = blockDim.x >> 5, count = *rows;
    wait_for_others();
    const auto logit_of = [&](int row, int expert) {
      const float x = (float)logits[(size_t)row * EXPERT_COUNT + expert];
      return CAPPED ? tanhf(x / CAP) * CAP : x;
    };
    [[maybe_unused]] const auto score_of = [](float logit) { return SCORES == 1 ? 1.f / (1.f + expf(-logit)) : logit; };
    for (int row = blockIdx.x * warps + (threadIdx.x >> 5); row < count; row += gridDim.x * warps) {
      [[maybe_unused]] float score[EACH], rank[EACH];
      #pragma unroll
      for (int e = 0; e < EACH; e++) {
        const int expert = e * 32 + lane;
        const float x = expert < EXPERT_COUNT ? logit_of(row, expert) : NOTHING;
        score[e] = rank[e] = x;
      }
      float all = 0.f, most = NOTHING;
#if SCORES == 0 && (PROBABLE || !NORMALISE)
      #pragma unroll
      for (int e = 0; e < EACH; e++) most = fmaxf(most, score[e]);
      for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, by));
      #pragma unroll
      for (int e = 0; e < EACH; e++) all += __expf(score[e] - most);
      for (int by = 16; by > 0; by /= 2) all += __shfl_xor_sync(0xffffffffu, all, by);
#endif
      #pragma unroll
      for (int e = 0; e < EACH; e++) {
        const int expert = e * 32 + lane;
        if (expert >= EXPERT_COUNT) continue;
#if SCORES == 1
        score[e] = score_of(score[e]);
        if (PROBABLE) rank[e] = score[e];
#elif SCORES == 0 && PROBABLE
        rank[e] = expf(score[e] - most) / all;
#endif
#if CORRECTED
        rank[e] += (float)correction[expert];
#endif
      }
#if OPEN < GROUPS
      float worth = NOTHING;  // of the group whose number is the lane's
      #pragma unroll 1
      for (int group = 0; group < GROUPS; group++) {
        unsigned counted = 0;  // of this lane's experts, a bit each
        float sum = 0.f;
        for (int n = 0; n < COUNTED; n++) {
          float best = NOTHING;
          int at = -1;
          #pragma unroll
          for (int e = 0; e < EACH; e++)
            if ((e * 32 + lane) / (EXPERT_COUNT / GROUPS) == group && !(counted >> e & 1) && rank[e] > best) {
              best = rank[e];
              at = e;
            }
          float most_of_all = best;
          int owner = lane;
          for (int by = 16; by > 0; by /= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, most_of_all, by);
            const int other_owner = __shfl_xor_sync(0xffffffffu, owner, by);
            if (other > most_of_all || (other == most_of_all && other_owner < owner)) {
              most_of_all = other;
              owner = other_owner;
            }
          }
          if (owner == lane && at >= 0) counted |= 1u << at;
          sum += most_of_all;
        }
        if (lane == group) worth = sum;
      }
      int before = 0;
      for (int group = 0; group < GROUPS; group++) {
        const float other = __shfl_sync(0xffffffffu, worth, group);
        before += other > worth || (other == worth && group < lane);
      }
      float least = lane < GROUPS && before == OPEN - 1 ? worth : NOTHING;
      for (int by = 16; by > 0; by /= 2) least = fmaxf(least, __shfl_xor_sync(0xffffffffu, least, by));
      #pragma unroll
      for (int e = 0; e < EACH; e++) {
        const int group = (e * 32 + lane) / (EXPERT_COUNT / GROUPS);
        const float own = __shfl_sync(0xffffffffu, worth, group & 31);
        if (!(own >= least)) rank[e] = NOTHING;
      }
#endif
      // Integers in the order of ranks, of which a warp finds the largest at once.
      const auto place_of = [](float x) {
        const int bits = (int)__float_as_uint(x + 0.f);  // of -0 as of 0
        return bits ^ (bits >> 31 & 0x7FFFFFFF);
      };
      const int last = place_of(NOTHING);
      int place[EACH];
      #pragma unroll
      for (int e = 0; e < EACH; e++) place[e] = rank[e] > NOTHING ? place_of(rank[e]) : last;
      float own = NOTHING;
      int own_expert = 0;
      for (int k = 0; k < TOP; k++) {
        int best = last, expert = 0;
        #pragma unroll
        for (int e = 0; e < EACH; e++) best = max(best, place[e]);
        best = __reduce_max_sync(0xffffffffu, best);
        #pragma unroll
        for (int e = 0; e < EACH; e++)
          if (place[e] == best) expert = e * 32 + lane;
        expert = __reduce_max_sync(0xffffffffu, expert);
        // Whatever the logits are: all experts that are named exist, and none is named twice.
        if (best == last) expert = k;
#if SCORES == 2
        float rivals = 0.f, most_rank = __uint_as_float(best ^ (best >> 31 & 0x7FFFFFFF));
        #pragma unroll
        for (int e = 0; e < EACH; e++) {
          const float distance = (most_rank - score[e]) / fmaxf(fabsf(score[e]), most_rank);
          if (place[e] > last && !(distance > 2.f * JITTER)) rivals += expf(rank[e] - most_rank);
        }
        for (int by = 16; by > 0; by /= 2) rivals += __shfl_xor_sync(0xffffffffu, rivals, by);
        if (lane == k) own = 1.f / rivals;
#endif
        #pragma unroll
        for (int e = 0; e < EACH; e++)
          if (e * 32 + lane == expert) place[e] = last;
        if (lane == k) own_expert = expert;
      }
#if SCORES < 2
      if (lane < TOP) own = score_of(logit_of(row, own_expert));
#endif
      float weight = lane < TOP ? own : 0.f;
#if SCORES == 0 && NORMALISE
      float top = own;
      for (int by = 16; by > 0; by /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, by));
      weight = lane < TOP ? __expf(own - top) : 0.f;
#elif SCORES == 0
      weight = lane < TOP ? __expf(own - most) / all : 0.f;
#endif
#if NORMALISE
      float sum = weight;
      for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
      weight = weight / (SCORES == 1 ? sum + 1e-20f : sum);
#endif
      if (lane < TOP) {
        weight *= SCALE;
        if (PER_EXPERT) weight *= (float)per_expert[own_expert];
        chosen[row * TOP + lane] = own_expert;
        weights[row * TOP + lane] = __bfloat162float(__float2bfloat16(weight));
#if ALONE
        order[lane] = lane;
        tiles[lane * 3] = own_expert;
        tiles[lane * 3 + 1] = lane;
        tiles[lane * 3 + 2] = 1;
#endif
      }
    }
  }
