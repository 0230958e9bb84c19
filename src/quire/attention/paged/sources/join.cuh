  // Joins the splits of a row's coded blocks and its own block, as written. With TURNED the coded part is in
  // coordinates of its own, and is turned back first. One thread block for each row and head.
  __shared__ Weights weights;
  __shared__ float x[V_DIM];
  const size_t place = blockIdx.x;
  const float sink = SINKS ? (float)sinks[place % HEADS] * 1.4426950408889634f : -1e30f;
  const int d0 = threadIdx.x * ELEMENTS;
  const float* const found = partial + place * splits * V_DIM + d0;
  const FirstElements first = first_elements(found, d0 < V_DIM ? splits : 0);
  weigh(&weights, stats + place * splits * 2, splits, own_stats + place * 2, sink);
  __syncthreads();
  if (d0 < V_DIM) {
    const Elements sum = joined_elements(first, found, &weights);
    #pragma unroll
    for (int e = 0; e < ELEMENTS; e++) x[d0 + e] = sum.x[e];
  }
#if TURNED
  transform_runs(x);
#else
  __syncthreads();
#endif
  for (int d = threadIdx.x; d < V_DIM; d += blockDim.x) {
#if TURNED
    const float coded = across_runs(x, d) * rsqrtf((float)V_DIM) * signs[d];
#else
    const float coded = x[d];
#endif
    result[place * V_DIM + d] = (T)(coded + weights.of[64] * own_partial[place * V_DIM + d]);
  }
