// Codes of blocks as numbers in the model's coordinates.

// COUNT neighbouring numbers, by one store.
template <int COUNT>
__device__ __forceinline__ void put(T* to, const float* x) {
  unsigned words[4] = {};
  #pragma unroll
  for (int i = 0; i + 1 < COUNT; i += 2) {
    const T two[2] = {(T)x[i], (T)x[i + 1]};
    words[i / 2] = *(const unsigned*)two;
  }
  if (COUNT == 1) *to = (T)x[0];
  else if (COUNT == 8) *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
  else if (COUNT == 4) *(uint2*)to = make_uint2(words[0], words[1]);
  else *(unsigned*)to = words[0];
}
// COUNT neighbouring codes, which lie in two words at most.
template <int COUNT, int EACH_BITS>
__device__ __forceinline__ void codes_from(const unsigned* words, int first, unsigned* to) {
  const int bit = first * EACH_BITS, by = bit % 32;
  unsigned long long both = words[bit / 32];
  if (by + COUNT * EACH_BITS > 32) both |= (unsigned long long)words[bit / 32 + 1] << 32;
  both >>= by;
  #pragma unroll
  for (int i = 0; i < COUNT; i++) to[i] = (unsigned)(both >> i * EACH_BITS) & ((1u << EACH_BITS) - 1);
}
// What a code stands for: affine, or a codebook's level.
__device__ __forceinline__ float number(unsigned code, float scale, const __half* biases, int group) {
  return code * scale + __half2float(biases[group]);
}
__device__ __forceinline__ float number(unsigned code, float scale, const float* levels, int group) {
  return levels[code] * scale;
}
// A warp decodes a block's token vectors that are its own, of SIZE elements. They are turned back by a
// Hadamard transform, times `turn`, then signs, if there are any. Where the elements of a lane are no power of
// two, they are lane, lane + 32 and so on, as `transformed` has them.
template <int SIZE, int EACH_GROUP, int EACH_BITS, typename More>
__device__ __forceinline__ void decode_tokens(const unsigned* words, const __half* scales, const More* more,
                                              size_t block, const float* signs, float turn, T* to) {
  constexpr int E = SIZE / 32, RUN = E & (E - 1) ? 1 : E < 8 ? E : 8, GROUPS = SIZE / EACH_GROUP;
  const int lane = threadIdx.x & 31;
  #pragma unroll 2
  for (int token = threadIdx.x >> 5; token < BLOCK; token += THREADS / 32) {
    const size_t vector = block * BLOCK + token;
    const More* own = CODEBOOK ? more : more + vector * GROUPS;
    float x[E];
    #pragma unroll
    for (int r = 0; r < E / RUN; r++) {
      const int first = (r * 32 + lane) * RUN, group = first / EACH_GROUP;
      unsigned codes[RUN];
      codes_from<RUN, EACH_BITS>(words + vector * (SIZE * EACH_BITS / 32), first, codes);
      const float scale = __half2float(scales[vector * GROUPS + group]);
      #pragma unroll
      for (int i = 0; i < RUN; i++) x[r * RUN + i] = number(codes[i], scale, own, group);
    }
    if (signs) transformed<E>(x, turn);
    #pragma unroll
    for (int r = 0; r < E / RUN; r++) {
      const int first = (r * 32 + lane) * RUN;
      if (signs)
        #pragma unroll
        for (int i = 0; i < RUN; i++) x[r * RUN + i] *= signs[first + i];
      put<RUN>(to + token * SIZE + first, x + r * RUN);
    }
  }
}
// A lane decodes 32 tokens, from `token` on, of two neighbouring channels to the places that `to` returns of each.
// `channel` counts those of all blocks.
template <int EACH_GROUP, int EACH_BITS, typename To>
__device__ __forceinline__ void decode_pair(const unsigned* words, const __half* scales, const __half* biases,
                                            size_t channel, int token, const To& to) {
  unsigned codes[2][EACH_BITS];
  float scale[2], bias[2];
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const size_t group = (channel + i) * (BLOCK / EACH_GROUP) + token / EACH_GROUP;
    read_run<4 * EACH_BITS>((const unsigned char*)(words + ((channel + i) * BLOCK + token) / 32 * EACH_BITS), codes[i]);
    scale[i] = __half2float(scales[group]);
    bias[i] = __half2float(biases[group]);
  }
  #pragma unroll
  for (int t = 0; t < 32; t++) {
    const float x[2] = {field<EACH_BITS>(codes[0], t) * scale[0] + bias[0],
                        field<EACH_BITS>(codes[1], t) * scale[1] + bias[1]};
    put<2>(to(t), x);
  }
}
// A warp decodes 32 tokens of 64 channels at a time.
template <int SIZE, int EACH_GROUP, int EACH_BITS>
__device__ __forceinline__ void decode_channels(const unsigned* words, const __half* scales, const __half* biases,
                                                size_t block, T* to) {
  const int lane = threadIdx.x & 31;
  constexpr int SPANS = (SIZE + 63) / 64;  // of 64 channels
  for (int part = threadIdx.x >> 5; part < SPANS * (BLOCK / 32); part += THREADS / 32) {
    const int channel = part % SPANS * 64 + lane * 2, token = part / SPANS * 32;
    if (SIZE % 64 && channel >= SIZE) continue;
    decode_pair<EACH_GROUP, EACH_BITS>(words, scales, biases, block * SIZE + channel, token,
                                       [&](int t) { return to + (token + t) * SIZE + channel; });
  }
}
