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
// cos and sin of n parts of a circle of N, added.
template <int N>
struct Hartley {
  float of[N];
  __device__ constexpr Hartley() : of() {
    for (int n = 0; n < N; n++) {
      const double angle = 6.283185307179586 * (2 * n > N ? n - N : n) / N;
      double term = 1, sum = 0;  // of the series of both
      for (int k = 1; k < 40; k++) {
        sum += k % 4 == 1 || k % 4 == 2 ? term : -term;
        term *= angle / k;
      }
      of[n] = (float)sum;
    }
  }
};
// A warp's transform of a vector, times `scale`: a Hadamard transform. Each bit of an element's place
// in the vector is a bit of the lane's number or of e, in any order. Where E is no power of two, a lane
// has elements lane, lane + 32 and so on; a Hartley transform across runs of a power of two follows.
template <int E>
__device__ __forceinline__ void transformed(float* x, float scale) {
  constexpr int RUN = E & -E, RUNS = E / RUN;
  const int lane = threadIdx.x & 31;
  #pragma unroll
  for (int half = 1; half < 32; half *= 2) {
    const float sign = lane & half ? -1.f : 1.f;
    #pragma unroll
    for (int e = 0; e < E; e++) x[e] = fmaf(x[e], sign, __shfl_xor_sync(0xffffffffu, x[e], half));
  }
  #pragma unroll
  for (int half = 1; half < RUN; half *= 2)
    #pragma unroll
    for (int e = 0; e < E; e++)
      if (!(e & half)) {
        const float a = x[e], b = x[e + half];
        x[e] = a + b;
        x[e + half] = a - b;
      }
  if constexpr (RUNS > 1) {
    constexpr Hartley<RUNS> circle;
    #pragma unroll
    for (int e = 0; e < RUN; e++) {
      float own[RUNS] = {};
      #pragma unroll
      for (int r = 0; r < RUNS; r++)
        #pragma unroll
        for (int s = 0; s < RUNS; s++) own[r] = fmaf(x[s * RUN + e], circle.of[r * s % RUNS], own[r]);
      #pragma unroll
      for (int r = 0; r < RUNS; r++) x[r * RUN + e] = own[r];
    }
  }
  #pragma unroll
  for (int e = 0; e < E; e++) x[e] *= scale;
}
// A warp turns a vector: signs, then the transform, times `scale`. A lane has elements lane,
// lane + 32 and so on, here as below.
template <int E>
__device__ __forceinline__ void turned(float* x, const float* signs, float scale) {
  const int lane = threadIdx.x & 31;
  #pragma unroll
  for (int e = 0; e < E; e++) x[e] *= signs[e * 32 + lane];
  transformed<E>(x, scale);
}
// A vector's codes as words, the lowest bits first. Lanes trade codes of eight e's in three turns, after
// each of which a lane has twice as many neighbours, of half as many e's: at last eight codes, of one.
template <int E, int EACH_BITS>
__device__ __forceinline__ void store_codes(const unsigned* codes, unsigned* words) {
  const int lane = threadIdx.x & 31;
  #pragma unroll
  for (int begin = 0; begin < E; begin += 8) {
    unsigned runs[8], low = 0, high = 0;
    #pragma unroll
    for (int i = 0; i < 8; i++) runs[i] = begin + i < E ? codes[begin + i] : 0u;
    #pragma unroll
    for (int by = 1; by < 8; by *= 2)
      #pragma unroll
      for (int i = 0; i < 4 / by; i++) {
        const bool upper = lane & by;
        const unsigned own = upper ? runs[2 * i + 1] : runs[2 * i];
        const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? runs[2 * i] : runs[2 * i + 1], by);
        low = upper ? other : own;
        high = upper ? own : other;
        if (by < 4) runs[i] = low | high << by * EACH_BITS;
      }
    const int e = begin + (lane & 7);
    if (e >= E) continue;
    const unsigned long long run = (unsigned long long)high << 4 * EACH_BITS | low;
    unsigned char* to = (unsigned char*)words + (e * 4 + (lane >> 3)) * EACH_BITS;
    constexpr int EACH = EACH_BITS % 4 == 0 ? 4 : EACH_BITS % 2 == 0 ? 2 : 1;  // bytes
    #pragma unroll
    for (int n = 0; n < EACH_BITS / EACH; n++) {
      const unsigned part = (unsigned)(run >> n * EACH * 8);
      if (EACH == 4) ((unsigned*)to)[n] = part;
      else if (EACH == 2) ((unsigned short*)to)[n] = (unsigned short)part;
      else to[n] = (unsigned char)part;
    }
  }
}
// The sum of what LANES lanes have: a warp, or one by itself.
template <int LANES>
__device__ __forceinline__ float sum_over(float x) {
  static_assert(LANES == 1 || LANES == 32, "a lane or a warp");
  return LANES == 1 ? x : lanes_sum(x);
}
struct Fitted { float scale, bias; };
// LANES lanes code a group, of which each has N numbers: scale and bias by its range, of which no more than
// `reach` standard deviations about the mean if that is not 0; then fitted some times to the codes by least squares.
template <int LANES, int N, int EACH_BITS, int FITS>
__device__ __forceinline__ Fitted code_group(const float* x, unsigned* to, float reach) {
  constexpr float TOP = (1 << EACH_BITS) - 1, SHARE = 1.f / (LANES * N);
  float codes[N], low = 1e38f, high = -1e38f, mean = 0.f;
  #pragma unroll
  for (int i = 0; i < N; i++) {
    low = fminf(low, x[i]);
    high = fmaxf(high, x[i]);
    mean += x[i];
  }
  #pragma unroll
  for (int by = LANES / 2; by > 0; by /= 2) {
    low = fminf(low, __shfl_xor_sync(0xffffffffu, low, by));
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, by));
  }
  if (FITS > 0 || reach > 0.f) mean = sum_over<LANES>(mean) * SHARE;
  if (reach > 0.f) {
    float squares = 0.f;
    #pragma unroll
    for (int i = 0; i < N; i++) squares += (x[i] - mean) * (x[i] - mean);
    const float range = reach * sqrtf(sum_over<LANES>(squares) * SHARE);
    low = fmaxf(low, mean - range);
    high = fminf(high, mean + range);
  }
  float scale = stored((high - low) / TOP), bias = stored(low);
  for (int fit = 0; fit <= FITS; fit++) {
    const float inverse = scale == 0.f ? 0.f : 1.f / scale;
    float code_mean = 0.f;
    #pragma unroll
    for (int i = 0; i < N; i++) {
      codes[i] = code_of(x[i], bias, inverse, TOP);
      code_mean += codes[i];
    }
    if (fit == FITS) break;
    code_mean = sum_over<LANES>(code_mean) * SHARE;
    float spread = 0.f, product = 0.f;
    #pragma unroll
    for (int i = 0; i < N; i++) {
      const float centred = codes[i] - code_mean;
      spread += centred * centred;
      product += centred * x[i];
    }
    spread = sum_over<LANES>(spread);
    product = sum_over<LANES>(product);
    if (spread != 0.f) {
      scale = stored(product / fmaxf(spread, 0.25f));
      bias = stored(mean - scale * code_mean);
    }
  }
  #pragma unroll
  for (int i = 0; i < N; i++) to[i] = (unsigned)codes[i];
  return {scale, bias};
}
// A warp codes a vector in groups.
template <int E, int EACH_GROUP, int EACH_BITS, int FITS>
__device__ __forceinline__ void code_vector(const float* x, unsigned* words, __half* scales, __half* biases,
                                            float reach = 0.f) {
  constexpr int OF = EACH_GROUP / 32;
  unsigned codes[E];
  #pragma unroll
  for (int g = 0; g < E / OF; g++) {
    const Fitted found = code_group<32, OF, EACH_BITS, FITS>(x + g * OF, codes + g * OF, reach);
    if ((threadIdx.x & 31) == 0) {
      scales[g] = __float2half(found.scale);
      biases[g] = __float2half(found.bias);
    }
  }
  store_codes<E, EACH_BITS>(codes, words);
}
// A lane codes a vector of 64 numbers by itself, as one group.
template <int EACH_BITS, int FITS>
__device__ __forceinline__ void code_alone(const float* x, unsigned* words, __half* scale, __half* bias,
                                           float reach = 0.f) {
  unsigned codes[64], packed_codes[2 * EACH_BITS] = {};
  const Fitted found = code_group<1, 64, EACH_BITS, FITS>(x, codes, reach);
  #pragma unroll
  for (int i = 0; i < 64; i++) {
    const int word = i * EACH_BITS / 32, by = i * EACH_BITS % 32;
    packed_codes[word] |= codes[i] << by;
    if (by + EACH_BITS > 32) packed_codes[word + 1] |= codes[i] >> (32 - by);
  }
  #pragma unroll
  for (int n = 0; n < 2 * EACH_BITS; n++) words[n] = packed_codes[n];
  *scale = __float2half(found.scale);
  *bias = __float2half(found.bias);
}
// A warp codes a vector's direction: the nearest level of a codebook for each element, by the edges
// between levels. The vector's length is the scale.
template <int E, int EACH_BITS>
__device__ __forceinline__ void code_direction(const float* x, const float* edges, unsigned* words, __half* scale) {
  float squares = 0.f;
  #pragma unroll
  for (int e = 0; e < E; e++) squares += x[e] * x[e];
  const float length = sqrtf(lanes_sum(squares));
  // A lane has an edge; codes are found by halving what they may be.
  constexpr int LEVELS = 1 << EACH_BITS;
  static_assert(LEVELS <= 32, "a lane has an edge");
  const float edge = length * edges[min((int)(threadIdx.x & 31), LEVELS - 2)];
  unsigned codes[E] = {};
  #pragma unroll
  for (int half = LEVELS / 2; half > 0; half /= 2)
    #pragma unroll
    for (int e = 0; e < E; e++)
      if (x[e] > __shfl_sync(0xffffffffu, edge, (int)codes[e] + half - 1)) codes[e] += half;
  store_codes<E, EACH_BITS>(codes, words);
  if ((threadIdx.x & 31) == 0) *scale = __float2half(stored(length));
}
