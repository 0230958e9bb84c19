  // A product for tiles of up to 64 rows; codes of 4 bits, bfloat16. A thread block has four warps;
  // each makes two sets of 16 rows of W: of both matrices with GATED, else neighbours. x comes
  // through shared memory, a group of 64 columns ahead.
  // Without DENSE there is a matrix an expert, and a tile is pairs of row and expert.
  constexpr int X_STRIDE = 72;
  __shared__ __align__(16) T x_tile[2][64 * X_STRIDE];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, r = lane >> 2;
#if DENSE
  const int first = blockIdx.y * 64, count = min(64, x_shape[0] - first);
  const size_t expert = 0;
  const int N = w_shape[0], words = w_shape[1];
#else
  const int first = tiles[blockIdx.y * 3 + 1], count = tiles[blockIdx.y * 3 + 2];
  if (count == 0) return;
  const size_t expert = tiles[blockIdx.y * 3];
  const int N = w_shape[1], words = w_shape[2];
#endif
  const int K = words * 8, groups = K / GROUP;
#if GATED
  const int n0 = blockIdx.x * 64 + warp * 16;
  const int n_of[2] = {n0, n0};
  const unsigned* codes[2] = {w, w_up};
  const T* s_of[2] = {scales, scales_up};
  const T* b_of[2] = {biases, biases_up};
#else
  const int n0 = blockIdx.x * 128 + warp * 32;
  const int n_of[2] = {n0, n0 + 16};
  const unsigned* codes[2] = {w, w};
  const T* s_of[2] = {scales, scales};
  const T* b_of[2] = {biases, biases};
#endif
  // The last block may have more warps than there are rows of W: they make its last rows again.
  const size_t row_of[2] = {expert * N + min(n_of[0], N - 16) + r, expert * N + min(n_of[1], N - 16) + r};
  const T* from[4];
  unsigned to[4];
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const int m = i * 16 + threadIdx.x / 8, place = first + min(m, count - 1), part = threadIdx.x % 8;
#if GATED && !DENSE
    from[i] = x + (size_t)(order[place] / TOP) * K + part * 8;
#else
    from[i] = x + (size_t)place * K + part * 8;
#endif
    to[i] = (unsigned)__cvta_generic_to_shared(x_tile[0] + m * X_STRIDE + part * 8);
  }
  const auto copy = [&](int g) {
    #pragma unroll
    for (int i = 0; i < 4; i++)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
        :: "r"(to[i] + (g & 1) * (unsigned)sizeof(x_tile[0])), "l"(from[i] + g * 64));
    asm volatile("cp.async.commit_group;");
  };
  uint2 next[2][2];
  T next_scale[2][2], next_bias[2][2];
  const auto load = [&](int g) {
    #pragma unroll
    for (int s = 0; s < 2; s++)
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const size_t row = row_of[s] + half * 8;
        next[s][half] = *(const uint2*)(codes[s] + row * words + g * 8 + quad * 2);
        next_scale[s][half] = s_of[s][row * groups + g * 64 / GROUP];
        next_bias[s][half] = b_of[s][row * groups + g * 64 / GROUP];
      }
  };
  float acc[2][8][4];
  #pragma unroll
  for (int s = 0; s < 2; s++)
    #pragma unroll
    for (int t = 0; t < 8; t++)
      for (int i = 0; i < 4; i++) acc[s][t][i] = 0.f;
  const int last = K / 64 - 1;
  copy(0);
  load(0);
  for (int g = 0; g <= last; g++) {
    asm volatile("cp.async.wait_all;");
    __syncthreads();
    if (g < last) copy(g + 1);
    uint2 u[2][2];
    __nv_bfloat162 scale[2][2], bias[2][2];
    #pragma unroll
    for (int s = 0; s < 2; s++)
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        u[s][half] = next[s][half];
        scale[s][half] = __bfloat162bfloat162(next_scale[s][half]);
        bias[s][half] = __bfloat162bfloat162(next_bias[s][half]);
      }
    if (g < last) load(g + 1);
    const T* tile = x_tile[g & 1];
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      uint4 a[2][2];  // by set and half: elements (0, 1), (2, 3), (4, 5), (6, 7) of eight
      #pragma unroll
      for (int s = 0; s < 2; s++)
        #pragma unroll
        for (int half = 0; half < 2; half++)
          a[s][half] = numbers(h ? u[s][half].y : u[s][half].x, scale[s][half], bias[s][half]);
      #pragma unroll
      for (int t = 0; t < 8; t++) {
        if (t * 8 >= count) break;
        const uint4 b = *(const uint4*)(tile + (t * 8 + r) * X_STRIDE + quad * 16 + h * 8);
        #pragma unroll
        for (int s = 0; s < 2; s++) {
          product(acc[s][t], a[s][0].x, a[s][1].x, a[s][0].y, a[s][1].y, b.x, b.y);
          product(acc[s][t], a[s][0].z, a[s][1].z, a[s][0].w, a[s][1].w, b.z, b.w);
        }
      }
    }
  }
  #pragma unroll
  for (int t = 0; t < 8; t++)
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const int column = t * 8 + quad * 2 + (i & 1), n = r + (i >> 1) * 8;
      if (column >= count) continue;
#if GATED
      if (n0 < N) y[(size_t)(first + column) * N + n0 + n] = (T)gated(acc[0][t][i], acc[1][t][i]);
#else
#if DENSE
      T* row = y + (size_t)(first + column) * N + n;
#else
      T* row = y + (size_t)order[first + column] * N + n;
#endif
      if (n_of[0] < N) row[n_of[0]] = (T)acc[0][t][i];
      if (n_of[1] < N) row[n_of[1]] = (T)acc[1][t][i];
#endif
    }
