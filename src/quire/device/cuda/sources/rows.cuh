#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif

// N neighbouring elements, read or written at once.
template <typename E, int N>
struct __align__(sizeof(E) * N) Pack {
  E at[N];
};

// The type of what a pointer points at: `typename Bare<decltype(*pointer)>::Type`.
template <typename E>
struct Bare;
template <typename E>
struct Bare<E&> {
  using Type = E;
};
template <typename E>
struct Bare<const E&> {
  using Type = E;
};

__device__ __forceinline__ float number(float x) { return x; }
__device__ __forceinline__ int number(int x) { return x; }
__device__ __forceinline__ unsigned number(unsigned x) { return x; }
__device__ __forceinline__ bool number(bool x) { return x; }
__device__ __forceinline__ float number(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void put(float& to, float x) { to = x; }
__device__ __forceinline__ void put(int& to, int x) { to = x; }
__device__ __forceinline__ void put(unsigned& to, unsigned x) { to = x; }
__device__ __forceinline__ void put(bool& to, bool x) { to = x; }
__device__ __forceinline__ void put(__nv_bfloat16& to, float x) { to = __float2bfloat16(x); }
// Floats of 4 and of 8 bits, and powers of two.
__device__ __forceinline__ float e2m1_number(unsigned code) {
  const int size = code & 7, twice = size < 4 ? size : size < 6 ? 2 * size - 4 : 4 * size - 16;
  return (code & 8 ? -0.5f : 0.5f) * (float)twice;
}
__device__ __forceinline__ float e4m3_number(unsigned code) {
  const unsigned exponent = code >> 3 & 15, size = (exponent ? 8 : 0) + (code & 7);
  return (code & 128 ? -1.f : 1.f) * (float)size * __uint_as_float(((exponent ? exponent : 1) + 117) << 23);
}
__device__ __forceinline__ float e8m0_number(unsigned code) { return __uint_as_float(code ? code << 23 : 0x400000u); }
// Numbers as they are once they were stored.
__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_bfloat16(float x) { return __bfloat162float(__float2bfloat16(x)); }
#ifdef HALF
__device__ __forceinline__ float number(__half x) { return __half2float(x); }
__device__ __forceinline__ void put(__half& to, float x) { to = __float2half(x); }
__device__ __forceinline__ float as_half(float x) { return __half2float(__float2half(x)); }
#endif

// `V` elements, `N` at once; zeros where they are not inside.
template <typename E, int N, int V>
__device__ __forceinline__ void load(Pack<E, N>* to, const E* from, bool inside) {
  #pragma unroll
  for (int j = 0; j < V / N; j++) to[j] = inside ? ((const Pack<E, N>*)from)[j] : Pack<E, N>{};
}
template <typename E, int N, int V>
__device__ __forceinline__ void store(E* to, const Pack<E, N>* from) {
  #pragma unroll
  for (int j = 0; j < V / N; j++) ((Pack<E, N>*)to)[j] = from[j];
}
// Sums over LANES threads, in an order that depends on LANES alone. More than a warp are a whole thread block, which
// has `found` to itself.
template <int LANES, int COUNT>
__device__ __forceinline__ void sum_up(float* sums, float* found) {
  #pragma unroll
  for (int n = 0; n < COUNT; n++)
    #pragma unroll
    for (int by = (LANES < 32 ? LANES : 32) / 2; by > 0; by /= 2)
      sums[n] += __shfl_xor_sync(0xffffffffu, sums[n], by);
  if (LANES <= 32) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  #pragma unroll
  for (int n = 0; n < COUNT; n++)
    if (lane == 0) found[n * 32 + warp] = sums[n];
  __syncthreads();
  #pragma unroll
  for (int n = 0; n < COUNT; n++) {
    sums[n] = lane < LANES / 32 ? found[n * 32 + lane] : 0.f;
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) sums[n] += __shfl_xor_sync(0xffffffffu, sums[n], by);
  }
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }
__device__ __forceinline__ float gelu(float x) { return x * (1.f + erff(x * 0.70710678118654752f)) * 0.5f; }
// GELU's approximation by tanh (arXiv:1606.08415).
__device__ __forceinline__ float gelu_tanh(float x) {
  return x / (1.f + expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
}
// Maximum and minimum; of numbers of which one is NaN it is NaN.
template <typename E>
__device__ __forceinline__ E larger(E x, E y) { return x > y || x != x ? x : y; }
template <typename E>
__device__ __forceinline__ E smaller(E x, E y) { return x < y || x != x ? x : y; }
__device__ __forceinline__ float log_add_exp(float x, float y) {
  const float high = larger(x, y), low = smaller(x, y);
  const float infinity = __int_as_float(0x7F800000);
  if (!(fabsf(high) < infinity && fabsf(low) < infinity)) return x != x || y != y ? x + y : high;
  return high + log1pf(expf(low - high));
}
__device__ __forceinline__ float remainder_of(float x, float y) {
  const float rest = fmodf(x, y);
  return rest != 0.f && (rest < 0.f) != (y < 0.f) ? rest + y : rest;
}
__device__ __forceinline__ int remainder_of(int x, int y) {
  const int rest = x % y;
  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}
__device__ __forceinline__ unsigned remainder_of(unsigned x, unsigned y) { return x % y; }
__device__ __forceinline__ float quotient_of(float x, float y) { return floorf(x / y); }
__device__ __forceinline__ int quotient_of(int x, int y) { return x / y - (x % y != 0 && (x < 0) != (y < 0)); }
__device__ __forceinline__ unsigned quotient_of(unsigned x, unsigned y) { return x / y; }
