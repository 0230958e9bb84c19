  // TILE_X is the number of the 16 rows of W.
#ifndef TILE_X
#define TILE_X blockIdx.x
#endif
  // y = x W^T, 8 * TILES rows a thread block; codes of 4 bits, bfloat16.
  // A thread block makes 16 rows of W (with GATED: of both matrices) for all rows of x. Its warps
  // share the groups of 64 columns and add up at the end. Codes are the left operand, as 128 + n;
  // what that adds is taken off by the sum of x, a product with ones.
  // With EXPERTS, a tile is up to 8 * TILES pairs of row and expert: expert, first place, count.
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, r = lane >> 2;
#if EXPERTS
  const int first = tiles[blockIdx.y * 3 + 1], count = tiles[blockIdx.y * 3 + 2];
  if (count == 0) return;
  const size_t expert = tiles[blockIdx.y * 3];
  const int N = w_shape[1], words = w_shape[2];
#else
  const int first = blockIdx.y * TILES * 8, count = min(TILES * 8, x_shape[0] - first);
  if (count <= 0) return;
  const size_t expert = 0;
  const int N = w_shape[0], words = w_shape[1];
#endif
  const int K = words * 8, groups = K / GROUP, n0 = TILE_X * 16;
  const size_t row0 = expert * N + n0 + r, row1 = row0 + 8;
#if GATED
  constexpr int SETS = 2;
  const unsigned* codes[2] = {w, w_up};
  const T* s_of[2] = {scales, scales_up};
  const T* b_of[2] = {biases, biases_up};
#else
  constexpr int SETS = 1;
  const unsigned* codes[1] = {w};
  const T* s_of[1] = {scales};
  const T* b_of[1] = {biases};
#endif
  const T* x_row[TILES];
  #pragma unroll
  for (int t = 0; t < TILES; t++) {
    const int place = first + min(t * 8 + r, count - 1);
#if EXPERTS && GATED
    x_row[t] = x + (size_t)(order[place] / TOP) * K;
#else
    x_row[t] = x + (size_t)place * K;
#endif
  }
  float acc[SETS][TILES][4];
  #pragma unroll
  for (int s = 0; s < SETS; s++)
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      for (int i = 0; i < 4; i++) acc[s][t][i] = 0.f;
  const unsigned ones = 0x3f803f80u;
  #pragma unroll 2
  for (int g = warp; g < K / 64; g += WARPS) {
    uint2 u0[SETS], u1[SETS];
    float s0[SETS], s1[SETS], o0[SETS], o1[SETS];
    #pragma unroll
    for (int s = 0; s < SETS; s++) {
      u0[s] = *(const uint2*)(codes[s] + row0 * words + g * 8 + quad * 2);
      u1[s] = *(const uint2*)(codes[s] + row1 * words + g * 8 + quad * 2);
      const size_t at = g * 64 / GROUP;
      s0[s] = (float)s_of[s][row0 * groups + at];
      s1[s] = (float)s_of[s][row1 * groups + at];
      o0[s] = (float)b_of[s][row0 * groups + at] - 128.f * s0[s];
      o1[s] = (float)b_of[s][row1 * groups + at] - 128.f * s1[s];
    }
    #pragma unroll
    for (int t = 0; t < TILES; t++) {
      const uint4* from = (const uint4*)(x_row[t] + g * 64 + quad * 16);
      float c[SETS][4] = {}, d[4] = {};
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint4 some = from[h];
        const unsigned p0 = __byte_perm(some.x, some.z, 0x5410), p1 = __byte_perm(some.x, some.z, 0x7632);
        const unsigned p2 = __byte_perm(some.y, some.w, 0x5410), p3 = __byte_perm(some.y, some.w, 0x7632);
        product(d, ones, ones, ones, ones, p0, p1);
        product(d, ones, ones, ones, ones, p2, p3);
        #pragma unroll
        for (int s = 0; s < SETS; s++) {
          const unsigned a = h ? u0[s].y : u0[s].x, e = h ? u1[s].y : u1[s].x;
          product(c[s], raised(a, 0), raised(e, 0), raised(a, 4), raised(e, 4), p0, p1);
          product(c[s], raised(a, 8), raised(e, 8), raised(a, 12), raised(e, 12), p2, p3);
        }
      }
      #pragma unroll
      for (int s = 0; s < SETS; s++) {
        acc[s][t][0] += s0[s] * c[s][0] + o0[s] * d[0];
        acc[s][t][1] += s0[s] * c[s][1] + o0[s] * d[1];
        acc[s][t][2] += s1[s] * c[s][2] + o1[s] * d[2];
        acc[s][t][3] += s1[s] * c[s][3] + o1[s] * d[3];
      }
    }
  }
  __shared__ float found[WARPS][SETS][TILES * 128];  // [column, row of W]
  #pragma unroll
  for (int s = 0; s < SETS; s++)
    #pragma unroll
    for (int t = 0; t < TILES; t++) {
      float* to = found[warp][s] + t * 128 + quad * 32 + r;
      to[0] = acc[s][t][0];
      to[16] = acc[s][t][1];
      to[8] = acc[s][t][2];
      to[24] = acc[s][t][3];
    }
  __syncthreads();
  for (int i = threadIdx.x; i < TILES * 128; i += WARPS * 32) {
    float sum[SETS];
    #pragma unroll
    for (int s = 0; s < SETS; s++) {
      sum[s] = 0.f;
      #pragma unroll
      for (int from = 0; from < WARPS; from++) sum[s] += found[from][s][i];
    }
    const int column = i >> 4;
    if (column >= count) continue;
#if GATED
    y[(size_t)(first + column) * N + n0 + (i & 15)] = (T)gated(sum[0], sum[1]);
#elif EXPERTS
    y[(size_t)order[first + column] * N + n0 + (i & 15)] = (T)sum[0];
#else
    y[(size_t)(first + column) * N + n0 + (i & 15)] = (T)sum[0];
#endif
  }
