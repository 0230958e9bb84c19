// Codes of 32 keys, or their values, as numbers in shared memory: rows of ROW bytes, whose pieces of 16
// bytes change places within eight as `single` reads them. By a warp.

// OWN elements of each token's vector of SIZE, from `first` on.
template <int OWN, int SIZE, int EACH_GROUP, int EACH_BITS, int ROW, typename More>
__device__ __forceinline__ void expand_tokens(const unsigned* words, const __half* scales, const More* more,
                                              size_t token0, int first, unsigned char* to, int lane) {
  constexpr int PIECES = OWN / 8, GROUPS = SIZE / EACH_GROUP;
  #pragma unroll 6
  for (int i = 0; i < PIECES; i++) {
    const int n = i * 32 + lane, at = n / PIECES, piece = n % PIECES, element = first + piece * 8;
    const size_t token = token0 + at, group = CODEBOOK ? 0 : element / EACH_GROUP;
    unsigned codes[8];
    codes_from<8, EACH_BITS>(words + token * (SIZE * EACH_BITS / 32), element, codes);
    const float scale = __half2float(scales[token * (CODEBOOK ? 1 : GROUPS) + group]);
    const More* own = CODEBOOK ? more : more + token * GROUPS;
    float x[8];
    #pragma unroll
    for (int e = 0; e < 8; e++) x[e] = number(codes[e], scale, own, group);
    put<8>((T*)(to + at * ROW + (piece ^ (at & 7)) * 16), x);
  }
}
// OWN channels from `first` on, of all blocks; of a block's 64 tokens the first 32 or, `half`, the others.
template <int OWN, int EACH_BITS, int ROW>
__device__ __forceinline__ void expand_channels(const unsigned* words, const __half* scales, const __half* biases,
                                                size_t first, int half, unsigned char* to, int lane) {
  #pragma unroll
  for (int i = 0; i < (OWN + 63) / 64; i++) {
    const int pair = i * 32 + lane;
    if (OWN % 64 && pair * 2 >= OWN) break;
    decode_pair<BLOCK, EACH_BITS>(words, scales, biases, first + pair * 2, half * 32, [&](int t) {
      return (T*)(to + t * ROW + (pair / 4 ^ (t & 7)) * 16 + pair % 4 * 4);
    });
  }
}
