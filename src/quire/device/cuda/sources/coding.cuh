// As it is once it was stored in float16.
__device__ __forceinline__ float stored(float x) {
  return __half2float(__float2half(fminf(fmaxf(x, -65504.f), 65504.f)));
}
__device__ __forceinline__ float code_of(float x, float bias, float inverse, float top) {
  return fminf(fmaxf(rintf((x - bias) * inverse), 0.f), top);
}
__device__ __forceinline__ float lanes_sum(float x) {
  #pragma unroll
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}
// A warp turns a vector: signs, then a Hadamard transform, times `scale`. A lane has elements lane,
// lane + 32 and so on, here as below.
template <int E>
__device__ __forceinline__ void turned(float* x, const float* signs, float scale) {
  const int lane = threadIdx.x & 31;
  #pragma unroll
  for (int e = 0; e < E; e++) x[e] *= signs[e * 32 + lane];
  #pragma unroll
  for (int half = 1; half < 32; half *= 2)
    #pragma unroll
    for (int e = 0; e < E; e++) {
      const float other = __shfl_xor_sync(0xffffffffu, x[e], half);
      x[e] = lane & half ? other - x[e] : x[e] + other;
    }
  #pragma unroll
  for (int half = 1; half < E; half *= 2)
    #pragma unroll
    for (int e = 0; e < E; e++)
      if (!(e & half)) {
        const float a = x[e], b = x[e + half];
        x[e] = a + b;
        x[e + half] = a - b;
      }
  #pragma unroll
  for (int e = 0; e < E; e++) x[e] *= scale;
}
// A warp codes a vector: scale and bias of each group by its range, then fitted some times to the
// codes by least squares.
template <int E, int EACH_GROUP, int EACH_BITS, int FITS>
__device__ __forceinline__ void code_vector(const float* x, unsigned* words, __half* scales, __half* biases) {
  constexpr int OF = EACH_GROUP / 32, EACH = 32 / EACH_BITS;
  constexpr float TOP = (1 << EACH_BITS) - 1;
  const int lane = threadIdx.x & 31;
  #pragma unroll
  for (int g = 0; g < E / OF; g++) {
    const float* own = x + g * OF;
    float codes[OF], low = 1e38f, high = -1e38f, mean = 0.f;
    #pragma unroll
    for (int i = 0; i < OF; i++) {
      low = fminf(low, own[i]);
      high = fmaxf(high, own[i]);
      mean += own[i];
    }
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) {
      low = fminf(low, __shfl_xor_sync(0xffffffffu, low, by));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, by));
    }
    mean = lanes_sum(mean) * (1.f / EACH_GROUP);
    float scale = stored((high - low) / TOP), bias = stored(low);
    for (int fit = 0; fit <= FITS; fit++) {
      const float inverse = scale == 0.f ? 0.f : 1.f / scale;
      float code_mean = 0.f;
      #pragma unroll
      for (int i = 0; i < OF; i++) {
        codes[i] = code_of(own[i], bias, inverse, TOP);
        code_mean += codes[i];
      }
      if (fit == FITS) break;
      code_mean = lanes_sum(code_mean) * (1.f / EACH_GROUP);
      float spread = 0.f, product = 0.f;
      #pragma unroll
      for (int i = 0; i < OF; i++) {
        const float centred = codes[i] - code_mean;
        spread += centred * centred;
        product += centred * own[i];
      }
      spread = lanes_sum(spread);
      product = lanes_sum(product);
      if (spread != 0.f) {
        scale = stored(product / fmaxf(spread, 0.25f));
        bias = stored(mean - scale * code_mean);
      }
    }
    #pragma unroll
    for (int i = 0; i < OF; i++) {
      // Lanes add up their codes to words, as integers that a float holds in two halves.
      const unsigned code = (unsigned)codes[i] << (EACH_BITS * (lane % EACH));
      float low_half = code & 0xFFFFu, high_half = code >> 16;
      #pragma unroll
      for (int by = 1; by < EACH; by *= 2) {
        low_half += __shfl_xor_sync(0xffffffffu, low_half, by);
        high_half += __shfl_xor_sync(0xffffffffu, high_half, by);
      }
      if (lane % EACH == 0)
        words[(g * EACH_GROUP + i * 32 + lane) / EACH] = (unsigned)low_half | (unsigned)high_half << 16;
    }
    if (lane == 0) {
      scales[g] = __float2half(scale);
      biases[g] = __float2half(bias);
    }
  }
}
