// What splits of a row and head found, joined: of each its largest score and its sum of weights in `stats`
// [splits, 2], and its weighted sum of values in `partial` [splits, V_DIM].

// The weights of splits, in shared memory with a place behind those of 64 splits.
struct Weights {
  float of[65];
  int live;  // splits with keys: those without come last
};
// By the thread block's first warp. `own` are the stats of one part more, whose weight comes last, or null;
// `sink` is one more score, or -1e30.
__device__ __forceinline__ void weigh(Weights* to, const float* stats, int count, const float* own, float sink) {
  if (threadIdx.x >= 32) return;
  float most = own ? fmaxf(sink, own[0]) : sink;
  for (int s = threadIdx.x; s < count; s += 32) most = fmaxf(most, stats[s * 2]);
  for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, by));
  float sum = 0.f;
  int last = 0;
  for (int s = threadIdx.x; s < count; s += 32) {
    const float total = stats[s * 2 + 1];
    if (total > 0.f) last = s + 1;
    to->of[s] = total > 0.f ? exp2f(stats[s * 2] - most) : 0.f;
    sum += total * to->of[s];
  }
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
  const float of_own = own && own[1] > 0.f ? exp2f(own[0] - most) : 0.f;
  if (own) sum += own[1] * of_own;
  if (sink > -1e30f) sum += exp2f(sink - most);
  last = __reduce_max_sync(0xffffffffu, last);
  for (int s = threadIdx.x; s < count; s += 32) to->of[s] /= sum;
  if (threadIdx.x == 0) {
    to->of[64] = of_own / sum;
    to->live = last;
  }
}
// Neighbouring elements that a thread takes, by one load; 128 threads take all of them.
constexpr int ELEMENTS = V_DIM > 512 ? 8 : V_DIM > 256 ? 4 : V_DIM > 128 ? 2 : 1;
static_assert(V_DIM <= 128 * ELEMENTS, "one thread block joins a head");
struct __align__(4 * ELEMENTS) Elements { float x[ELEMENTS]; };
// Those of the first splits, which are on their way while the weights are found.
constexpr int FIRST_SPLITS = 8;
struct FirstElements { Elements of[FIRST_SPLITS]; };
// `partial` is of the row, head and the first element.
__device__ __forceinline__ FirstElements first_elements(const float* partial, int count) {
  FirstElements found = {};
  #pragma unroll
  for (int s = 0; s < FIRST_SPLITS; s++)
    if (s < count) found.of[s] = *(const Elements*)(partial + s * V_DIM);
  return found;
}
__device__ __forceinline__ void add_elements(Elements* sum, const Elements& own, float weight) {
  #pragma unroll
  for (int e = 0; e < ELEMENTS; e++)
    if (weight != 0.f) sum->x[e] += weight * own.x[e];  // what was found without keys may be anything
}
// The weighted sum over all splits.
__device__ __forceinline__ Elements joined_elements(const FirstElements& first, const float* partial,
                                                    const Weights* weights) {
  Elements sum = {};
  const int live = weights->live;
  #pragma unroll
  for (int s = 0; s < FIRST_SPLITS; s++)
    if (s < live) add_elements(&sum, first.of[s], weights->of[s]);
  #pragma unroll 8
  for (int s = FIRST_SPLITS; s < live; s++)
    add_elements(&sum, *(const Elements*)(partial + s * V_DIM), weights->of[s]);
  return sum;
}
