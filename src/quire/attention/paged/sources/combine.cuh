  // Joins what the splits of a row found: partial [T, HEADS, splits, V_DIM], stats [T, HEADS, splits, 2].
  // One thread block for each row and head. `count` splits have written. With TURNED they are sums of
  // values in coordinates of their own: a Hadamard transform and `signs` turn them back.
  __shared__ Weights weights;
  const size_t place = blockIdx.x;
  const float sink = SINKS ? (float)sinks[place % HEADS] * 1.4426950408889634f : -1e30f;
  weigh(&weights, stats + place * splits * 2, count, nullptr, sink);
  __syncthreads();
#if TURNED
  __shared__ float turned[V_DIM];
#endif
  const int d0 = threadIdx.x * ELEMENTS;
  if (d0 < V_DIM) {
    const Elements sum = joined_elements(partial + place * splits * V_DIM + d0, &weights);
    #pragma unroll
    for (int e = 0; e < ELEMENTS; e++) {
#if TURNED
      turned[d0 + e] = sum.x[e];
#else
      result[place * V_DIM + d0 + e] = (T)sum.x[e];
#endif
    }
  }
#if TURNED
  TURN(turned, V_DIM, V_DIM)
  for (int d = threadIdx.x; d < V_DIM; d += blockDim.x) result[place * V_DIM + d] = (T)(turned[d] * signs[d]);
#endif
