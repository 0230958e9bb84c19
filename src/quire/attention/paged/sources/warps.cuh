// What the lanes of a warp, and the warps of a thread block, do together. `column` is of a product's
// result, whose columns are query heads.

__device__ __forceinline__ float column_max(float x) {
  #pragma unroll
  for (int by = 4; by < 32; by *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, by));
  return x;
}
__device__ __forceinline__ float column_sum(float x) {
  #pragma unroll
  for (int by = 4; by < 32; by *= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}
// 4 or 8 bytes from global to shared memory, in the background.
__device__ __forceinline__ void copy_few_ahead(void* to, const void* from, int bytes) {
  const unsigned place = (unsigned)__cvta_generic_to_shared(to);
  if (bytes == 8) asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(place), "l"(from) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(place), "l"(from) : "memory");
}
// A warp's part of the codes of 64 tokens, ROW bytes each, every FROM bytes there and every TO bytes here.
template <int ROW, int FROM, int TO>
__device__ __forceinline__ void copy_rows(unsigned char* to, const unsigned char* from, int lane) {
  constexpr int EACH = ROW % 16 ? 8 : 16, CHUNKS = ROW / EACH;
  #pragma unroll
  for (int i = 0; i < 2 * CHUNKS; i++) {
    const int n = i * 32 + lane, at = n / CHUNKS, chunk = n % CHUNKS;
    if (EACH == 16) copy_ahead(to + at * TO + chunk * 16, from + at * FROM + chunk * 16);
    else copy_few_ahead(to + at * TO + chunk * 8, from + at * FROM + chunk * 8, 8);
  }
}
// Until all turns but the last have arrived.
__device__ __forceinline__ void await_turn() {
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncwarp();
}
__device__ __forceinline__ void await_all() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncwarp();
}
// What streams of keys found for one query head: the greatest score, the total of its weights, and one
// element of the weighted sum of values.
struct Joined { float best, sum, x; };
// `found` has each stream's greatest score and total for ROWS heads; `element` is the first stream's, the
// next ones' are `stride` further.
template <int STREAMS, int ROWS>
__device__ __forceinline__ Joined joined(const float* found, int head, const float* element, int stride) {
  Joined to = {-1e30f, 0.f, 0.f};
  #pragma unroll
  for (int w = 0; w < STREAMS; w++) to.best = fmaxf(to.best, found[(w * ROWS + head) * 2]);
  #pragma unroll
  for (int w = 0; w < STREAMS; w++) {
    const float* own = found + (w * ROWS + head) * 2;
    const float weight = power(own[0] - to.best);
    to.sum += own[1] * weight;
    to.x += element[w * stride] * weight;
  }
  return to;
}
// N times four scores of which SHARE warps have a part each, summed in all of them. `given` holds those of
// all warps; the next scores need another one.
template <int SHARE, int STREAMS, int N>
__device__ __forceinline__ void add_shares(float* scores, float4* given, int warp, int stream, int lane) {
  #pragma unroll
  for (int n = 0; n < N; n++)
    given[(warp * N + n) * 32 + lane] = make_float4(scores[n * 4], scores[n * 4 + 1], scores[n * 4 + 2], scores[n * 4 + 3]);
  meet(1 + stream, 32 * SHARE);
  #pragma unroll
  for (int n = 0; n < N; n++) {
    float* to = scores + n * 4;
    #pragma unroll
    for (int other = 0; other < SHARE; other++) {
      const float4 x = given[((other * STREAMS + stream) * N + n) * 32 + lane];
      to[0] = other ? to[0] + x.x : x.x;
      to[1] = other ? to[1] + x.y : x.y;
      to[2] = other ? to[2] + x.z : x.z;
      to[3] = other ? to[3] + x.w : x.w;
    }
  }
}
// A stream's greatest scores and the totals of its lanes' weights, of eight heads, where `joined` reads them.
__device__ __forceinline__ void store_totals(float* found, const float* most, const float* total, int quad, int group) {
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    const float sum = column_sum(total[h]);
    if (group == 0) {
      found[(quad * 2 + h) * 2] = most[h];
      found[(quad * 2 + h) * 2 + 1] = sum;
    }
  }
}
// What the streams of a thread block found in its split, for the heads from `place` on; `sums` has a stream's
// [ROWS, V_OWN] every WARP bytes, and the next V_OWN elements after those of all streams.
template <int STREAMS, int ROWS, int V_OWN, int WARP>
__device__ __forceinline__ void store_split(const float* found, const unsigned char* sums, size_t place, int split,
                                            int splits, float* partial, float* stats) {
  for (int n = threadIdx.x; n < PART * V_DIM; n += 128) {
    const int m = n / V_DIM, d = n % V_DIM;
    const float* element = (const float*)(sums + d / V_OWN * STREAMS * WARP) + m * V_OWN + d % V_OWN;
    const Joined all = joined<STREAMS, ROWS>(found, m, element, WARP / sizeof(float));
    const size_t at = (place + m) * splits + split;
    partial[at * V_DIM + d] = all.x;
    if (d == 0) {
      stats[at * 2] = all.best;
      stats[at * 2 + 1] = all.sum;
    }
  }
}
// Whether a split has no keys, which is stored once earlier kernels are done (READY). Of a tile without rows, which
// has no place for it, `heads` is 0; at most 128.
__device__ __forceinline__ bool ends_without_keys(bool none, float* stats, size_t place, int heads, int split, int splits) {
#ifdef READY
  READY;
#endif
  if (none && (int)threadIdx.x < heads) {
    const size_t at = (place + threadIdx.x) * splits + split;
    stats[at * 2] = -1e30f;
    stats[at * 2 + 1] = 0.f;
  }
  return none;
}
