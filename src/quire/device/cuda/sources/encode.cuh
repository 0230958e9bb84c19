// A warp codes a vector of SIZE numbers as number `to` of those in `words`, `scales` and `biases`: the
// nearest of LEVELS by the edges between them, or affine codes. A lane has elements lane, lane + 32 and so on.
template <int SIZE, int GROUP, int BITS, int FITS, bool LEVELS>
__device__ __forceinline__ void encode_vector(const float* x, size_t to, float reach, const float* edges,
                                              unsigned* words, __half* scales, __half* biases) {
  constexpr int E = SIZE / 32;
  words += to * (E * BITS);
  scales += to * (SIZE / GROUP);
  if constexpr (LEVELS) code_direction<E, BITS>(x, edges, words, scales);
  else code_vector<E, GROUP, BITS, FITS>(x, words, scales, biases + to * (SIZE / GROUP), reach);
}
// A warp for each of `count` vectors of DIM numbers, padded with zeros; they are turned if there are `signs`.
template <int DIM, int SIZE, int GROUP, int BITS, int FITS, bool LEVELS, typename X>
__device__ __forceinline__ void encode(const X* x, int count, const float* signs, float scale, float reach,
                                       const float* edges, unsigned* words, __half* scales, __half* biases) {
  const size_t vector = (size_t)blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5);
  if (vector >= (size_t)count) return;
  constexpr int E = SIZE / 32;
  const int lane = threadIdx.x & 31;
  float numbers[E];
  #pragma unroll
  for (int e = 0; e < E; e++) numbers[e] = e * 32 + lane < DIM ? (float)x[vector * DIM + e * 32 + lane] : 0.f;
  if (signs) turned<E>(numbers, signs, scale);
  encode_vector<SIZE, GROUP, BITS, FITS, LEVELS>(numbers, vector, reach, edges, words, scales, biases);
}
