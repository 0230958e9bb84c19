// A thread block codes a block of 64 tokens of one KV head, as `quire.cache.formats.page` does: keys by channel,
// values by token after their rotation. `head` counts heads of blocks.
__device__ __forceinline__ void code_keys(const T* keys, size_t head, unsigned* codes, __half* scales, __half* biases) {
  for (int channel = threadIdx.x; channel < K_DIM; channel += THREADS) {
    float x[64];
    #pragma unroll
    for (int t = 0; t < 64; t++) x[t] = (float)keys[t * K_DIM + channel];
    const size_t at = head * K_DIM + channel;
    code_alone<K_BITS, 2>(x, codes + at * (2 * K_BITS), scales + at, biases + at, K_REACH);
  }
}
#if V_DIM
// A warp for each token.
__device__ __forceinline__ void code_values(const T* values, size_t head, const float* signs, unsigned* codes,
                                            __half* scales, __half* biases) {
  constexpr int E = V_DIM / 32, GROUPS = V_DIM / V_GROUP;
  for (int token = threadIdx.x >> 5; token < 64; token += THREADS / 32) {
    float x[E];
    #pragma unroll
    for (int e = 0; e < E; e++) x[e] = (float)values[token * V_DIM + e * 32 + (threadIdx.x & 31)];
    turned<E>(x, signs, rsqrtf((float)V_DIM));
    const size_t at = head * 64 + token;
    code_vector<E, V_GROUP, V_BITS, 2>(x, codes + at * (V_DIM * V_BITS / 32), scales + at * GROUPS,
                                       biases + at * GROUPS, V_REACH);
  }
}
#endif
