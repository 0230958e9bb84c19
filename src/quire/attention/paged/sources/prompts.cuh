  // Attention of many rows of a sequence over plain blocks, by wgmma; parameters as in `attend.cuh`, and `sums` and
  // `stored` of tiles whose keys several thread blocks share, see `Tiling`.
  // A tile has QUERIES query vectors: all heads of one KV head, of several rows. A pass takes KEYS keys, which one
  // warpgroup copies to shared memory. SHARING of the other WARPGROUPS have the same 64 query vectors: each
  // scores its part of the keys, and adds up its part of a value's elements.
  constexpr int QUERIES = 64 * WARPGROUPS / SHARING, OWN_KEYS = KEYS / SHARING, OWN_DIM = V_DIM / SHARING;
  // In pieces of 16 bytes: 64 columns of all rows, and the keys and values of a pass.
  constexpr int Q_SLAB = QUERIES * 8, SLAB = KEYS * 8, K_STAGE = K_DIM / 64 * SLAB, V_STAGE = V_DIM / 64 * SLAB;
  extern __shared__ __align__(1024) uint4 memory[];
  uint4* const k_tiles = memory + K_DIM / 64 * Q_SLAB;
  uint4* const v_tiles = k_tiles + STAGES * K_STAGE;
  uint4* const weights = v_tiles + STAGES * V_STAGE;               // of a pass, if they are shared
  float* const shared_rows = (float*)(weights + (SHARING - 1) * 512);  // [SHARING, 64]
  // Of keys and of values: full when the copying threads say so, and free when the other warps do.
  unsigned long long* const full = (unsigned long long*)(shared_rows + (SHARING - 1) * 128);
  unsigned long long* const free = full + 2 * STAGES;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, r = lane >> 2;
  const int* const tile = tiles + blockIdx.x * 6;
  if (threadIdx.x < 2 * STAGES) {
    initialize(full + threadIdx.x, 128);
    initialize(free + threadIdx.x, 4 * WARPGROUPS);
  }
  __syncthreads();
  wait_for_others();
  const int row0 = tile[0], vectors = tile[1] * PART, low = tile[2], high = tile[3];
  if (vectors == 0) return;
  const int* const blocks = table + tile[4];
  const int kv_head = blockIdx.y / PARTS, head0 = kv_head * GROUP + blockIdx.y % PARTS * PART;
  const int begin = low / KEYS, passes = (high + KEYS - 1) / KEYS - begin;

  if (warp >= 4 * WARPGROUPS) {
    keep_registers<KEPT>();
    const int own = threadIdx.x - 128 * WARPGROUPS, piece = own % 8;
    for (int m = own / 8; m < QUERIES; m += 16) {
      const int from = min(m, vectors - 1);
      const uint4* at = (const uint4*)(q + ((size_t)(row0 + from / PART) * HEADS + head0 + from % PART) * K_DIM) + piece;
      #pragma unroll
      for (int slab = 0; slab < K_DIM / 64; slab++)
        copy_ahead(memory + slab * Q_SLAB + m * 8 + (piece ^ m & 7), at + slab * 8);
    }
    const auto copy_rows = [&](uint4* to, const T* matrix, int row_pieces, int pass_key) {
      #pragma unroll 4
      for (int i = 0; i < KEYS / 16; i++) {
        const int row = own / 8 + i * 16, key = max(min(pass_key + row, high - 1), low);
        const size_t block = blocks[key / BLOCK];
        const uint4* const at = (const uint4*)matrix + piece + ((block * KV_HEADS + kv_head) * BLOCK + key % BLOCK) * row_pieces;
        #pragma unroll
        for (int slab = 0; slab < (K_DIM > V_DIM ? K_DIM : V_DIM) / 64; slab++)
          if (slab * 8 < row_pieces) copy_ahead(to + slab * SLAB + row * 8 + (piece ^ row & 7), at + slab * 8);
      }
    };
#if BOX
    const auto copy_boxes = [&](uint4* to, bool of_values, int pass_key, unsigned long long* barrier) {
      const int columns = of_values ? V_DIM : K_DIM;
      const T* const matrix = of_values ? values : keys;
      const void* const map = of_values ? v_map : k_map;
      expect(barrier, KEYS * columns * 2);
      #pragma unroll 1
      for (int n = 0; n < KEYS; n += BOX) {
        const int key = pass_key + n, row = (blocks[key / BLOCK] * KV_HEADS + kv_head) * BLOCK + key % BLOCK;
        #pragma unroll 1
        for (int slab = 0; slab < columns / 64; slab++)
          copy_box<BOX>(to + slab * SLAB + n * 8, map, matrix, columns, slab * 64, row, barrier);
      }
    };
#endif
    // Items are the keys of a pass, then its values, and so on. The card copies those of whole passes in boxes.
    int stage = 0, odd = 1;
    #pragma unroll 1
    for (int item = 0; item < 2 * passes; item++) {
      const int of_values = item & 1, place = 2 * stage + of_values, pass_key = (begin + item / 2) * KEYS;
      if (item >= 2 * STAGES) await_barrier(free + place, odd);
      uint4* const to = of_values ? v_tiles + stage * V_STAGE : k_tiles + stage * K_STAGE;
      const bool in_boxes = BOX && pass_key >= low && pass_key + KEYS <= high;
      if (!in_boxes) copy_rows(to, of_values ? values : keys, (of_values ? V_DIM : K_DIM) / 8, pass_key);
#if BOX
      if (in_boxes && own == 0) copy_boxes(to, of_values, pass_key, full + place);
#endif
      arrive_with_copies(full + place);
      if (of_values && ++stage == STAGES) stage = 0, odd ^= 1;
    }
    end_turn();
    await_all();
    return;
  }

  take_registers<TAKEN>();
  const int group = warp >> 2, part = SHARING > 1 ? group : 0;
  const int m0 = (SHARING > 1 ? 0 : group * 64) + (warp & 3) * 16 + r;  // and the one 8 below
  const float scale = numbers[0];
  int first[2], last[2];
  float most[2] = {-1e30f, -1e30f}, total[2] = {0.f, 0.f}, out[OWN_DIM / 2];
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const int m = m0 + h * 8, row = row0 + m / PART;
    first[h] = m < vectors ? visible[2 * row] : 0;
    last[h] = m < vectors ? visible[2 * row + 1] : -1;
  }
  #pragma unroll
  for (int i = 0; i < OWN_DIM / 2; i++) out[i] = 0.f;
  const Tile q_own = tile_at(memory + (SHARING > 1 ? 0 : group * 512));
  const Tile k_own = tile_at(k_tiles + part * OWN_KEYS * 8), v_own = columns_at(v_tiles + part * OWN_DIM / 64 * SLAB, SLAB);
#if CAPPED
  constexpr float factor = 1.f;
#else
  const float factor = scale;
#endif
  float s[OWN_KEYS / 2], kept[2];
  unsigned pairs[OWN_KEYS / 4];
  const auto start_scores = [&](int pass) {
    const int stage = pass % STAGES;
    await_barrier(full + 2 * stage, pass / STAGES & 1);
    shared_memory_is_written();
    start_products();
    #pragma unroll
    for (int k = 0; k < K_DIM / 16; k++)
      wgmma_shared(s, moved(q_own, k / 4 * Q_SLAB), moved(k_own, stage * K_STAGE + k / 4 * SLAB), k % 4, k > 0);
    end_products();
  };
  // The scores, which have been awaited, become weights, relative to the greatest score so far.
  const auto weigh = [&](int pass) {
    #pragma unroll
    for (int i = 0; i < OWN_KEYS / 2; i++) computed(s[i]);
    if (lane == 0) arrive(free + 2 * (pass % STAGES));
#if CAPPED
    #pragma unroll
    for (int i = 0; i < OWN_KEYS / 2; i++) s[i] = numbers[1] * tanhf(s[i] * scale / numbers[1]);
#endif
    const int pass_key = (begin + pass) * KEYS, key0 = pass_key + part * OWN_KEYS + quad * 2;
    const bool all = pass_key >= max(first[0], first[1]) && pass_key + KEYS - 1 <= min(last[0], last[1]);
    if (__any_sync(0xffffffffu, !all)) {
      #pragma unroll
      for (int i = 0; i < OWN_KEYS / 2; i++) {
        const int key = key0 + i / 4 * 8 + i % 2, h = i / 2 % 2;
        if (key < first[h] || key > last[h]) s[i] = -1e30f;
      }
    }
    float now[2] = {most[0], most[1]}, base[2];
    #pragma unroll
    for (int i = 0; i < OWN_KEYS / 2; i++) now[i / 2 % 2] = fmaxf(now[i / 2 % 2], s[i]);
    #pragma unroll
    for (int h = 0; h < 2; h++) now[h] = row_max(now[h]);
#if SHARING > 1
    if (quad == 0) shared_rows[part * 64 + m0] = now[0], shared_rows[part * 64 + m0 + 8] = now[1];
    meet(1, 128 * SHARING);
    #pragma unroll
    for (int h = 0; h < 2; h++) now[h] = fmaxf(now[h], shared_rows[(1 - part) * 64 + m0 + h * 8]);
#endif
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      base[h] = now[h] > -1e29f ? now[h] * factor : 0.f;  // a row that sees nothing yet has no weights
      kept[h] = power(fmaf(most[h], factor, -base[h]));
      most[h] = now[h];
      total[h] *= kept[h];
    }
    #pragma unroll
    for (int i = 0; i < OWN_KEYS / 2; i++) {
      s[i] = power(fmaf(s[i], factor, -base[i / 2 % 2]));
      total[i / 2 % 2] += s[i];
    }
  };
  const auto store_weights = [&] {
    #pragma unroll
    for (int i = 0; i < OWN_KEYS / 4; i++) pairs[i] = pack(s[2 * i], s[2 * i + 1]);
#if SHARING > 1
    #pragma unroll
    for (int i = 0; i < OWN_KEYS / 4; i++) {
      const int m = m0 + i % 2 * 8, at = part * OWN_KEYS / 8 + i / 2;
      ((unsigned*)(weights + m * 8 + (at ^ m & 7)))[quad] = pairs[i];
    }
    shared_memory_is_written();
    meet(1, 128 * SHARING);
#endif
  };
  const auto start_sums = [&](int pass) {
    const int stage = pass % STAGES;
    await_barrier(full + 2 * stage + 1, pass / STAGES & 1);
    shared_memory_is_written();
    const Tile v_now = moved(v_own, stage * V_STAGE);
    start_products();
    #pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#if SHARING > 1
      wgmma_shared_turned(out, tile_at(weights), v_now, k);
#else
      wgmma_turned(out, pairs[4 * k], pairs[4 * k + 1], pairs[4 * k + 2], pairs[4 * k + 3], v_now, k);
#endif
    end_products();
  };
  const auto end_sums = [&](int pass) {
    #pragma unroll
    for (int i = 0; i < OWN_DIM / 2; i++) computed(out[i]);
    if (lane == 0) arrive(free + 2 * (pass % STAGES) + 1);
  };
  start_scores(0);
  await_products<0>();
  weigh(0);
  store_weights();
  #pragma unroll 1
  for (int pass = 0; pass + 1 < passes; pass++) {
#if STAGES > 1
    // While the sums of a pass run, the scores of the next one become weights.
    start_scores(pass + 1);
    start_sums(pass);
    await_products<1>();
    weigh(pass + 1);
    await_products<0>();
    end_sums(pass);
#else
    start_sums(pass);
    await_products<0>();
    end_sums(pass);
    start_scores(pass + 1);
    await_products<0>();
    weigh(pass + 1);
#endif
    #pragma unroll
    for (int i = 0; i < OWN_DIM / 2; i++) out[i] *= kept[i / 2 % 2];
    store_weights();
  }
  start_sums(passes - 1);
  await_products<0>();
  end_sums(passes - 1);

  #pragma unroll
  for (int h = 0; h < 2; h++) total[h] = row_sum(total[h]);
#if SHARING > 1
  if (quad == 0) shared_rows[part * 64 + m0] = total[0], shared_rows[part * 64 + m0 + 8] = total[1];
  meet(1, 128 * SHARING);
  #pragma unroll
  for (int h = 0; h < 2; h++) total[h] += shared_rows[(1 - part) * 64 + m0 + h * 8];
#endif
  float top[2] = {most[0] * factor, most[1] * factor};
  const int pieces = tile[5] & 255;
  if (pieces > 1) {
    // The last thread block of a tile adds up what all of them found, in order; a thread its own elements.
    constexpr int THREADS = 128 * WARPGROUPS, PIECE = (OWN_DIM / 8 + 1) * THREADS;
    const size_t place = (size_t)(tile[5] >> 16) * gridDim.y + blockIdx.y, next = (size_t)gridDim.y * PIECE;
    float4* const found = (float4*)sums + place * PIECE + threadIdx.x;
    float4* const own = found + (tile[5] >> 8 & 255) * next;
    #pragma unroll
    for (int i = 0; i < OWN_DIM / 8; i++)
      own[i * THREADS] = make_float4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
    own[OWN_DIM / 8 * THREADS] = make_float4(top[0], total[0], top[1], total[1]);
    __threadfence();
    meet(1, THREADS);
    int* const is_last = (int*)memory;
    if (threadIdx.x == 0) {
      *is_last = atomicAdd(stored + place, 1) == pieces - 1;
      if (*is_last) stored[place] = 0;
    }
    meet(1, THREADS);
    if (!*is_last) return;
    __threadfence();
    #pragma unroll
    for (int h = 0; h < 2; h++) top[h] = -1e30f, total[h] = 0.f;
    for (int p = 0; p < pieces; p++) {
      const float4 of = stored_by_another(found + p * next + OWN_DIM / 8 * THREADS);
      if (of.y > 0.f) top[0] = fmaxf(top[0], of.x);
      if (of.w > 0.f) top[1] = fmaxf(top[1], of.z);
    }
    #pragma unroll
    for (int i = 0; i < OWN_DIM / 2; i++) out[i] = 0.f;
    #pragma unroll 1
    for (int p = 0; p < pieces; p++) {
      const float4 of = stored_by_another(found + p * next + OWN_DIM / 8 * THREADS);
      const float a = of.y > 0.f ? power(of.x - top[0]) : 0.f, b = of.w > 0.f ? power(of.z - top[1]) : 0.f;
      total[0] += of.y * a, total[1] += of.w * b;
      #pragma unroll
      for (int i = 0; i < OWN_DIM / 8; i++) {
        const float4 sum = stored_by_another(found + p * next + i * THREADS);
        out[4 * i] += sum.x * a, out[4 * i + 1] += sum.y * a, out[4 * i + 2] += sum.z * b, out[4 * i + 3] += sum.w * b;
      }
    }
  }
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const int m = m0 + h * 8;
    if (m >= vectors) continue;
    float times = 1.f, sum = total[h];
#if SINKS
    const float sink = (float)sinks[head0 + m % PART] * 1.4426950408889634f, now = fmaxf(top[h], sink);
    times = power(top[h] - now);
    sum = sum * times + power(sink - now);
#endif
    times /= sum;
    T* const to = result + ((size_t)(row0 + m / PART) * HEADS + head0 + m % PART) * V_DIM + part * OWN_DIM + quad * 2;
    #pragma unroll
    for (int i = 0; i < OWN_DIM / 8; i++)
      *(unsigned*)(to + i * 8) = pack(out[4 * i + 2 * h] * times, out[4 * i + 2 * h + 1] * times);
  }
