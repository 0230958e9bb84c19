// A warp codes a vector of DIM numbers, padded with zeros to SIZE, as number `to` of those in `words`, `scales`
// and `biases`. It is turned if there are `signs`, and coded by a codebook if there are `edges`.
template <int DIM, int SIZE, int GROUP, int BITS, int FITS, typename X>
__device__ __forceinline__ void encode_vector(const X* x, size_t to, const float* signs, float scale, float reach,
                                              const float* edges, unsigned* words, __half* scales, __half* biases) {
  constexpr int E = SIZE / 32;
  const int lane = threadIdx.x & 31;
  float numbers[E];
  #pragma unroll
  for (int e = 0; e < E; e++) numbers[e] = e * 32 + lane < DIM ? (float)x[e * 32 + lane] : 0.f;
  if (signs) turned<E>(numbers, signs, scale);
  words += to * (E * BITS);
  scales += to * (SIZE / GROUP);
  if (edges) {
    code_direction<E, BITS>(numbers, edges, words, scales);
  } else {
    code_vector<E, GROUP, BITS, FITS>(numbers, words, scales, biases + to * (SIZE / GROUP), reach);
  }
}
// A warp for each of `count` vectors.
template <int DIM, int SIZE, int GROUP, int BITS, int FITS, typename X>
__device__ __forceinline__ void encode(const X* x, int count, const float* signs, float scale, float reach,
                                       const float* edges, unsigned* words, __half* scales, __half* biases) {
  const size_t vector = (size_t)blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5);
  if (vector >= (size_t)count) return;
  encode_vector<DIM, SIZE, GROUP, BITS, FITS>(x + vector * DIM, vector, signs, scale, reach, edges, words, scales,
                                              biases);
}
