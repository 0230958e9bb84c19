  // TILE_X is the number of the 16 * PARTS rows of W. READY waits for the kernel before.
#ifndef TILE_X
#define TILE_X blockIdx.x
#endif
#ifndef READY
#define READY
#endif
#ifndef OTHERS
#define OTHERS 0
#endif
#ifndef SENDS
#define SENDS 0
#endif
#ifndef ONE_ROW
#define ONE_ROW 0
#endif
#ifndef DIGITS
#define DIGITS 0
#endif
#ifndef STORES_DIGITS
#define STORES_DIGITS 0
#endif
#ifndef UNSCALED
#define UNSCALED 0
#endif
#ifndef ENDS
#define ENDS 0
#endif
#ifndef HEAD_ROWS
#define HEAD_ROWS 0
#endif
#ifndef TILE_COUNTS
#define TILE_COUNTS 0
#endif
  // y = x W^T, 8 * TILES rows a thread block, bfloat16; W as codes of 4 or 8 bits, or as it is (BITS 16).
  // A thread block makes 16 * PARTS rows of W (with GATED: of both matrices) for all rows of x. Its
  // warps share the columns, CHUNK groups of 64 at a time, and add up at the end. A warp copies
  // STAGES chunks ahead into a ring of its own: codes, and the ROWS rows of x. The first codes come
  // while the kernel before still runs. Integers of 4 bits are the left operand as 128 + n; what that adds
  // is taken off by the sum of x, a product with ones. Other codes are unpacked before they are multiplied.
  // Of 64 columns, a lane of a quad reads 16 neighbours; where integers of 4 bits are in groups of 32, it reads 8
  // of each group, so that a product is of one group.
  // With EXPERTS, a tile is up to 8 * TILES pairs of row and expert: expert, first place, count. The kernel of
  // first products waits for the tiles. That of the last ones starts only when those have waited.
  // TILE_COUNTS: first products count their thread blocks of each tile behind the tiles, and a tile's last products wait
  // for so many. Those of the last tile wait for the whole kernel, so that it is done when they are.
  // WHOLE: chunks have no rest. OTHERS: a gate multiplies other rows, each so many elements behind the one before.
  // With ONE_ROW all of x lies behind the scales, in the pairs in which codes of 4 bits are unpacked.
  // With DIGITS, a tile is of one row, and x are records, see `digits.cuh`. A lane of a quad has the codes of 16 columns, which
  // have a unit of their own. So two columns of a product, the digits of a row, are those of each lane's own columns
  // of W, and nothing of the other lanes'.
  // With STORES_DIGITS, y is also written as digits.
  // UNSCALED: a norm has not scaled the only row of x. Its products are, by the sums of `squares` of 16 columns each.
  // ENDS: lines of C compute what follows each element of the only row, instead of storing y. With HEAD_ROWS, so many
  // rows of W are a head, and a thread block's two parts are from both halves of one.
  // SENDS: y is also sent to the other ranks, whose sum another kernel computes.
  constexpr int SETS = GATED ? 2 : 1, MATRICES = SETS * PARTS;
  // In pieces of 16 bytes: a row's codes and a row of x in a chunk, a chunk's codes, a chunk.
  constexpr int CODES = CHUNK * BITS / 2, X = CHUNK * 8, ALL_CODES = MATRICES * 16 * CODES;
  static_assert(CODES <= 32 && X <= 32, "a copy of a warp is of whole rows");
#if DIGITS
  static_assert(ROWS == 1, "digits are of one row");
  constexpr int X_PIECES = CHUNK * DIGIT_PIECES, SPAN = CHUNK;
#else
  constexpr int X_PIECES = ONE_ROW ? 0 : ROWS * X, SPAN = CHUNK < 2 ? 1 : 2;
#endif
  constexpr int STAGE = ALL_CODES + X_PIECES, SCALES = SPAN * 64 < GROUP ? 1 : SPAN * 64 / GROUP;
  constexpr bool BY_GROUP = BITS == 4 && !FLOATS && GROUP == 32;
  constexpr int SUMS = BY_GROUP ? 2 : 1, TURN = BY_GROUP ? 4 : 1;
  extern __shared__ uint4 memory[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, r = lane >> 2;
#if EXPERTS
#if FIRST
  READY;
#endif
  const int first = tiles[blockIdx.y * 3 + 1], count = tiles[blockIdx.y * 3 + 2];
  if (count == 0) {
#if !FIRST
    READY;
#endif
    return;
  }
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
  const int K = words * 32 / BITS, groups = K / GROUP, chunks = (K / 64 + CHUNK - 1) / CHUNK;
#if GATED
  const unsigned* const w_of[2] = {w, w_up};
#else
  const unsigned* const w_of[1] = {w};
#endif
#if HEAD_ROWS
  constexpr int HALF = HEAD_ROWS / 2;
  static_assert(PARTS == 2 && HALF % 16 == 0, "two parts have as many rows of both halves");
  const int n0 = TILE_X / (HALF / 16) * HEAD_ROWS + TILE_X % (HALF / 16) * 16;
  const auto row_of = [&](int own) { return n0 + own * HALF; };
#else
  // The last block may have more parts than there are rows of W: they make its last rows again.
  const int n0 = TILE_X * PARTS * 16;
  const bool all_parts = N % (16 * PARTS) == 0;
  const auto row_of = [&](int own) { return all_parts ? n0 + own * 16 : min(n0 + own * 16, N - 16); };
#endif
  // Where a piece of a row is in its chunk, so that lanes read from all banks: the 32 bytes of a group
  // of 4-bit codes, of which four rows are read at a time; else 16 bytes of two rows.
  const auto turned = [](int piece, int row) {
    if (BITS == 16) return piece ^ row % 2;
    if (BITS == 8) return CHUNK > 1 ? piece ^ row % 2 * 4 : piece;
    const int half = BY_GROUP ? piece % 2 ^ row / 4 % 2 : piece % 2;  // eight rows are read at a time
    return (piece / 2 ^ (CHUNK < 4 ? row * CHUNK / 4 % CHUNK : row % 4)) * 2 + half;
  };
  const Place ring = place_of(memory + warp * STAGES * STAGE);
  // What each turn needs is computed once, and kept in registers: where a lane's first two copies of codes go in the first
  // stage, each second one being 64 pieces behind, and where they come from. `turn` counts from there.
  Place codes_to[2];
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = (i * 32 + lane) / CODES;
    codes_to[i] = ring + (row * CODES + turned(lane % CODES, row)) * 16;
    keep(codes_to[i]);
  }
  const unsigned* codes_from[SETS];
  #pragma unroll
  for (int s = 0; s < SETS; s++) {
    codes_from[s] = w_of[s] + (expert * N + n0 + lane / CODES) * words + (warp * CODES + lane % CODES) * 4;
    keep(codes_from[s]);
  }
  const auto copy_codes = [&](int chunk, int stage, int turn) {
    if (chunk >= chunks) return;
    #pragma unroll
    for (int m = 0; m < MATRICES; m++)
      #pragma unroll
      for (int i = 0; i < CODES / 2; i++)
        if (WHOLE || chunk * CHUNK + lane % CODES / (BITS / 2) < K / 64) {
          const int behind = (row_of(m / SETS) - n0 + i * (32 / CODES)) * words + turn * WARPS * CODES * 4;
          copy_of_line(codes_to[i % 2] + stage + (m * 16 * CODES + i / 2 * 64) * 16, codes_from[m % SETS] + behind);
        }
  };
#if BITS < 16
#if FLOATS && GATED
  const Scale* const scales_of[2] = {scales, scales_up};
#elif FLOATS
  const Scale* const scales_of[1] = {scales};
#elif GATED
  const Scale* const scales_of[4] = {scales, biases, scales_up, biases_up};
#else
  const Scale* const scales_of[2] = {scales, biases};
#endif
  // Scales and biases of all columns; rows padded, where they would begin in one bank.
  constexpr int ARRAYS = FLOATS ? 1 : 2, PIECE = 16 / sizeof(Scale);
  const int pad = groups % PIECE ? 0 : 1, scale_row = groups + pad * PIECE, pieces = groups * 16 / PIECE;
  const int each = pad ? groups / PIECE : pieces;
  Scale* const scale_tile = (Scale*)(memory + WARPS * STAGES * STAGE);
  // The row of scales, or of biases, of a matrix.
  const auto first_scales = [&](int m, int array) { return ((m % SETS * ARRAYS + array) * PARTS + m / SETS) * 16; };
  #pragma unroll
  for (int m = 0; m < ARRAYS * SETS; m++) {
    const Scale* const from = scales_of[m] + (expert * N + n0) * groups;
    #pragma unroll
    for (int i = 0; i < (PARTS * pieces + WARPS * 32 - 1) / (WARPS * 32); i++) {
      const int piece = i * WARPS * 32 + threadIdx.x, part = piece / pieces;
      uint4* const to = (uint4*)(scale_tile + m * PARTS * 16 * scale_row) + piece + piece / each * pad;
      if (piece < PARTS * pieces)
        copy_of_line(place_of(to), from + piece * PIECE + (row_of(part) - n0 - part * 16) * groups);
    }
  }
#endif
  #pragma unroll
  for (int s = 0; s < STAGES; s++) {
    copy_codes(warp + s * WARPS, s * STAGE * 16, s);
    end_turn();
  }
#if SENDS
  const char* const own_inbox = (const char*)inboxes[RANK];
#endif
#if ENDS
  constexpr int ENDING_LANES = (PARTS + 1) / 2 * 32;
  const bool ends = threadIdx.x < PARTS * 16;
  const int n = row_of(threadIdx.x / 16 % PARTS) + threadIdx.x % 16;
  ENDING_BEFORE
#endif
#if TILE_COUNTS && !FIRST
  if (blockIdx.y + 1 < gridDim.y) await_blocks(tiles + 3 * tiles_shape[0] + blockIdx.y, TILE_COUNTS);
  else READY;
#elif !(EXPERTS && FIRST)
  READY;
#endif
#if SENDS
  const unsigned round = round_of(own_inbox);
#endif
#if ENDS
  ENDING_LOADS
#endif
#if UNSCALED
  float square = 0.f;
  for (int i = threadIdx.x; i < K / 16; i += WARPS * 32) square += squares[i];
#endif
#if ONE_ROW
#if EXPERTS && FIRST
  const uint4* const row_of_x = (const uint4*)(x + (size_t)(order[first] / TOP) * X_ROW);
#else
  const uint4* const row_of_x = (const uint4*)(x + (size_t)first * X_ROW);
#endif
  uint4* const all_x = (uint4*)(scale_tile + ARRAYS * MATRICES * 16 * scale_row);
  for (int i = threadIdx.x; i < K / 8; i += WARPS * 32) all_x[i] = apart(row_of_x[i]);
#elif DIGITS
#if EXPERTS && FIRST
  const uint4* const records = digits_of_row((const uint4*)x, order[first] / TOP, K);
#else
  const uint4* const records = digits_of_row((const uint4*)x, first, K);
#endif
  const auto copy_x = [&](int chunk, int stage, int) {
    if (chunk >= chunks) return;
    #pragma unroll
    for (int i = 0; i < X_PIECES; i += 32)
      if (i + lane < X_PIECES && (WHOLE || chunk * X_PIECES + i + lane < K / 64 * DIGIT_PIECES))
        copy_of_line(ring + stage + (ALL_CODES + i + lane) * 16, records + chunk * X_PIECES + i + lane);
  };
#else
  // Rows that nobody asks for are not copied: what is in their place makes columns that nobody reads.
  Place x_to[2];
  int there = min(ROWS, count) - lane / X;  // rows that are copied from the lane's first one on
  keep(there);
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = (i * 32 + lane) / X;
    x_to[i] = ring + (ALL_CODES + row * X + (lane % X ^ row % 2 * TURN)) * 16;
    keep(x_to[i]);
  }
  constexpr int X_COPIES = (ROWS * X + 31) / 32;
  const T* x_from[X_COPIES];
  int x_behind = 0;  // elements of the turns before
  #pragma unroll
  for (int i = 0; i < X_COPIES; i++) {
    const int place = first + min((i * 32 + lane) / X, count - 1);
#if EXPERTS && FIRST
    const T* const row = x + (size_t)(order[place] / TOP) * X_ROW;
#else
    const T* const row = x + (size_t)place * X_ROW;
#endif
    x_from[i] = row + lane % X * 8 + warp * CHUNK * 64;
    keep(x_from[i]);
  }
  const auto copy_x = [&](int chunk, int stage, int turn) {
    if (chunk >= chunks) return;
    #pragma unroll
    for (int i = 0; i < X_COPIES; i++)
      if (i * 32 / X < there && (WHOLE || chunk * CHUNK + lane % X / 8 < K / 64))
        copy_of_line(x_to[i % 2] + stage + i / 2 * 1024, x_from[i] + (unsigned)x_behind + turn * WARPS * CHUNK * 64);
  };
#endif
#if !ONE_ROW
  #pragma unroll
  for (int s = 0; s < STAGES; s++) {
    copy_x(warp + s * WARPS, s * STAGE * 16, s);
    end_turn();
  }
#endif
  float acc[MATRICES][TILES][4];
  #pragma unroll
  for (int m = 0; m < MATRICES; m++)
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      #pragma unroll
      for (int i = 0; i < 4; i++) acc[m][t][i] = 0.f;
#if DIGITS
  constexpr unsigned EVEN = 0x0F0F0F0Fu;
#endif
#if BITS == 4 && !FLOATS && !DIGITS
  const unsigned ones = 0x3f803f80u;
#endif
  await_turns<STAGES - 1>();
  __syncthreads();
  // Where a lane reads its codes of the first groups of columns in the first stage, both halves of them where they are
  // apart, and its columns of x.
  const auto code_bytes = [&](int group, int half) {
    if (BITS == 4) return BY_GROUP ? turned(group * 2 + half, r) * 16 + quad * 4 : turned(group * 2, r) * 16 + quad * 8;
    return turned(BITS == 8 ? group * 4 + quad : group * 8 + quad * 2 + half, r) * 16;
  };
  const Place first_row = ring + r * CODES * 16;
  Place first_codes[SPAN][2];
  #pragma unroll
  for (int j = 0; j < SPAN; j++)
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      first_codes[j][half] = first_row + code_bytes(j, half);
      keep(first_codes[j][half]);
    }
#if !ONE_ROW && !DIGITS
  constexpr int APART = ROWS % 8 && TILES > 1 ? TILES : 1;
  Place first_x[APART][2];
  #pragma unroll
  for (int t = 0; t < APART; t++)
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = (t * 8 + r) % ROWS, piece = BY_GROUP ? h * 4 + quad : quad * 2 + h;
      first_x[t][h] = ring + (ALL_CODES + row * X + (piece ^ row % 2 * TURN)) * 16;
      keep(first_x[t][h]);
    }
#endif
  int stage = 0;  // bytes of the ring before it
  #pragma unroll 1
  for (int chunk = warp; chunk < chunks; chunk += WARPS) {
    await_turns<STAGES - 1>();
    __syncwarp();
    Place codes_now[SPAN][2];
    #pragma unroll
    for (int n = 0; n < 2 * SPAN; n++) {
      codes_now[n / 2][n % 2] = first_codes[n / 2][n % 2] + stage;
      keep(codes_now[n / 2][n % 2]);
    }
#if !ONE_ROW && !DIGITS
    Place x_now[APART][2];
    #pragma unroll
    for (int n = 0; n < 2 * APART; n++) {
      x_now[n / 2][n % 2] = first_x[n / 2][n % 2] + stage;
      keep(x_now[n / 2][n % 2]);
    }
#endif
    #pragma unroll 1
    for (int span = 0; span < CHUNK; span += SPAN) {
#if BITS < 16 && !FLOATS
      struct __align__(WHOLE ? 2 * SCALES : 2) Scales {
        T of[SCALES];
        __device__ __forceinline__ float number(int n) const {
          if (!WHOLE || SCALES < 2) return (float)of[n];
          const unsigned pair = ((const unsigned*)of)[n / 2];
          return __uint_as_float(n % 2 ? pair & 0xFFFF0000u : pair << 16);
        }
      };
      Scales scale[MATRICES][2][2];  // and biases; by half of the 16 rows
      #pragma unroll
      for (int m = 0; m < 2 * MATRICES; m++)
        #pragma unroll
        for (int h = 0; h < 2; h++) {
          const int at = (chunk * CHUNK + span) * 64 / GROUP;
          const T* const from = scale_tile + (first_scales(m / 2, m % 2) + r + h * 8) * scale_row + at;
          Scales& to = scale[m / 2][m % 2][h];
          if (WHOLE) to = *(const Scales*)from;
          else
            for (int n = 0; n < SCALES; n++) to.of[n] = from[min(n, groups - 1 - at)];
        }
#endif
      #pragma unroll
      for (int j = 0; j < SPAN; j++) {
        const int group = span + j;
        // The codes of a matrix, of a half of its rows and of a half of the lane's columns.
        const auto codes_at = [&](int m, int h, int half) {
          const Place at = CHUNK > SPAN ? first_row + code_bytes(group, half) + stage : codes_now[j][half];
          return at + (m * 16 + h * 8) * CODES * 16;
        };
#if !ONE_ROW && !DIGITS
        const auto x_at = [&](int t, int h) {
          return x_now[t % APART][h] + ((APART > 1 ? 0 : t * 8 % ROWS * X) + group * 8) * 16;
        };
#endif
        if (!WHOLE && chunk * CHUNK + group >= K / 64) break;
#if DIGITS
        const Place record = ring + stage + (ALL_CODES + group * DIGIT_PIECES) * 16;
        // Digits of the lane's columns, if the lane's column of a product is of them; their unit and sum.
        const uint4 some = r / 2 == quad ? shared_at<uint4>(record + (r % 2 * 4 + quad) * 16) : make_uint4(0, 0, 0, 0);
        const float2 own = shared_at<float2>(record + 128 + quad * 8);
        #pragma unroll
        for (int m = 0; m < MATRICES; m++) {
          const uint2 up = shared_at<uint2>(codes_at(m, 0, 0)), low = shared_at<uint2>(codes_at(m, 1, 0));
          int c[4] = {};
          byte_product(c, up.x & EVEN, low.x & EVEN, up.x >> 4 & EVEN, low.x >> 4 & EVEN, some.x, some.y);
          byte_product(c, up.y & EVEN, low.y & EVEN, up.y >> 4 & EVEN, low.y >> 4 & EVEN, some.z, some.w);
          #pragma unroll
          for (int h = 0; h < 2; h++) {
            const float s = scale[m][0][h].number(j * 64 / GROUP), o = scale[m][1][h].number(j * 64 / GROUP);
            const int n = c[h * 2] + c[h * 2 + 1] * 256;
            const float sum = fmaf(__int_as_float(n + INTEGER_BITS), own.x, -INTEGER_BASE * own.x);
            acc[m][0][h * 2] = fmaf(o, own.y, fmaf(s, sum, acc[m][0][h * 2]));
          }
        }
#elif BITS == 4 && !FLOATS
        unsigned a[MATRICES][2][8];
        float s[SUMS][MATRICES][2], o[SUMS][MATRICES][2];
        #pragma unroll
        for (int m = 0; m < MATRICES; m++)
          #pragma unroll
          for (int h = 0; h < 2; h++) {
#if GROUP == 32
            const auto word = [&](int half) { return shared_at<unsigned>(codes_at(m, h, half)); };
            const uint2 u = make_uint2(word(0), word(1));
#else
            const uint2 u = shared_at<uint2>(codes_at(m, h, 0));
#endif
            #pragma unroll
            for (int n = 0; n < 4; n++) {
              a[m][h][n] = raised(u.x, 4 * n);
              a[m][h][4 + n] = raised(u.y, 4 * n);
            }
            #pragma unroll
            for (int g = 0; g < SUMS; g++) {
              s[g][m][h] = scale[m][0][h].number(j * 64 / GROUP + g);
              o[g][m][h] = scale[m][1][h].number(j * 64 / GROUP + g) - 128.f * s[g][m][h];
            }
          }
        #pragma unroll
        for (int t = 0; t < TILES; t++) {
          #pragma unroll
          for (int g = 0; g < SUMS; g++) {
            float d[4] = {}, c[MATRICES][4] = {};
            #pragma unroll
            for (int h = g; h < 2 * (g + 1) / SUMS; h++) {
#if ONE_ROW
              const uint4 some = all_x[chunk * X + group * 8 + (BY_GROUP ? h * 4 + quad : quad * 2 + h)];
#else
              const uint4 some = apart(shared_at<uint4>(x_at(t, h)));
#endif
              product(d, ones, ones, ones, ones, some.x, some.y);
              product(d, ones, ones, ones, ones, some.z, some.w);
              #pragma unroll
              for (int m = 0; m < MATRICES; m++) {
                const unsigned *const up = a[m][0] + 4 * h, *const low = a[m][1] + 4 * h;
                product(c[m], up[0], low[0], up[1], low[1], some.x, some.y);
                product(c[m], up[2], low[2], up[3], low[3], some.z, some.w);
              }
            }
            #pragma unroll
            for (int m = 0; m < MATRICES; m++)
              #pragma unroll
              for (int i = 0; i < 4; i += ONE_ROW ? 2 : 1)  // columns are rows of x, here all the same
                acc[m][t][i] = fmaf(o[g][m][i / 2], d[i], fmaf(s[g][m][i / 2], c[m][i], acc[m][t][i]));
          }
        }
#else
#if WIDE_SCALES == 1
        float s[MATRICES][2];  // of all 64 columns, which sums are multiplied by
#endif
        uint4 a[MATRICES][2][2];  // eight numbers each, those of 4 bits in pairs; by half of the 16 rows, then of 16
        #pragma unroll
        for (int m = 0; m < MATRICES; m++)
          #pragma unroll
          for (int h = 0; h < 2; h++) {
#if FLOATS
            const int at = ((chunk * CHUNK + group) * 64 + quad * 16) / GROUP;
            const Scale found = scale_tile[(first_scales(m, 0) + r + h * 8) * scale_row + at];
#endif
#if WIDE_SCALES == 1
            s[m][h] = found;
#elif FLOATS
            const FloatScale s = float_scale(found);
#endif
#if BITS == 4
            const uint2 u = shared_at<uint2>(codes_at(m, h, 0));
            a[m][h][0] = float_pairs(u.x, s);
            a[m][h][1] = float_pairs(u.y, s);
#elif WIDE_SCALES == 1
            const uint4 u = shared_at<uint4>(codes_at(m, h, 0));
            a[m][h][0] = e4m3_numbers(make_uint2(u.x, u.y));
            a[m][h][1] = e4m3_numbers(make_uint2(u.z, u.w));
#elif BITS == 8 && FLOATS
            const uint4 u = shared_at<uint4>(codes_at(m, h, 0));
            a[m][h][0] = float_numbers(make_uint2(u.x, u.y), s);
            a[m][h][1] = float_numbers(make_uint2(u.z, u.w), s);
#elif BITS == 8
            const uint4 u = shared_at<uint4>(codes_at(m, h, 0));
            const auto own_group = [&](const Scales& from) {
#if GROUP == 32
              return __bfloat162bfloat162(quad < 2 ? from.of[j * 2] : from.of[j * 2 + 1]);
#else
              return __bfloat162bfloat162(from.of[j * 64 / GROUP]);
#endif
            };
            const __nv_bfloat162 s = own_group(scale[m][0][h]), o = own_group(scale[m][1][h]);
            a[m][h][0] = byte_numbers(make_uint2(u.x, u.y), s, o);
            a[m][h][1] = byte_numbers(make_uint2(u.z, u.w), s, o);
#else
            a[m][h][0] = shared_at<uint4>(codes_at(m, h, 0));
            a[m][h][1] = shared_at<uint4>(codes_at(m, h, 1));
#endif
          }
        #pragma unroll
        for (int t = 0; t < TILES; t++) {
#if WIDE_SCALES == 1
          float sums[MATRICES][4] = {};
          const auto sums_of = [&](int m) { return sums[m]; };
#else
          const auto sums_of = [&](int m) { return acc[m][t]; };
#endif
          #pragma unroll
          for (int h = 0; h < 2; h++) {
#if ONE_ROW
            const uint4 some = all_x[chunk * X + group * 8 + quad * 2 + h];
#else
            const uint4 whole = shared_at<uint4>(x_at(t, h));
            const uint4 some = BITS == 4 ? apart(whole) : whole;
#endif
            #pragma unroll
            for (int m = 0; m < MATRICES; m++) {
              const uint4 up = a[m][0][h], low = a[m][1][h];
              product(sums_of(m), up.x, low.x, up.y, low.y, some.x, some.y);
              product(sums_of(m), up.z, low.z, up.w, low.w, some.z, some.w);
            }
          }
#if WIDE_SCALES == 1
          #pragma unroll
          for (int m = 0; m < MATRICES; m++)
            #pragma unroll
            for (int i = 0; i < 4; i++) acc[m][t][i] = fmaf(s[m][i / 2], sums[m][i], acc[m][t][i]);
#endif
        }
#endif
      }
    }
    __syncwarp();
    copy_codes(chunk + STAGES * WARPS, stage, STAGES);
#if !ONE_ROW
    copy_x(chunk + STAGES * WARPS, stage, STAGES);
#endif
    end_turn();
    #pragma unroll
    for (int s = 0; s < SETS; s++) codes_from[s] += WARPS * CODES * 4;
#if !ONE_ROW && !DIGITS
    x_behind += WARPS * CHUNK * 64;
#endif
    stage = stage < (STAGES - 1) * STAGE * 16 ? stage + STAGE * 16 : 0;
  }
#if DIGITS
  #pragma unroll
  for (int m = 0; m < MATRICES; m++)
    #pragma unroll
    for (int i = 0; i < 4; i += 2) {
      acc[m][0][i] += __shfl_xor_sync(0xffffffffu, acc[m][0][i], 1);
      acc[m][0][i] += __shfl_xor_sync(0xffffffffu, acc[m][0][i], 2);
    }
#endif
#if SENDS
  char* inbox[RANKS];
  #pragma unroll
  for (int rank = 0; rank < RANKS; rank++) inbox[rank] = (char*)inboxes[rank];
#endif
  await_copies();
  __syncthreads();
  float* const found = (float*)memory;  // [WARPS, MATRICES, column, row of W]
#if UNSCALED
  float* const found_squares = found + WARPS * MATRICES * TILES * 128;
  #pragma unroll
  for (int by = 16; by > 0; by /= 2) square += __shfl_xor_sync(0xffffffffu, square, by);
  if (lane == 0) found_squares[warp] = square;
#endif
  #pragma unroll
  for (int m = 0; m < MATRICES; m++)
    #pragma unroll
    for (int t = 0; t < TILES; t++) {
      float* const to = found + ((warp * MATRICES + m) * TILES + t) * 128 + quad * 32 + r;
      to[0] = acc[m][t][0];
      to[16] = acc[m][t][1];
      to[8] = acc[m][t][2];
      to[24] = acc[m][t][3];
    }
  __syncthreads();
#if UNSCALED
  float all_squares = 0.f;
  #pragma unroll
  for (int from = 0; from < WARPS; from++) all_squares += found_squares[from];
  const float factor = rsqrtf(all_squares / K + EPS) * SUM_FACTOR;
#else
  constexpr float factor = SUM_FACTOR;
#endif
#if ENDS
  if (threadIdx.x >= ENDING_LANES) return;
  float sum = 0.f;
  #pragma unroll
  for (int from = 0; from < WARPS; from++)
    sum += found[(from * MATRICES + threadIdx.x / 16 % PARTS) * 128 + threadIdx.x % 16];
  float product = as_bfloat16(sum * factor);
#if OFFSETS
  if (offsets) product = as_bfloat16(product + (float)offsets[n]);
#endif
  ENDING_ELEMENTS
#else
#if OFFSETS && GATED
  const T* const offsets_of[2] = {offsets, offsets_up};
#elif OFFSETS
  const T* const offsets_of[1] = {offsets};
#endif
  constexpr int EACH = EXPERTS && !STORES_DIGITS ? 4 : 1;  // neighbours that a thread stores at once
  struct __align__(4 * EACH) Sums { float of[EACH]; };
  struct __align__(2 * EACH) Elements { T of[EACH]; };
  for (int i = threadIdx.x * EACH; i < PARTS * TILES * 128; i += WARPS * 32 * EACH) {
    const int own = i / 16 % PARTS, column = i / 16 / PARTS, row = i % 16;
#if !SENDS && !STORES_DIGITS
    if (column >= count) continue;
#endif
    Sums sums[SETS] = {};
    #pragma unroll
    for (int s = 0; s < SETS; s++)
      #pragma unroll
      for (int from = 0; from < WARPS; from++) {
        const Sums some = *(const Sums*)(found + (from * MATRICES + own * SETS + s) * TILES * 128 + column * 16 + row);
        #pragma unroll
        for (int e = 0; e < EACH; e++) sums[s].of[e] += some.of[e];
      }
    const int n = row_of(own) + row;
    Elements elements;
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
      float sum[SETS];
      #pragma unroll
      for (int s = 0; s < SETS; s++) {
        sum[s] = sums[s].of[e] * factor;
#if OFFSETS
        if (offsets_of[s]) sum[s] = (float)(T)sum[s] + (float)offsets_of[s][expert * N + n + e];
#endif
      }
#if FIRST
      elements.of[e] = (T)JOINED(sum);
#elif OTHERS
      elements.of[e] = (T)gated(sum[0], (float)others[(size_t)(first + column) * OTHERS + n]);
#else
      elements.of[e] = (T)sum[0];
#endif
    }
#if SENDS
    // Of four lanes, one sends all their elements.
    const unsigned bits = *(const unsigned short*)elements.of, next = __shfl_xor_sync(0xffffffffu, bits, 1);
    unsigned words[2] = {row % 2 ? next : bits | next << 16};
    words[1] = __shfl_xor_sync(0xffffffffu, words[0], 2);
    if (column >= count) continue;
    #pragma unroll
    for (int rank = 0; rank < RANKS; rank++)
      if (rank != RANK && row % 4 == 0)
        sent((uint4*)(inbox[rank] + pieces_of(RANK, round)) + ((size_t)(first + column) * Y_ROW + n) / 4, words, round);
#elif STORES_DIGITS
    store_own_digits(digits_of_row(digits, first + column, N), n, (float)elements.of[0], column < count);
    if (column >= count) continue;
#endif
#if EXPERTS && !FIRST
    *(Elements*)(y + (size_t)order[first + column] * Y_ROW + n) = elements;
#else
    *(Elements*)(y + (size_t)(first + column) * Y_ROW + n) = elements;
#endif
  }
#if TILE_COUNTS && FIRST
  count_block((int*)tiles + 3 * tiles_shape[0] + blockIdx.y);
#endif
#endif
