  // A warp for each row and head. Queries and keys may be normalised and rotated, values normalised.
  // Keys and values go to the row's slot of the pool, as they are or, CODED, as codes. Queries for
  // coded keys are in the coordinates of those. With a WORKSPACE, rows whose block is -1 - n write to its block n.
  // q [T, HEADS, HEAD_DIM], k [T, KV_HEADS, HEAD_DIM], v [T, VALUE_HEADS, VALUE_DIM], each a part of a row of *_STRIDE elements,
  // with a head every *_HEAD elements
  // q_out [T, HEADS, HEAD_DIM]; cosines and sines [T, PAIRS]
  const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0);  // so that all lanes' branches are one
  const int row = blockIdx.x, head = blockIdx.y * (THREADS / 32) + warp, lane = threadIdx.x & 31;
  const bool query = head < HEADS, value = head >= HEADS + KV_HEADS;
  const int own = query ? head : value ? head - HEADS - KV_HEADS : head - HEADS;
  // Pair p is of elements (first, second): that turn together, or, behind the last, neighbours.
  constexpr int HALF = HEAD_DIM / 2, EACH = (HALF + 31) / 32;
  int first[EACH], second[EACH];
  const T* norm = query ? q_norm : k_norm;
  float sine[EACH] = {}, cosine[EACH] = {}, weight[2 * EACH] = {};
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = lane + 32 * i;
    first[i] = p >= PAIRS || NEIGHBOURS ? 2 * p : p;
    second[i] = p >= PAIRS || NEIGHBOURS ? 2 * p + 1 : p + PAIRS;
    if (QK_NORM && !value && norm && p < HALF) {
      weight[2 * i] = (float)norm[first[i]];
      weight[2 * i + 1] = (float)norm[second[i]];
    }
  }
#if KV_HEADS
  const int block = blocks[row];
#if WORKSPACE
  if (block < 0) keys = prompt_keys, values = prompt_values;
#endif
  const size_t slot = ((size_t)(block < 0 ? -1 - block : block) * KV_HEADS + own) * BLOCK + offsets[row];
#endif
  const int count = *rows;
  // What stands above reads nothing that another kernel writes.
  wait_for_others();
  if (row >= count || head >= HEADS + KV_HEADS + VALUE_HEADS) return;
  const T* from = (query ? q + (size_t)row * Q_STRIDE
                         : value ? v + (size_t)row * V_STRIDE : k + (size_t)row * K_STRIDE) +
                  own * (query ? Q_HEAD : value ? V_HEAD : K_HEAD);
  T* own_query = q_out + ((size_t)row * HEADS + own) * HEAD_DIM;
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int p = lane + 32 * i;
    if (!value && p < PAIRS) {
      cosine[i] = cosines[(size_t)row * PAIRS + p];
      sine[i] = sines[(size_t)row * PAIRS + p];
    }
  }
#if CODED
  __shared__ T vectors[THREADS / 32][HEAD_DIM];
  T* to = query && !QUERY_TURNED ? own_query : vectors[warp];
#else
#if KV_HEADS
  T* to = query ? own_query : value ? values + slot * VALUE_DIM : keys + slot * HEAD_DIM;
#else
  T* to = own_query;
#endif
#endif
  // Values may be shorter than keys, and both no multiple of what the lanes take at a time.
  const auto inside = [&](int element) {
    return (HEAD_DIM % 64 == 0 && (VALUE_DIM >= HEAD_DIM || !value)) || element < (value ? VALUE_DIM : HEAD_DIM);
  };
  float a[EACH], b[EACH], sum = 0.f;
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    a[i] = inside(first[i]) ? (float)from[first[i]] : 0.f;
    b[i] = inside(second[i]) ? (float)from[second[i]] : 0.f;
    sum += a[i] * a[i] + b[i] * b[i];
  }
  if (value ? V_NORM : QK_NORM) {
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    const float factor = rsqrtf(sum / (value ? VALUE_DIM : HEAD_DIM) + EPS);
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
      a[i] = rounded(a[i] * factor);
      b[i] = rounded(b[i] * factor);
      if (!value && norm) {
        a[i] = rounded(a[i] * weight[2 * i]);
        b[i] = rounded(b[i] * weight[2 * i + 1]);
      }
    }
  }
  #pragma unroll
  for (int i = 0; i < EACH; i++) {
    float x = a[i], y = b[i];
    if (!value && lane + 32 * i < PAIRS) {
      x = a[i] * cosine[i] - b[i] * sine[i];
      y = a[i] * sine[i] + b[i] * cosine[i];
    }
    if (inside(first[i])) to[first[i]] = (T)x;
    if (inside(second[i])) to[second[i]] = (T)y;
  }
#if CODED
  // Codes are of elements in another order than turns by the position.
  if (query && !QUERY_TURNED) return;
  __syncwarp();
  constexpr int E = HEAD_DIM / 32, V_E = VALUE_DIM / 32;
  float x[E];
  #pragma unroll
  for (int e = 0; e < E; e++) x[e] = !value || e < V_E ? (float)to[e * 32 + lane] : 0.f;
  if (E == V_E || !value) {
    if (query ? QUERY_TURNED : value ? V_TURNED : K_TURNED)
      turned<E>(x, value ? value_signs : key_signs, query ? QUERY_SCALE : value ? V_SCALE : K_SCALE);
  } else if (V_TURNED) {
    turned<V_E>(x, value_signs, V_SCALE);
  }
  if (query) {
    #pragma unroll
    for (int e = 0; e < E; e++) own_query[e * 32 + lane] = (T)x[e];
    return;
  }
  const float reach = value ? V_REACH : K_REACH, *edges = value ? value_edges : key_edges;
  unsigned* words = value ? value_words : key_words;
  __half *scales = value ? value_scales : key_scales, *biases = value ? value_biases : key_biases;
  if (ALIKE || !value) encode_vector<K_CODING>(x, slot, reach, edges, words, scales, biases);
  else encode_vector<V_CODING>(x, slot, reach, edges, words, scales, biases);
#endif
