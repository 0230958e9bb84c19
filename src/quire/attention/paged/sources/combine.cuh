  // Joins what the splits of a row found: partial [T, HEADS, splits, V_DIM], stats [T, HEADS, splits, 2].
  // One thread block for each row and head. `count` splits have written. With TURNED they are sums of
  // values in coordinates of their own: a Hadamard transform and `signs` turn them back.
  __shared__ float weight[64];
  __shared__ int live;  // splits with keys: those without come last
#if TURNED
  __shared__ float turned[V_DIM];
#endif
  const size_t place = blockIdx.x;
  const float* own = stats + place * splits * 2;
  if (threadIdx.x < 32) {
    float sink = -1e30f;
    if (SINKS) sink = (float)sinks[place % HEADS] * 1.4426950408889634f;
    float most = sink;
    for (int s = threadIdx.x; s < count; s += 32) most = fmaxf(most, own[s * 2]);
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, by));
    float sum = 0.f;
    int last = 0;
    for (int s = threadIdx.x; s < count; s += 32) {
      const float total = own[s * 2 + 1];
      if (total > 0.f) last = s + 1;
      weight[s] = total > 0.f ? exp2f(own[s * 2] - most) : 0.f;
      sum += total * weight[s];
    }
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    if (SINKS) sum += exp2f(sink - most);
    last = __reduce_max_sync(0xffffffffu, last);
    if (threadIdx.x == 0) live = last;
    for (int s = threadIdx.x; s < count; s += 32) weight[s] /= sum;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < V_DIM; d += blockDim.x) {
    float x = 0.f;
    #pragma unroll 8
    for (int s = 0; s < live; s++) {
      const float own_sum = partial[(place * splits + s) * V_DIM + d];
      if (weight[s] != 0.f) x += weight[s] * own_sum;
    }
#if TURNED
    turned[d] = x;
  }
  TURN(turned, V_DIM, V_DIM)
  for (int d = threadIdx.x; d < V_DIM; d += blockDim.x) {
    const float x = turned[d] * signs[d];
#endif
    result[place * V_DIM + d] = (T)x;
  }
