  // y = x W^T for tiles of 8 * TILES rows of x, bfloat16; W as codes of 4 or 8 bits, or as it is (BITS 16).
  // COLUMNS * SPLITS warps. A warp makes two sets of 16 rows of W: of both matrices with GATED, else
  // neighbours. SPLITS warps share the columns of one set, 64 at a time, and add up at the end.
  // STAGES steps of SPLITS * 64 columns of W and x are copied ahead to shared memory.
  // With EXPERTS, W is a matrix an expert, and a tile is pairs of row and expert: expert, first
  // place, count.
#ifndef TILE_X
#define TILE_X blockIdx.x
#endif
#ifndef READY
#define READY
#endif
  constexpr int WARPS = COLUMNS * SPLITS, THREADS_ALL = 32 * WARPS;
  // In pieces of 16 bytes: 64 columns of a row of W, and of x; of a step.
  constexpr int CODES = BITS / 2, X = 8, W_STEP = COLUMNS * 32 * CODES, X_STEP = TILES * 8 * X;
  constexpr int STAGE = SPLITS * (W_STEP + X_STEP);
  constexpr int WIDTH = COLUMNS * (GATED ? 16 : 32);
  extern __shared__ uint4 memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, r = lane >> 2;
  const int column = warp % COLUMNS, split = warp / COLUMNS;
#if EXPERTS
  READY;
  const int first = tiles[blockIdx.y * 3 + 1], count = tiles[blockIdx.y * 3 + 2];
  if (count == 0) return;
  const size_t expert = tiles[blockIdx.y * 3];
  const int N = w_shape[1], words = w_shape[2];
#else
  const int first = blockIdx.y * TILES * 8, count = min(TILES * 8, x_shape[0] - first);
  if (count <= 0) {
    READY;
    return;
  }
  const size_t expert = 0;
  const int N = w_shape[0], words = w_shape[1];
#endif
  const int K = words * 32 / BITS, steps = K / 64, rounds = (steps + SPLITS - 1) / SPLITS;
  const int n0 = TILE_X * WIDTH;
  // Where a set of 16 rows of W begins. The last block may have more sets than there are rows: they
  // make its last rows again.
  const auto begin_of = [&](int set) { return min(n0 + (GATED ? set / 2 : set) * 16, N - 16); };
  // Pieces of odd rows are swapped, so that eight lanes read from all banks.
  const auto placed = [](int piece, int row) { return CODES < 8 ? piece : piece ^ row % 2; };

  // Copies of W: a thread has CODES pieces a step; of x: as many as it takes.
  const auto w_row = [](int i) { return (i * THREADS_ALL + (int)threadIdx.x) % W_STEP / CODES; };
  const uint4* const x_all = (const uint4*)x;
  const uint4* const w_all = (const uint4*)w + expert * N * (words / 4);
#if GATED
  const uint4* const up_all = (const uint4*)w_up + expert * N * (words / 4);
#endif
  int w_from[CODES], w_to[CODES], w_split[CODES];  // in pieces: 32 bits, as registers are scarce
  #pragma unroll
  for (int i = 0; i < CODES; i++) {
    const int at = i * THREADS_ALL + threadIdx.x, row = w_row(i), piece = at % CODES, set = row / 16;
    w_split[i] = at / W_STEP;
    w_to[i] = w_split[i] * W_STEP + row * CODES + placed(piece, row);
    w_from[i] = (begin_of(set) + row % 16) * (words / 4) + piece;
  }
  constexpr int X_COPIES = SPLITS * X_STEP / THREADS_ALL;
  const auto copy_w = [&](int round) {
    #pragma unroll
    for (int i = 0; i < CODES; i++) {
      const int step = round * SPLITS + w_split[i];
#if GATED
      const uint4* const from = (w_row(i) / 16 % 2 ? up_all : w_all) + w_from[i];
#else
      const uint4* const from = w_all + w_from[i];
#endif
      if (step < steps) copy_of_line(memory + round % STAGES * STAGE + w_to[i], from + step * CODES);
    }
  };
  #pragma unroll
  for (int s = 0; s < STAGES - 1; s++) copy_w(s);
#if !EXPERTS
  READY;
#endif
  int x_from[X_COPIES];
  #pragma unroll
  for (int i = 0; i < X_COPIES; i++) {
    const int own = (i * THREADS_ALL + threadIdx.x) % X_STEP, row = own / X, place = first + min(row, count - 1);
#if EXPERTS && FIRST
    x_from[i] = order[place] / TOP * (X_ROW / 8) + own % X;
#else
    x_from[i] = place * (X_ROW / 8) + own % X;
#endif
  }
  const auto copy_x = [&](int round) {
    #pragma unroll
    for (int i = 0; i < X_COPIES; i++) {
      const int at = i * THREADS_ALL + threadIdx.x, own = at % X_STEP, row = own / X;
      const int step = round * SPLITS + at / X_STEP;
      uint4* const to = memory + round % STAGES * STAGE + SPLITS * W_STEP + at / X_STEP * X_STEP;
      if (step < steps) copy_of_line(to + row * X + (own % X ^ row % 2), x_all + x_from[i] + step * X);
    }
  };
  #pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    copy_x(s);
    end_turn();
  }

#if BITS < 16
  const int groups = K / GROUP;
  // Scale and bias of a row of W as one word; of floats all scales of 64 columns. The four lanes of a row
  // load those of four rounds; of integers in groups of 32 columns, of two.
  constexpr int AHEAD = TWO_WORDS ? 2 : 4;
  int scale_from[2][2], pairs[2][2], next_pairs[2][2];
#if GATED
  const Scale* const s_of[2] = {scales + expert * N * groups, scales_up + expert * N * groups};
#else
  const Scale* const s_of[1] = {scales + expert * N * groups};
#endif
#if !FLOATS && GATED
  const T* const b_of[2] = {biases + expert * N * groups, biases_up + expert * N * groups};
#elif !FLOATS
  const T* const b_of[1] = {biases + expert * N * groups};
#endif
  #pragma unroll
  for (int s = 0; s < 2; s++)
    #pragma unroll
    for (int half = 0; half < 2; half++)
      scale_from[s][half] = (begin_of(column * 2 + s) + r + half * 8) * groups;
  const auto load_scales = [&](int round) {
    const int at = min((round + quad % AHEAD) * SPLITS + split, steps - 1) * 64 / GROUP + quad / AHEAD * (64 / GROUP / 2);
    #pragma unroll
    for (int s = 0; s < 2; s++)
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const int from = scale_from[s][half] + at;
#if FLOATS
        next_pairs[s][half] = *(const Scales*)(s_of[GATED ? s : 0] + from);
#else
        next_pairs[s][half] = bits_of(s_of[GATED ? s : 0][from]) | bits_of(b_of[GATED ? s : 0][from]) << 16;
#endif
      }
  };
  load_scales(0);
#endif
  float acc[2][TILES][4];
  #pragma unroll
  for (int s = 0; s < 2; s++)
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      #pragma unroll
      for (int i = 0; i < 4; i++) acc[s][t][i] = 0.f;
  #pragma unroll 1
  for (int round = 0; round < rounds; round++) {
    await_turns<STAGES - 2>();
    __syncthreads();
    copy_w(round + STAGES - 1);
    copy_x(round + STAGES - 1);
    end_turn();
    const int step = round * SPLITS + split;
    if (step >= steps) continue;
    const uint4* const now = memory + round % STAGES * STAGE;
    const uint4* const w_now = now + split * W_STEP + column * 32 * CODES;
    const uint4* const x_now = now + SPLITS * W_STEP + split * X_STEP;
#if BITS < 16
    if (round % AHEAD == 0) {
      #pragma unroll
      for (int s = 0; s < 2; s++)
        #pragma unroll
        for (int half = 0; half < 2; half++) pairs[s][half] = next_pairs[s][half];
      load_scales(round + AHEAD);
    }
#if FLOATS
    FloatScale scale[2][2];
#else
    __nv_bfloat162 scale[2][2], bias[2][2];
#endif
    #pragma unroll
    for (int s = 0; s < 2; s++)
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const unsigned both = __shfl_sync(0xffffffffu, pairs[s][half], (lane & 32 - AHEAD) + round % AHEAD);
#if FLOATS
        scale[s][half] = slice_scale(both, quad);
#else
        const unsigned twice[2] = {__byte_perm(both, both, 0x1010), __byte_perm(both, both, 0x3232)};
        scale[s][half] = *(const __nv_bfloat162*)&twice[0];
        bias[s][half] = *(const __nv_bfloat162*)&twice[1];
#endif
      }
#endif
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      uint4 a[2][2];  // by set and half of it: elements (0, 1), (2, 3), (4, 5), (6, 7) of eight
      #pragma unroll
      for (int s = 0; s < 2; s++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = s * 16 + half * 8 + r;
#if BITS == 4
          const unsigned codes = ((const unsigned*)(w_now + row * CODES))[quad * 2 + h];
#if FLOATS
          a[s][half] = float_numbers(codes, scale[s][half]);
#else
          a[s][half] = numbers(codes, scale[s][half], bias[s][half]);
#endif
#elif BITS == 8
          const uint2 codes = ((const uint2*)(w_now + row * CODES))[quad * 2 + h];
#if FLOATS
          a[s][half] = float_numbers(codes, scale[s][half]);
#else
          a[s][half] = byte_numbers(codes, scale[s][half], bias[s][half]);
#endif
#else
          a[s][half] = w_now[row * CODES + placed(quad * 2 + h, row)];
#endif
        }
      const auto multiply = [&](int from, int to) {
        #pragma unroll
        for (int t = from; t < to; t++) {
          const uint4 b = x_now[(t * 8 + r) * X + (quad * 2 + h ^ r % 2)];
          #pragma unroll
          for (int s = 0; s < 2; s++) {
            product(acc[s][t], a[s][0].x, a[s][1].x, a[s][0].y, a[s][1].y, b.x, b.y);
            product(acc[s][t], a[s][0].z, a[s][1].z, a[s][0].w, a[s][1].w, b.z, b.w);
          }
        }
      };
      // Few branches: loads and products of several tiles overlap.
      multiply(0, TILES / 4);
      if (count > TILES * 2) multiply(TILES / 4, TILES / 2);
      if (count > TILES * 4) multiply(TILES / 2, TILES);
    }
  }
  await_copies();
  __syncthreads();
  float* const found = (float*)memory;  // [SPLITS, tile, row of x, COLUMNS * 2, row of W]
  constexpr int SETS = COLUMNS * 2, TILE = 8 * SETS * 16;
  #pragma unroll
  for (int s = 0; s < 2; s++)
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = quad * 2 + (i & 1), n = r + (i >> 1) * 8;
        found[(split * TILES + t) * TILE + (row * SETS + column * 2 + s) * 16 + n] = acc[s][t][i];
      }
  __syncthreads();
  for (int i = threadIdx.x; i < TILES * 8 * WIDTH; i += THREADS_ALL) {
    const int place = i / WIDTH, own = i % WIDTH, n = n0 + own;
    if (place >= count || n >= N) continue;
    float sum[GATED ? 2 : 1];
    #pragma unroll
    for (int s = 0; s < (GATED ? 2 : 1); s++) {
      const int set = GATED ? own / 16 * 2 + s : own / 16;
      sum[s] = 0.f;
      #pragma unroll
      for (int from = 0; from < SPLITS; from++)
        sum[s] += found[from * TILES * TILE + (place * SETS + set) * 16 + own % 16];
      sum[s] *= SUM_FACTOR;
    }
#if OFFSETS && GATED
    const T* const offsets_of[2] = {offsets, offsets_up};
#elif OFFSETS
    const T* const offsets_of[1] = {offsets};
#endif
#if OFFSETS
    #pragma unroll
    for (int s = 0; s < (GATED ? 2 : 1); s++)
      if (offsets_of[s]) sum[s] = (float)(T)sum[s] + (float)offsets_of[s][expert * N + n];
#endif
#if FIRST
    y[(size_t)(first + place) * Y_ROW + n] = (T)JOINED(sum);
#elif EXPERTS
    y[(size_t)order[first + place] * Y_ROW + n] = (T)sum[0];
#else
    y[(size_t)(first + place) * Y_ROW + n] = (T)sum[0];
#endif
  }
