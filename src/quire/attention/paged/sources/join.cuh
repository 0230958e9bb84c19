  // Joins the splits of a row's coded blocks and its own block, as written. The coded part is turned
  // back first: a Hadamard transform and signs. One thread block for each row and head.
  __shared__ Weights weights;
  __shared__ float x[V_DIM];
  const size_t place = blockIdx.x;
  const float sink = SINKS ? (float)sinks[place % HEADS] * 1.4426950408889634f : -1e30f;
  weigh(&weights, stats + place * splits * 2, splits, own_stats + place * 2, sink);
  __syncthreads();
  const int d0 = threadIdx.x * ELEMENTS;
  if (d0 < V_DIM) {
    const Elements sum = joined_elements(partial + place * splits * V_DIM + d0, &weights);
    #pragma unroll
    for (int e = 0; e < ELEMENTS; e++) x[d0 + e] = sum.x[e];
  }
  for (int half = 1; half < V_DIM; half *= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < V_DIM / 2; i += blockDim.x) {
      const int a = i / half * 2 * half + i % half;
      const float u = x[a], v = x[a + half];
      x[a] = u + v;
      x[a + half] = u - v;
    }
  }
  __syncthreads();
  for (int d = threadIdx.x; d < V_DIM; d += blockDim.x)
    result[place * V_DIM + d] =
        (T)(x[d] * rsqrtf((float)V_DIM) * signs[d] + weights.of[64] * own_partial[place * V_DIM + d]);
