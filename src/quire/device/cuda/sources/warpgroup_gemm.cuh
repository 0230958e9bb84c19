  // y = x W^T by wgmma, the tensor core instruction of Hopper: tiles of ROWS rows of x, bfloat16; W as codes
  // of 4 or 8 bits, or as it is (BITS 16).
  // Each of WARPGROUPS groups of four warps makes 64 rows of W: as its left operand, from registers where W is
  // coded. x is the right operand, in shared memory. With GATED, 8 rows of one matrix and 8 of the other alternate.
  // One more group copies steps of 64 columns of W and x to STAGES stages in shared memory.
  // With SHARING, thread blocks make as many whole tiles each, side by side, so that they read the same W and x at a
  // time. Of the tiles left before those, each has an equal share of steps (Stream-K, Osama et al. 2023): who has the
  // last steps of a tile adds what the blocks before stored in `sums`, once their `flags` are set: one for each warp.
  // With EXPERTS, W is a matrix an expert, and a tile is pairs of row and expert: expert, first
  // place, count; tiles without pairs are the last ones. Thread blocks make one tile after the other. The kernel of
  // first products waits for the tiles. That of the last ones starts only when those have waited.
  // With X_BOXES, the card copies a step of x by itself, see `copy_box`.
  // With INTERLEAVED, of codes of 4 bits that are floats, a lane unpacks 16 neighbouring columns of a row of W, in pairs
  // four apart. The columns of x lie in that order, see `interleaved.cuh`; with TURNS_X, the copying threads put them
  // in it. With Y_INTERLEAVED, so do those of y.
  // Otherwise a thread block makes a tile: (blockIdx.x, blockIdx.y) of W and of x.
  // W_TILES is the number of tiles of W; MATRIX declares of a tile: its number within its matrix (part), the rows of
  // that matrix (N), and which it is, where there are several.
#if EXPERTS
#define W_TILES ((N + WIDTH - 1) / WIDTH)
#define MATRIX(tile) const int part = tile;
#elif !defined(W_TILES)
#define W_TILES gridDim.x
#define MATRIX(tile) const int part = tile, N = w_shape[0];
#endif
#ifndef SHARING
#define SHARING 0
#endif
#ifndef X_BOXES
#define X_BOXES 0
#endif
#ifndef TURNS_X
#define TURNS_X 0
#endif
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif
#ifndef Y_INTERLEAVED
#define Y_INTERLEAVED 0
#endif
#ifndef READY
#define READY
#endif
  // A team copies a step. Teams take turns: two have half as many threads each, whose addresses serve twice the copies.
  constexpr int WARPS = 4 * WARPGROUPS, COPYING = 128, TEAMS = INTERLEAVED ? 2 : 1, TEAM = COPYING / TEAMS;
  // Whether x is multiplied as it is copied: copies fill a stage by themselves.
  constexpr bool AS_COPIED = INTERLEAVED && !TURNS_X;
  constexpr int W_ROWS = 64 * WARPGROUPS, WIDTH = W_ROWS / (1 + GATED);
  // In pieces of 16 bytes: 64 columns of a row of W, and of x; of a step.
  constexpr int CODES = BITS / 2, X = 8, X_STEP = ROWS * X, W_STEP = W_ROWS * CODES, STAGE = X_STEP + W_STEP;
  // Registers of a thread that multiplies and of one that copies, where an equal share is not enough. Together they
  // are no more than the thread block has at its start.
  constexpr int TAKEN = WARPGROUPS == 4 ? EXPERTS ? 104 : 112 : ROWS == 256 ? 232 : 0;
  constexpr int KEPT = WARPGROUPS == 4 ? EXPERTS ? 64 : 32 : 40;
  extern __shared__ __align__(1024) uint4 memory[];
  // A stage is full when the copying threads say so, and free when the other warps do.
  unsigned long long* const full = (unsigned long long*)(memory + STAGES * STAGE);
  unsigned long long* const free = full + STAGES;
  const int lane = threadIdx.x & 31, quad = lane & 3, r = lane >> 2;
  const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0);  // so the compiler knows it is the same in all lanes
#if EXPERTS
#if FIRST
  READY;
#endif
  int row_tiles = 0;
  #pragma unroll 8
  for (int tile = lane; tile < tiles_shape[0]; tile += 32) row_tiles += tiles[tile * 3 + 2] > 0;
  for (int by = 16; by > 0; by /= 2) row_tiles += __shfl_xor_sync(0xffffffffu, row_tiles, by);
  const int N = w_shape[1], words = w_shape[2];
#else
  const int all_rows = x_shape[0], row_tiles = SHARING ? (all_rows + ROWS - 1) / ROWS : gridDim.y;
  if (!SHARING && (int)blockIdx.y * ROWS >= all_rows) {
    READY;
    return;
  }
  const int words = w_shape[1];
#endif
  const int K = words * 32 / BITS, all_steps = K / 64;
  constexpr bool LOOPS = SHARING || EXPERTS;
  const int tiles_there = LOOPS ? W_TILES * row_tiles : 0;
  // There may be far fewer rows than the launch is for. Every block that others may wait for has LEAST_STEPS or more.
  const int blocks = SHARING ? max(min((int)gridDim.x, tiles_there * all_steps / LEAST_STEPS), 1) : gridDim.x;
  if (SHARING && (int)blockIdx.x >= blocks) {
    READY;
    return;
  }
  // Tiles are numbered W tile by W tile. The first ones are shared: none where all blocks make as many whole ones, else
  // at least half a tile a block, so that a tile is cut in few pieces.
  const int left = SHARING ? tiles_there % blocks : 0;
  const int shared_tiles = left > 0 && left < blocks / 2 && tiles_there > blocks ? left + blocks : left;
  const auto first_step_of = [&](int block) { return (int)((unsigned)shared_tiles * all_steps * block / blocks); };
  const int low = SHARING ? first_step_of(blockIdx.x) : 0, high = SHARING ? first_step_of(blockIdx.x + 1) : 0;
  // Steps of one tile, none behind the last one of this thread block. A block begins with those that it leaves to the
  // next one, so that nobody waits long; and nobody waits for a later block, which might never start.
  struct Span { int tile, begin, steps; };
  int end = high, whole = LOOPS ? shared_tiles + blockIdx.x : blockIdx.x * row_tiles + blockIdx.y;
  const auto next_span = [&] {
    Span span{whole, 0, all_steps};
    if (end > low) {
      span.tile = (end - 1) / all_steps;
      span.begin = max(low - span.tile * all_steps, 0);
      span.steps = end - span.tile * all_steps - span.begin;
      end -= span.steps;
    } else {
      if (LOOPS ? whole >= tiles_there : whole < 0) span.steps = 0;
      whole = LOOPS ? whole + blocks : -1;
    }
    return span;
  };
  const auto rows_of = [&](const Span& span, int& first) {
#if EXPERTS
    const int* const pairs = tiles + span.tile % row_tiles * 3;
    first = pairs[1];
    return pairs[2];
#else
    first = span.tile % row_tiles * ROWS;
    return min(ROWS, all_rows - first);
#endif
  };
  const auto expert_of = [&](const Span& span) {
#if EXPERTS
    return tiles[span.tile % row_tiles * 3];
#else
    return 0;
#endif
  };
  // Pieces of neighbouring rows are permuted, so that eight lanes read from all banks. That of x, and of W of
  // 16 bits, is the swizzle of 128 bytes that wgmma reads.
  const auto placed = [](int piece, int row) {
    return BITS == 4 ? piece : BITS == 8 ? piece ^ (row >> 1 & 3) : piece ^ (row & 7);
  };
  // The row of W, of a tile's 16, that is the operand's row `row`: a lane's sums are of four neighbours. Of two
  // matrices they are 8 of each.
  const auto turned = [](int row) {
    if (Y_INTERLEAVED) return (GATED ? 0 : row / 8 * 8) + row % 8 / 2 + row % 2 * 4;  // pairs four apart
    return GATED ? row % 8 : row % 8 / 2 * 4 + row / 8 * 2 + row % 2;
  };
  if (threadIdx.x < STAGES) {
    initialize(full + threadIdx.x, TEAM);
    initialize(free + threadIdx.x, WARPS);
  }
  __syncthreads();

  if (warp >= WARPS) {
    if (TAKEN > 0) keep_registers<KEPT>();
    // A thread copies the same piece of every PASS-th row: those are of one matrix.
    constexpr int W_PASS = TEAM / CODES, X_PASS = TEAM / X, W_COPIES = W_STEP / TEAM, X_COPIES = X_STEP / TEAM;
    constexpr int N_PASS = W_PASS / (1 + GATED), LAG = TURNS_X ? STAGES / 4 : 2, EARLY = STAGES / 2;
    const int team = TEAMS == 1 ? 0 : (threadIdx.x - 32 * WARPS) / TEAM, own = (threadIdx.x - 32 * WARPS) % TEAM, w_row = own / CODES, x_row = own / X;
    uint4* const w_to = memory + X_STEP + w_row * CODES + placed(own % CODES, w_row);
    uint4* const x_to = memory + x_row * X + (own % X ^ x_row & 7);
    int stage = team, odd = 1, copied = 0, said = team;  // the parity of turns in which stages were freed
    int skipped = team;  // steps of the other team before the next one of this team
    bool waited = false;
#if TURNS_X
    unsigned* pairs_to[4];
    #pragma unroll
    for (int p = 0; p < 4; p++) pairs_to[p] = (unsigned*)(memory + x_row * X + (own % 2 * 4 + p ^ x_row & 7)) + own % X / 2;
#endif
    // Ends a step whose copies have arrived.
    const auto fill = [&] {
#if TURNS_X
      // Eight lanes have copied a row. Each has 8 columns of it, which become a pair of each of four pieces.
      uint4 some[X_COPIES];
      #pragma unroll
      for (int i = 0; i < X_COPIES; i++) some[i] = apart(x_to[said * STAGE + i * TEAM]);
      __syncwarp();
      #pragma unroll
      for (int i = 0; i < X_COPIES; i++) {
        const unsigned pairs[4] = {some[i].x, some[i].y, some[i].z, some[i].w};
        #pragma unroll
        for (int p = 0; p < 4; p++) pairs_to[p][(said * STAGE + i * TEAM) * 4] = pairs[p];
      }
#endif
      shared_memory_is_written();
      arrive(full + said);
      if ((said += TEAMS) >= STAGES) said -= STAGES;
    };
    #pragma unroll 1
    for (Span now = next_span(); now.steps > 0; now = next_span()) {
      int first;
      const int there = rows_of(now, first);
      MATRIX(now.tile / row_tiles)
#if GATED
      const unsigned* const from = w_row / 8 % 2 ? w_up : w;
#else
      const unsigned* const from = w;
#endif
      const int n = part * WIDTH + w_row / 16 * (16 / (1 + GATED)) + turned(w_row % 16);
      const size_t w_from = (size_t)expert_of(now) * N + min(n, N - 1);
      const uint4* w_at = (const uint4*)(from + w_from * words) + (now.begin + skipped) * CODES + own % CODES;
      const uint4* x_at = (const uint4*)x + (now.begin + skipped) * X + own % X;
#if EXPERTS && FIRST
      int x_from[X_COPIES];
      #pragma unroll
      for (int i = 0; i < X_COPIES; i++)
        x_from[i] = order[first + min(x_row + i * X_PASS, there - 1)] / TOP * (X_ROW / 8);
#else
      x_at += (size_t)(first + min(x_row, there - 1)) * (X_ROW / 8);
#endif
      // Of whole tiles all addresses are one and a constant. Beyond the edge of W, its last row is copied again; of x
      // nothing is copied, and products with what is in its place are not read.
      const bool whole_w = (part + 1) * WIDTH <= N;
      const auto copy_w = [&](int to) {
        if (whole_w) {
          #pragma unroll
          for (int i = 0; i < W_COPIES; i++)
            copy_of_line(w_to + to * STAGE + i * TEAM, w_at + i * N_PASS * (words / 4));
        } else {
          #pragma unroll 4
          for (int i = 0; i < W_COPIES; i++)
            copy_of_line(w_to + to * STAGE + i * TEAM,
                         w_at + (long long)(min(n + i * N_PASS, N - 1) - min(n, N - 1)) * (words / 4));
        }
        w_at += TEAMS * CODES;
      };
      const auto copy_x = [&](int to, [[maybe_unused]] int step) {
#if X_BOXES
        if (own > 0) return;
        expect(full + to, X_STEP * 16);
        copy_box<ROWS>(memory + to * STAGE, x_map, x, X_ROW, (now.begin + step) * 64, first, full + to);
        return;
#elif EXPERTS && FIRST
        #pragma unroll
        for (int i = 0; i < X_COPIES; i++)
          if (x_row + i * X_PASS < there) copy_of_line(x_to + to * STAGE + i * TEAM, x_at + x_from[i]);
#else
        if (there == ROWS) {
          #pragma unroll
          for (int i = 0; i < X_COPIES; i++)
            copy_of_line(x_to + to * STAGE + i * TEAM, x_at + i * X_PASS * (X_ROW / 8));
        } else {
          #pragma unroll 4
          for (int i = 0; i < X_COPIES; i++)
            if (x_row + i * X_PASS < there)
              copy_of_line(x_to + to * STAGE + i * TEAM, x_at + i * X_PASS * (X_ROW / 8));
        }
#endif
        x_at += TEAMS * X;
      };
      // W does not wait for the kernel before.
      const int early = waited ? 0 : min(EARLY, now.steps);
      if (!waited) {
        for (int s = skipped; s < early; s += TEAMS) copy_w(s);
#if !(EXPERTS && FIRST)
        READY;
#endif
        waited = true;
      }
      int step = skipped;
      #pragma unroll 1
      for (; step < now.steps; step += TEAMS) {
        if (copied * TEAMS + team >= STAGES) await_barrier(free + stage, odd);
        if (step >= early) copy_w(stage);
        copy_x(stage, step);
        if (AS_COPIED) arrive_with_copies(full + stage);
        else end_turn();
        if ((stage += TEAMS) >= STAGES) stage -= STAGES, odd ^= 1;
        if (copied++ >= LAG && !AS_COPIED) {
          await_turns<LAG>();
          fill();
        }
      }
      skipped = TEAMS == 1 ? 0 : step - now.steps;
    }
    await_copies();
    for (int left = AS_COPIED ? 0 : min(copied, LAG); left > 0; left--) fill();
#if !(EXPERTS && FIRST)
    if (!waited) READY;
#endif
    return;
  }

  if (TAKEN > 0) take_registers<TAKEN>();
#if !(EXPERTS && FIRST)
  READY;
#endif
  // Words of scales in a step, and the steps that four lanes load them for.
  constexpr int EACH = BITS < 16 && TWO_WORDS ? 2 : 1, AHEAD = 4 / EACH, UNROLLED = ROWS == 256 ? 1 : AHEAD;
#if BITS < 16
  const int groups = K / GROUP;
  // Scale and bias of a row of W as one word; of floats all scales of 64 columns. The four lanes of a row load those
  // of four steps; of integers in groups of 32 columns, of two. What is loaded is joined when it is used, so that
  // nobody waits for it.
  unsigned words_of[2], next_scales[2], next_biases[2];
  int scales_from[2];
  const auto load_scales = [&](const Span& span, int step) {
    MATRIX(span.tile / row_tiles)
#if GATED
    const Scale* const s_of[2] = {scales, scales_up};
#else
    const Scale* const s_of[2] = {scales, scales};
#endif
#if !FLOATS && GATED
    const T* const b_of[2] = {biases, biases_up};
#elif !FLOATS
    const T* const b_of[2] = {biases, biases};
#endif
    if (step == 0) {
      const int n0 = part * WIDTH + warp * (GATED ? 8 : 16), before = expert_of(span) * N;
      #pragma unroll
      for (int half = 0; half < 2; half++)
        scales_from[half] = (before + min(n0 + turned(r + half * 8), N - 1)) * groups;
    }
    const int at = (span.begin + min(step + quad / EACH, span.steps - 1)) * 64 / GROUP + quad % EACH * (64 / GROUP / EACH);
    #pragma unroll
    for (int half = 0; half < 2; half++) {
#if FLOATS
      next_scales[half] = *(const Scales*)(s_of[half] + scales_from[half] + at);
#else
      next_scales[half] = bits_of(s_of[half][scales_from[half] + at]);
      next_biases[half] = bits_of(b_of[half][scales_from[half] + at]);
#endif
    }
  };
#endif
  const int own_row = warp * 16 + r;  // and the one 8 below
  const Tile x_tiles = tile_at(memory);
  int stage = 0, odd = 0, last = STAGES - 1;
  Span now = next_span();
#if BITS < 16
  if (now.steps > 0) load_scales(now, 0);
#endif
  float acc[ROWS / 2];
  #pragma unroll 1
  while (now.steps > 0) {
    #pragma unroll
    for (int i = 0; i < ROWS / 2; i++) acc[i] = 0.f;
    const int steps = now.steps;
    #pragma unroll 1
    for (int ahead = 0; ahead < steps; ahead += AHEAD) {
#if BITS < 16
      #pragma unroll
      for (int half = 0; half < 2; half++) words_of[half] = joined_scales(next_scales[half], FLOATS ? 0 : next_biases[half]);
      load_scales(now, ahead + AHEAD);
#endif
      #pragma unroll UNROLLED
      for (int i = 0; i < AHEAD; i++) {
        if (ahead + i >= steps) break;
        await_barrier(full + stage, odd);
        if (AS_COPIED) shared_memory_is_written();
        const Tile x_now = moved(x_tiles, stage * STAGE);
        // Products of the step before have been awaited, too.
        const auto free_last = [&] {
          if ((ahead > 0 || i > 0) && lane == 0) arrive(free + last);
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
#if INTERLEAVED
        const uint2* const w_now = (const uint2*)(memory + stage * STAGE + X_STEP + own_row * CODES) + quad;
        FloatScale own_scales[2];
        uint2 codes[2];
        #pragma unroll
        for (int half = 0; half < 2; half++) {
          const int from = i * EACH + quad * EACH / 4;
          own_scales[half] = scale_of(__shfl_sync(0xffffffffu, (int)words_of[half], from, 4), quad);
          codes[half] = w_now[half * 8 * CODES * 2];
        }
#else
        const uint4* const w_now = memory + stage * STAGE + X_STEP + own_row * CODES;
        unsigned scaling[2];
#endif
        // Half a step is unpacked while the products of the half before run.
        #pragma unroll
        for (int part = 0; part < 2; part++) {
          unsigned a[2][2][2];  // by slice of 16 columns, row, and whether it is of the last 8 columns
#if INTERLEAVED
          #pragma unroll
          for (int half = 0; half < 2; half++) {
            const uint4 pairs = float_pairs(part ? codes[half].y : codes[half].x, own_scales[half]);
            a[0][half][0] = pairs.x, a[0][half][1] = pairs.y, a[1][half][0] = pairs.z, a[1][half][1] = pairs.w;
          }
#else
          if (part < EACH) {
            #pragma unroll
            for (int half = 0; half < 2; half++)
              scaling[half] = __shfl_sync(0xffffffffu, (int)words_of[half], i * EACH + part, 4);
          }
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
                a[s][half][high] = scaled(small_pair(pair[high]), slice_scale(scaling[half], slice));
#else
                a[s][half][high] = affine_pair(pair[high], scaling[half]);
#endif
            }
          }
#endif
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
    const Span done = now;
    now = next_span();
#if BITS < 16
    if (now.steps > 0) load_scales(now, 0);
#endif
    await_products<0>();
    #pragma unroll
    for (int i = 0; i < ROWS / 2; i++) computed(acc[i]);
    if (lane == 0) arrive(free + last);
#if SHARING
    float4* const all_sums = (float4*)sums + threadIdx.x;
    const auto sums_of = [&](int block) { return all_sums + (size_t)block * (ROWS / 8) * 32 * WARPS; };
    if (done.begin + done.steps < all_steps) {
      #pragma unroll
      for (int j = 0; j < ROWS / 8; j++)
        sums_of(blockIdx.x)[j * 32 * WARPS] = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
      __syncwarp();
      if (lane == 0) set_flag(flags + blockIdx.x * WARPS + warp);
      continue;
    }
    // The last blocks before this one have the tile's steps up to `done.begin`.
    const int tile_begin = done.tile * all_steps;
    int others = 0;
    if (done.begin > 0)
      do others++;
      while (first_step_of(blockIdx.x - others) > tile_begin);
    for (int other = 1 + lane; other <= others; other += 32)
      await_flag(flags + (blockIdx.x - other) * WARPS + warp);
    __syncwarp();
    constexpr int AT_ONCE = ROWS * WARPGROUPS <= 192 ? 2 : 1;  // more do not fit into registers
    #pragma unroll AT_ONCE
    for (int other = 1; other <= others; other++) {
      const float4* const from = sums_of(blockIdx.x - other);
      #pragma unroll
      for (int j = 0; j < ROWS / 8; j++) {
        const float4 more = stored_by_another(from + j * 32 * WARPS);
        acc[4 * j] += more.x, acc[4 * j + 1] += more.y, acc[4 * j + 2] += more.z, acc[4 * j + 3] += more.w;
      }
    }
    __syncwarp();
    for (int other = 1 + lane; other <= others; other += 32) flags[(blockIdx.x - other) * WARPS + warp] = 0;
#endif
    int first;
    const int there = rows_of(done, first);
    MATRIX(done.tile / row_tiles)
    const int n0 = part * WIDTH + warp * (GATED ? 8 : 16);
#if OFFSETS && GATED
    const T* const offsets_of[2] = {offsets, offsets_up};
#elif OFFSETS
    const T* const offsets_of[2] = {offsets, offsets};
#endif
#if OFFSETS
    float offset[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const int n = min(n0 + turned(r + half * 8), N - 1);
      offset[half] = offsets_of[half] ? (float)offsets_of[half][(size_t)expert_of(done) * N + n] : 0.f;
    }
#endif
    // A lane has sums of two rows of W and two of x; transposed, those of neighbours in a row of y.
    #pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
      unsigned bits[4];
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        float& own = acc[4 * j + i];
        own *= PAIR_FACTOR;
#if OFFSETS
        if (offsets_of[i / 2]) own = (float)(T)own + offset[i / 2];
#endif
      }
      #pragma unroll
      for (int i = 0; i < 4 / (1 + GATED); i++) {
#if FIRST
        const float own[2] = {acc[4 * j + i], acc[4 * j + (2 * GATED + i) % 4]};
        bits[i] = bits_of((T)JOINED(own));
#else
        bits[i] = bits_of((T)acc[4 * j + i]);
#endif
      }
      const int place = j * 8 + r;
#if FIRST || !EXPERTS
      T* const to = y + (size_t)(first + place) * Y_ROW;
#else
      T* const to = y + (size_t)order[first + min(place, there - 1)] * Y_ROW;
#endif
#if Y_INTERLEAVED
      #pragma unroll
      for (int i = 0; i < 2 - GATED; i++) {
        const unsigned found = transposed(bits[2 * i] | bits[2 * i + 1] << 16);
        if (place < there && n0 < N) *pair_of_columns(to, n0 + 8 * i, quad) = found;
      }
#elif GATED
      const int n = n0 + 2 * quad;
      const unsigned found = transposed(bits[0] | bits[1] << 16);
      if (place < there && n < N) *(unsigned*)(to + n) = found;
#else
      const int n = n0 + 4 * quad;
      const uint2 found = {transposed(bits[0] | bits[1] << 16), transposed(bits[2] | bits[3] << 16)};
      if (place < there && n < N) *(uint2*)(to + n) = found;
#endif
    }
  }
