  // y = cap(x W^T) in float32: W of many rows, codes of 4 bits. A warp makes 16 * PARTS rows of W for
  // 8 * TILES rows of x, which the thread block keeps in shared memory as tensor cores read them; of
  // COLUMNS of each 8 rows of x alone, where a step has no more. Codes are the left operand, as
  // 128 + n; what that adds is taken off by sums of x. Warps go on until all rows of W are made.
  // Of 64 columns, a lane of a quad reads 16 neighbours; of groups of 32, 8 of each, so that a product is of one group.
  constexpr int AT_A_TIME = 4 / PARTS;  // times 64 columns, loaded ahead
  constexpr int GROUPS = INPUTS / 64, WORDS = INPUTS / 8, SCALES = INPUTS / GROUP;
  constexpr int SOME = AT_A_TIME * 64 / GROUP, ALL = OUTPUTS / (16 * PARTS);
  constexpr int SUMS = GROUP == 32 ? 2 : 1;  // of 64 columns
  struct __align__(2 * SOME) Scales { T of[SOME]; };
  struct Ahead {
    uint2 codes[PARTS][2][AT_A_TIME];
    Scales scales[PARTS][2], biases[PARTS][2];
  };
  extern __shared__ uint4 x_tile[];  // [GROUPS, 2, TILES, COLUMNS, 4]
  float* sums = (float*)(x_tile + GROUPS * 2 * TILES * COLUMNS * 4);  // [GROUPS, SUMS, TILES, 8]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, r = lane >> 2;
  const int step = gridDim.y * WARPS;
  int part = blockIdx.y * WARPS + warp;
  Ahead ahead;
  auto load = [&](int part, int at) {
    #pragma unroll
    for (int m = 0; m < PARTS; m++)
      #pragma unroll
      for (int h = 0; h < 2; h++) {
        const size_t row = (size_t)(part * PARTS + m) * 16 + h * 8 + r;
        #pragma unroll
        for (int j = 0; j < AT_A_TIME; j++) {
#if GROUP == 32
          const unsigned* const from = w + row * WORDS + (at + j) * 8 + quad;
          ahead.codes[m][h][j] = make_uint2(__ldcs(from), __ldcs(from + 4));
#else
          ahead.codes[m][h][j] = __ldcs((const uint2*)(w + row * WORDS + (at + j) * 8 + quad * 2));
#endif
        }
        ahead.scales[m][h] = *(const Scales*)(scales + row * SCALES + at * 64 / GROUP);
        ahead.biases[m][h] = *(const Scales*)(biases + row * SCALES + at * 64 / GROUP);
      }
  };
  if (part < ALL) load(part, 0);
  wait_for_others();
  const int first = blockIdx.x * 8 * TILES, count = min(8 * TILES, *rows - first);
  if (count <= 0) return;
  for (int i = threadIdx.x; i < TILES * COLUMNS * WORDS; i += WARPS * 32) {
    const int row = i / WORDS, eight = i % WORDS, g = eight / 8;
    const int q = SUMS == 2 ? eight % 4 : eight % 8 / 2, h = SUMS == 2 ? eight % 8 / 4 : eight % 2;
    const uint4 some = ((const uint4*)(x + (size_t)(first + min(row, count - 1)) * INPUTS))[eight];
    uint4 to;
    to.x = __byte_perm(some.x, some.z, 0x5410);
    to.y = __byte_perm(some.x, some.z, 0x7632);
    to.z = __byte_perm(some.y, some.w, 0x5410);
    to.w = __byte_perm(some.y, some.w, 0x7632);
    x_tile[((g * 2 + h) * TILES * COLUMNS + row) * 4 + q] = to;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUPS * SUMS * TILES * 8; i += WARPS * 32) {
    const int g = i / (TILES * 8 * SUMS), own = i / (TILES * 8) % SUMS, row = i / 8 % TILES * COLUMNS + i % 8 % COLUMNS;
    float sum = 0.f;
    #pragma unroll
    for (int e = 0; e < 8 / SUMS; e++) {
      const int h = SUMS == 2 ? own : e % 2, q = SUMS == 2 ? e : e / 2;
      const uint4 some = x_tile[((g * 2 + h) * TILES * COLUMNS + row) * 4 + q];
      const __nv_bfloat162* pair = (const __nv_bfloat162*)&some;
      #pragma unroll
      for (int n = 0; n < 4; n++) {
        const float2 two = __bfloat1622float2(pair[n]);
        sum += two.x + two.y;
      }
    }
    sums[i] = sum;
  }
  __syncthreads();
  for (; part < ALL; part += step) {
    float acc[PARTS][TILES][4];
    #pragma unroll
    for (int m = 0; m < PARTS; m++)
      #pragma unroll
      for (int t = 0; t < TILES; t++)
        #pragma unroll
        for (int i = 0; i < 4; i++) acc[m][t][i] = 0.f;
    #pragma unroll 1
    for (int at = 0; at < GROUPS; at += AT_A_TIME) {
      const Ahead now = ahead;
      const bool more = at + AT_A_TIME < GROUPS;
      if (more || part + step < ALL) load(more ? part : part + step, more ? at + AT_A_TIME : 0);
      #pragma unroll
      for (int j = 0; j < AT_A_TIME; j++) {
        unsigned a[PARTS][2][8];
        #pragma unroll
        for (int g = 0; g < SUMS; g++) {
          float scale[PARTS][2], bias[PARTS][2];
          #pragma unroll
          for (int m = 0; m < PARTS; m++)
            #pragma unroll
            for (int h = 0; h < 2; h++) {
              #pragma unroll
              for (int n = 0; n < 4; n++) {
                if (g == 0) a[m][h][n] = raised(now.codes[m][h][j].x, 4 * n);
                if (g == SUMS - 1) a[m][h][4 + n] = raised(now.codes[m][h][j].y, 4 * n);
              }
              scale[m][h] = (float)now.scales[m][h].of[j * 64 / GROUP + g];
              bias[m][h] = (float)now.biases[m][h].of[j * 64 / GROUP + g] - 128.f * scale[m][h];
            }
          #pragma unroll
          for (int t = 0; t < TILES; t++) {
            const uint4* from = x_tile + (((at + j) * 2 * TILES + t) * COLUMNS + r % COLUMNS) * 4 + quad;
            const uint4 p[2] = {from[0], from[TILES * COLUMNS * 4]};
            const float2 sum = *(const float2*)(sums + (((at + j) * SUMS + g) * TILES + t) * 8 + quad * 2);
            #pragma unroll
            for (int m = 0; m < PARTS; m++) {
              float c[4] = {};
              #pragma unroll
              for (int h = g; h < 2 * (g + 1) / SUMS; h++) {
                const unsigned *const up = a[m][0] + 4 * h, *const low = a[m][1] + 4 * h;
                product(c, up[0], low[0], up[1], low[1], p[h].x, p[h].y);
                product(c, up[2], low[2], up[3], low[3], p[h].z, p[h].w);
              }
              acc[m][t][0] += scale[m][0] * c[0] + bias[m][0] * sum.x;
              acc[m][t][1] += scale[m][0] * c[1] + bias[m][0] * sum.y;
              acc[m][t][2] += scale[m][1] * c[2] + bias[m][1] * sum.x;
              acc[m][t][3] += scale[m][1] * c[3] + bias[m][1] * sum.y;
            }
          }
        }
      }
    }
    #pragma unroll
    for (int m = 0; m < PARTS; m++)
      #pragma unroll
      for (int t = 0; t < TILES; t++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const int column = t * 8 + quad * 2 + (i & 1);
          if (column >= count) continue;
          float v = acc[m][t][i];
#if CAPPED
          v = tanhf(v * (1.f / CAP)) * CAP;
#endif
          y[(size_t)(first + column) * OUTPUTS + (part * PARTS + m) * 16 + (i >> 1) * 8 + r] = v;
        }
  }
