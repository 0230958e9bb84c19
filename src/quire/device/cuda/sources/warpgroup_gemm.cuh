  // y = x W^T by wgmma, the tensor core instruction of Hopper: tiles of ROWS rows of x, bfloat16; W as codes
  // of 4 or 8 bits, or as it is (BITS 16).
  // Each of WARPGROUPS groups of four warps makes 64 rows of W: as its left operand, from registers where W is
  // coded. x is the right operand, in shared memory. With GATED, 8 rows of one matrix and 8 of the other alternate.
  // One more group copies steps of 64 columns of W and x to STAGES stages in shared memory.
  // SPLITS thread blocks, a cluster, share the columns and add up at the end.
  // With EXPERTS, W is a matrix an expert, and a tile is pairs of row and expert: expert, first
  // place, count.
#ifndef TILE_X
#define TILE_X blockIdx.x
#endif
#ifndef READY
#define READY
#endif
  constexpr int WARPS = 4 * WARPGROUPS, COPYING = 128, THREADS_ALL = 32 * WARPS + COPYING;
  constexpr int W_ROWS = 64 * WARPGROUPS, WIDTH = W_ROWS / (1 + GATED);
  // In pieces of 16 bytes: 64 columns of a row of W, and of x; of a step.
  constexpr int CODES = BITS / 2, X = 8, X_STEP = ROWS * X, W_STEP = W_ROWS * CODES, STAGE = X_STEP + W_STEP;
  // Registers of a thread that multiplies and of one that copies, where an equal share is not enough. Together they
  // are no more than the thread block has at its start.
  constexpr int TAKEN = WARPGROUPS == 4 ? 112 : ROWS == 256 ? 232 : 0, KEPT = WARPGROUPS == 4 ? 32 : 40;
  // Sums in shared memory, at the end: [row of x, row of the tile]. Rows are padded, so that a warp writes to
  // all banks.
  constexpr int PADDED = W_ROWS + 4, FOUND = ROWS * PADDED / 4;
  extern __shared__ __align__(1024) uint4 memory[];
  // A stage is full when the copying threads say so, and free when the other warps do.
  unsigned long long* const full = (unsigned long long*)(memory + (STAGES * STAGE > FOUND ? STAGES * STAGE : FOUND));
  unsigned long long* const free = full + STAGES;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, r = lane >> 2;
  const int split = blockIdx.y % SPLITS;
#if EXPERTS
  READY;
  const int* const tile = tiles + blockIdx.y / SPLITS * 3;
  const int first = tile[1], count = tile[2];
  if (count == 0) return;
  const size_t expert = tile[0];
  const int N = w_shape[1], words = w_shape[2];
#else
  const int first = blockIdx.y / SPLITS * ROWS, count = min(ROWS, x_shape[0] - first);
  if (count <= 0) {
    READY;
    return;
  }
  const size_t expert = 0;
  const int N = w_shape[0], words = w_shape[1];
#endif
  const int K = words * 32 / BITS, all_steps = K / 64, each = (all_steps + SPLITS - 1) / SPLITS;
  const int begin = min(split * each, all_steps), steps = min(each, all_steps - begin);
  const int n0 = TILE_X * WIDTH;
  // Pieces of neighbouring rows are permuted, so that eight lanes read from all banks. That of x, and of W of
  // 16 bits, is the swizzle of 128 bytes that wgmma reads.
  const auto placed = [](int piece, int row) {
    return BITS == 4 ? piece : BITS == 8 ? piece ^ (row >> 1 & 3) : piece ^ (row & 7);
  };
  if (threadIdx.x < STAGES) {
    initialize(full + threadIdx.x, COPYING);
    initialize(free + threadIdx.x, WARPS);
  }
  __syncthreads();

  const int own_row = warp * 16 + r;  // and the one 8 below
  float* const found = (float*)memory;
  if (warp >= WARPS) {
    if (TAKEN > 0) keep_registers<KEPT>();
    // A thread copies the same piece of every PASS-th row: those are of one matrix.
    constexpr int W_PASS = COPYING / CODES, X_PASS = COPYING / X, LAG = 2, EARLY = STAGES / 2;
    constexpr int N_PASS = W_PASS / (1 + GATED);
    const int own = threadIdx.x - 32 * WARPS, w_row = own / CODES, x_row = own / X;
#if GATED
    const unsigned* const from = w_row / 8 % 2 ? w_up : w;
    const int n = n0 + w_row / 16 * 8 + w_row % 8;
#else
    const unsigned* const from = w;
    const int n = n0 + w_row;
#endif
    const uint4* w_at = (const uint4*)(from + expert * N * words) + begin * CODES + own % CODES;
    const uint4* x_at = (const uint4*)x + begin * X + own % X;
    uint4* const w_to = memory + X_STEP + w_row * CODES + placed(own % CODES, w_row);
    uint4* const x_to = memory + x_row * X + (own % X ^ x_row & 7);
    const auto copy_w = [&](int stage) {
      #pragma unroll 4  // the addresses of more do not fit into registers
      for (int i = 0; i < W_STEP / COPYING; i++)
        copy_of_line(w_to + stage * STAGE + i * COPYING, w_at + (size_t)min(n + i * N_PASS, N - 1) * (words / 4));
      w_at += CODES;
    };
    for (int s = 0; s < min(EARLY, steps); s++) copy_w(s);
#if !EXPERTS
    READY;
#endif
    const auto copy_x = [&](int stage) {
      #pragma unroll
      for (int i = 0; i < X_STEP / COPYING; i++) {
        const int place = first + min(x_row + i * X_PASS, count - 1);
#if EXPERTS && FIRST
        copy_of_line(x_to + stage * STAGE + i * COPYING, x_at + (size_t)(order[place] / TOP) * (X_ROW / 8));
#else
        copy_of_line(x_to + stage * STAGE + i * COPYING, x_at + (size_t)place * (X_ROW / 8));
#endif
      }
      x_at += X;
    };
    int stage = 0, odd = 1, said = 0;  // the parity of turns in which stages were freed
    #pragma unroll 1
    for (int step = 0; step < steps + LAG; step++) {
      if (step < steps) {
        if (step >= STAGES) await_barrier(free + stage, odd);
        if (step >= EARLY) copy_w(stage);
        copy_x(stage);
      }
      end_turn();
      if (++stage == STAGES) stage = 0, odd ^= 1;
      if (step >= LAG) {
        await_turns<LAG>();
        shared_memory_is_written();
        arrive(full + said);
        if (++said == STAGES) said = 0;
      }
    }
    await_copies();
    __syncthreads();
  } else {
    if (TAKEN > 0) take_registers<TAKEN>();
#if !EXPERTS
    READY;
#endif
#if BITS < 16
    const int groups = K / GROUP;
    // Scale and bias of a row of W as one word; of floats all scales of 64 columns. The four lanes of a row
    // load those of four steps.
    int scale_from[2];
    unsigned pairs[2], next_pairs[2];
#if GATED
    const Scale* const s_of[2] = {scales + expert * N * groups, scales_up + expert * N * groups};
#else
    const Scale* const s_of[1] = {scales + expert * N * groups};
#endif
#if !FLOATS && GATED
    const T* const b_of[2] = {biases + expert * N * groups, biases_up + expert * N * groups};
#elif !FLOATS
    const T* const b_of[1] = {biases + expert * N * groups};
#elif GROUP == 16
    typedef unsigned Scales;
#else
    typedef unsigned short Scales;
#endif
    #pragma unroll
    for (int half = 0; half < 2; half++)
      scale_from[half] = min(n0 + (GATED ? warp * 8 + r : own_row + half * 8), N - 1) * groups;
    const auto load_scales = [&](int step) {
      const int at = (begin + min(step + quad, steps - 1)) * 64 / GROUP;
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const int from = scale_from[half] + at, of = GATED ? half : 0;
#if FLOATS
        next_pairs[half] = *(const Scales*)(s_of[of] + from);
#else
        next_pairs[half] = bits_of(s_of[of][from]) | bits_of(b_of[of][from]) << 16;
#endif
      }
    };
    load_scales(0);
#endif
    float acc[ROWS / 2];
    #pragma unroll
    for (int i = 0; i < ROWS / 2; i++) acc[i] = 0.f;
    const Tile x_tiles = tile_at(memory);
    int stage = 0, odd = 0, last = STAGES - 1;
    #pragma unroll 1
    for (int four = 0; four < steps; four += 4) {
#if BITS < 16
      #pragma unroll
      for (int half = 0; half < 2; half++) pairs[half] = next_pairs[half];
      load_scales(four + 4);
#endif
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        if (four + i >= steps) break;
        await_barrier(full + stage, odd);
        const Tile x_now = moved(x_tiles, stage * STAGE);
        // Products of the step before have been awaited, too.
        const auto free_last = [&] {
          if ((four > 0 || i > 0) && lane == 0) arrive(free + last);
        };
#if BITS == 16
        const Tile w_now = moved(x_now, X_STEP + (warp >> 2) * 64 * CODES);
        start_products();
        #pragma unroll
        for (int slice = 0; slice < 4; slice++) wgmma_shared(acc, w_now, x_now, slice);
        end_products();
        await_products<1>();
        free_last();
#else
        const uint4* const w_now = memory + stage * STAGE + X_STEP + own_row * CODES;
        unsigned scaling[2];
        #pragma unroll
        for (int half = 0; half < 2; half++) scaling[half] = __shfl_sync(0xffffffffu, (int)pairs[half], i, 4);
        // Half a step is unpacked while the products of the half before run.
        #pragma unroll
        for (int part = 0; part < 2; part++) {
          unsigned a[2][2][2];  // by slice of 16 columns, row, and whether it is of the last 8 columns
          #pragma unroll
          for (int half = 0; half < 2; half++) {
#if BITS == 4
            const uint4 codes = w_now[half * 8 * CODES + part];
#endif
            #pragma unroll
            for (int s = 0; s < 2; s++) {
              const int slice = part * 2 + s;
#if BITS == 4
              const unsigned words[2] = {s ? codes.z : codes.x, s ? codes.w : codes.y};
              const unsigned pair[2] = {pair_of_byte(words[0], quad), pair_of_byte(words[1], quad)};
#else
              const int piece = half * 8 * CODES + placed(slice, own_row + half * 8);
              const unsigned* const codes = (const unsigned*)(w_now + piece);
              const unsigned pair[2] = {pair_of_half(codes[quad / 2], quad), pair_of_half(codes[2 + quad / 2], quad)};
#endif
              #pragma unroll
              for (int high = 0; high < 2; high++)
#if FLOATS
                a[s][half][high] =
                  scaled(float_pair(pair[high]), float_scale(scaling[half] >> slice * 16 / GROUP * 8 & 255));
#else
                a[s][half][high] = affine_pair(pair[high], scaling[half]);
#endif
            }
          }
          start_products();
          #pragma unroll
          for (int s = 0; s < 2; s++) wgmma(acc, a[s][0][0], a[s][1][0], a[s][0][1], a[s][1][1], x_now, part * 2 + s);
          end_products();
          await_products<1>();
          if (part == 0) free_last();
        }
#endif
        last = stage;
        if (++stage == STAGES) stage = 0, odd ^= 1;
      }
    }
    await_products<0>();
    #pragma unroll
    for (int i = 0; i < ROWS / 2; i++) computed(acc[i]);
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < ROWS / 2; i++)
      found[(i / 4 * 8 + quad * 2 + i % 2) * PADDED + own_row + i / 2 % 2 * 8] = acc[i];
  }
#if SPLITS > 1
  meet_cluster();
#else
  __syncthreads();
#endif
#if OFFSETS && GATED
  const T* const offsets_of[2] = {offsets, offsets_up};
#elif OFFSETS
  const T* const offsets_of[1] = {offsets};
#endif
  constexpr int OWN_ROWS = ROWS / SPLITS, FOURS = WIDTH / 4;
  for (int i = threadIdx.x; i < OWN_ROWS * FOURS; i += THREADS_ALL) {
    const int place = split * OWN_ROWS + i / FOURS, own = i % FOURS * 4, n = n0 + own;
    if (place >= count || n >= N) continue;
    float4 sum[1 + GATED];
    #pragma unroll
    for (int s = 0; s < 1 + GATED; s++) {
      const float* const from = found + place * PADDED + (GATED ? own / 8 * 16 + own % 8 + s * 8 : own);
#if SPLITS > 1
      sum[s] = make_float4(0.f, 0.f, 0.f, 0.f);
      #pragma unroll
      for (int rank = 0; rank < SPLITS; rank++) {
        const float4 part = of_cluster(from, rank);
        sum[s].x += part.x, sum[s].y += part.y, sum[s].z += part.z, sum[s].w += part.w;
      }
#else
      sum[s] = *(const float4*)from;
#endif
    }
#if FIRST
    T* const to = y + (size_t)(first + place) * Y_ROW + n;
#elif EXPERTS
    T* const to = y + (size_t)order[first + place] * Y_ROW + n;
#else
    T* const to = y + (size_t)(first + place) * Y_ROW + n;
#endif
    T four[4];
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      float sums[1 + GATED];
      #pragma unroll
      for (int s = 0; s < 1 + GATED; s++) {
        sums[s] = j == 0 ? sum[s].x : j == 1 ? sum[s].y : j == 2 ? sum[s].z : sum[s].w;
#if OFFSETS
        if (offsets_of[s]) sums[s] = (float)(T)sums[s] + (float)offsets_of[s][expert * N + n + j];
#endif
      }
#if FIRST
      four[j] = (T)JOINED(sums);
#else
      four[j] = (T)sums[0];
#endif
    }
    *(uint2*)to = *(const uint2*)four;
  }
#if SPLITS > 1
  meet_cluster();  // until nobody reads this block's shared memory any more
#endif
