  // Joins the splits of a row's coded blocks and its own block, as written. The coded part is turned
  // back first: a Hadamard transform and signs. One thread block for each row and head.
  __shared__ float weight[65];
  __shared__ float x[V_DIM];
  const size_t place = blockIdx.x;
  const float* coded = stats + place * splits * 2;
  const float* own = own_stats + place * 2;
  if (threadIdx.x < 32) {
    float sink = -1e30f;
    if (SINKS) sink = (float)sinks[place % HEADS] * 1.4426950408889634f;
    float most = fmaxf(sink, own[0]);
    for (int s = threadIdx.x; s < splits; s += 32) most = fmaxf(most, coded[s * 2]);
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, by));
    float sum = 0.f;
    for (int s = threadIdx.x; s < splits; s += 32) {
      const float total = coded[s * 2 + 1];
      weight[s] = total > 0.f ? exp2f(coded[s * 2] - most) : 0.f;
      sum += total * weight[s];
    }
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    const float of_own = own[1] > 0.f ? exp2f(own[0] - most) : 0.f;
    sum += own[1] * of_own;
    if (SINKS) sum += exp2f(sink - most);
    for (int s = threadIdx.x; s < splits; s += 32) weight[s] /= sum;
    if (threadIdx.x == 0) weight[64] = of_own / sum;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < V_DIM; d += blockDim.x) {
    float total = 0.f;
    #pragma unroll 4
    for (int s = 0; s < splits; s++)
      if (weight[s] != 0.f) total += weight[s] * partial[(place * splits + s) * V_DIM + d];
    x[d] = total;
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
        (T)(x[d] * rsqrtf((float)V_DIM) * signs[d] + weight[64] * own_partial[place * V_DIM + d]);
