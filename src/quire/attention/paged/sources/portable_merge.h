  // Joins what the splits of a row and head found, and with TAIL what its own block as written gave,
  // which stays apart: the two have different coordinates. One thread group for each row and head.
  //
  // partial [T, HEADS, splits, V_DIM], stats [T, HEADS, splits, 2]
  // tail_partial [T, HEADS, 1, V_DIM], tail_stats [T, HEADS, 1, 2]
  // sizes: [0] splits; sinks [HEADS], logits
  // signs [V_DIM]: with TURNED what the codes gave is turned back by a Hadamard transform and these
  // result, tail_result [T, HEADS, V_DIM]
  const int found = sizes[0];
  const size_t place = group_x;
  float most = -1e30f;
#if SINKS
  const float sink = (float)sinks[place % HEADS] * 1.4426950408889634f;
  most = sink;
#endif
  for (int s = 0; s < found; s++) {
    const float x = stats[(place * found + s) * 2];
    most = x > most ? x : most;
  }
#if TAIL
  most = tail_stats[place * 2] > most ? tail_stats[place * 2] : most;
#endif
  float total = 0.0f, out[OWN];
  UNROLL
  for (int n = 0; n < OWN; n++) out[n] = 0.0f;
  for (int s = 0; s < found; s++) {
    const size_t at = place * found + s;
    const float sum = stats[at * 2 + 1];
    if (sum > 0.0f) {  // else nothing was written
      const float weight = EXP2(stats[at * 2] - most);
      total += sum * weight;
      UNROLL
      for (int n = 0; n < OWN; n++) {
        const int d = n * THREADS + index;
        if (d < V_DIM) out[n] += weight * partial[at * V_DIM + d];
      }
    }
  }
#if SINKS
  total += EXP2(sink - most);
#endif
#if TAIL
  const float of_tail = EXP2(tail_stats[place * 2] - most);
  total += tail_stats[place * 2 + 1] * of_tail;
#endif
#if TURNED
  SHARED float turned[V_DIM];
  UNROLL
  for (int n = 0; n < OWN; n++) {
    const int d = n * THREADS + index;
    if (d < V_DIM) turned[d] = out[n];
  }
  TURN(turned, V_DIM, V_DIM)
  UNROLL
  for (int n = 0; n < OWN; n++) {
    const int d = n * THREADS + index;
    if (d < V_DIM) out[n] = turned[d] * signs[d];
  }
#endif
  UNROLL
  for (int n = 0; n < OWN; n++) {
    const int d = n * THREADS + index;
    if (d < V_DIM) {
      result[place * V_DIM + d] = (T)(out[n] / total);
#if TAIL
      tail_result[place * V_DIM + d] = (T)(of_tail * tail_partial[place * V_DIM + d] / total);
#endif
    }
  }
