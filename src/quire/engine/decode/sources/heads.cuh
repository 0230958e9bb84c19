  // A warp for each row and head. Queries and keys are normalised, rotated, and stored: queries where
  // they were, keys in the row's slot of the pool; values beside them, perhaps normalised. Where BLOCK
  // is 0, keys and values are rows of a buffer: [T, KV_HEADS, DIM].
  const int row = blockIdx.x, head = blockIdx.y * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (row >= *rows || head >= HEADS + 2 * KV_HEADS) return;
  const int lane = threadIdx.x & 31;
  const bool query = head < HEADS, value = head >= HEADS + KV_HEADS;
  const int own = query ? head : value ? head - HEADS - KV_HEADS : head - HEADS;
  T* from = query ? q + ((size_t)row * HEADS + own) * DIM
                  : (value ? v : k) + ((size_t)row * KV_HEADS + own) * DIM;
  T* to = from;
  if (!query) {
    const size_t vector = BLOCK ? ((size_t)blocks[row] * KV_HEADS + own) * BLOCK + offsets[row]
                                : (size_t)row * KV_HEADS + own;
    to = (value ? values : keys) + vector * DIM;
  }
  // Pair p is of elements (first, second): that turn together, or, behind the last, neighbours.
  constexpr int HALF = DIM / 2, EACH = HALF / 32;
  float a[EACH], b[EACH], sum = 0.f;
  int first[EACH], second[EACH];
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = lane + 32 * i;
    first[i] = p >= PAIRS || NEIGHBOURS ? 2 * p : p;
    second[i] = p >= PAIRS || NEIGHBOURS ? 2 * p + 1 : p + PAIRS;
    a[i] = (float)from[first[i]];
    b[i] = (float)from[second[i]];
    sum += a[i] * a[i] + b[i] * b[i];
  }
  if (value ? V_NORM : QK_NORM) {
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    const float factor = rsqrtf(sum / DIM + EPS);
    const T* weight = query ? q_norm : k_norm;
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
      a[i] = rounded(a[i] * factor);
      b[i] = rounded(b[i] * factor);
      if (!value) {
        a[i] = rounded(a[i] * (float)weight[first[i]]);
        b[i] = rounded(b[i] * (float)weight[second[i]]);
      }
    }
  }
  const float position = positions[row];
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = lane + 32 * i;
    float x = a[i], y = b[i];
    if (!value && p < PAIRS) {
      float sine, cosine;
      sincosf(position * frequencies[p], &sine, &cosine);
      x = (a[i] * cosine - b[i] * sine) * GAIN;
      y = (a[i] * sine + b[i] * cosine) * GAIN;
    }
    to[first[i]] = (T)x;
    to[second[i]] = (T)y;
  }
