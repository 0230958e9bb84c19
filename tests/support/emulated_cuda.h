// Enough of CUDA to run the attention kernels on a CPU, on the thread groups of `emulated_metal.h`.
// What a kernel says in PTX is said here in C++, under the same names. ALIGNED is of how many bytes arrays are.
// What does not depend on the kernel is in `emulated_cuda.cpp`, compiled once.
#include "emulated_metal.h"

#define __shared__ threadgroup
#define __align__(n) __attribute__((aligned((n) < ALIGNED ? (n) : ALIGNED)))
#define __device__
#define __forceinline__ inline
#define __syncthreads() emulated::wait(emulated::AT_BARRIER)

struct __half {
  float16_t value;
  __half() = default;
  __half(float16_t x) : value(x) {}
  explicit operator float() const { return value; }
};
typedef bfloat16_t __nv_bfloat16;
struct __half2 { __half x, y; };
struct float2 { float x, y; };
struct alignas(ALIGNED) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint x, y; };
struct alignas(ALIGNED) uint4 { uint x, y, z, w; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
static inline float __bfloat162float(__nv_bfloat16 x) { return (float)x; }
static inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
static inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {(float)x.x, (float)x.y}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
static inline __nv_bfloat162 __float2bfloat162_rn(float x) { return __floats2bfloat162_rn(x, x); }
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
static inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn((float)a.x - (float)b.x, (float)a.y - (float)b.y);
}
static inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn((float)a.x * (float)b.x, (float)a.y * (float)b.y);
}
static inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return __floats2bfloat162_rn((float)a.x * (float)b.x + (float)c.x, (float)a.y * (float)b.y + (float)c.y);
}
template <typename E>
static inline E __ldcs(const E* from) { return *from; }
static inline uint2 make_uint2(uint x, uint y) { return {x, y}; }
static inline uint4 make_uint4(uint x, uint y, uint z, uint w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline __half2 __half2half2(__half x) { return {x, x}; }
static inline float __half2float(__half x) { return x.value; }
static inline float2 __half22float2(__half2 x) { return {x.x.value, x.y.value}; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline uint max(uint a, uint b) { return a > b ? a : b; }
static inline uint min(uint a, uint b) { return a < b ? a : b; }
static inline float fmaxf(float a, float b) { return a > b ? a : b; }
static inline float fminf(float a, float b) { return a < b ? a : b; }
static inline float rintf(float x) { return __builtin_rintf(x); }
static inline __half __float2half(float x) { return {(float16_t)x}; }
static inline float fabsf(float x) { return __builtin_fabsf(x); }
static inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float exp2f(float x) { return __builtin_exp2f(x); }
static inline float tanhf(float x) { return __builtin_tanhf(x); }
static inline float expf(float x) { return __builtin_expf(x); }
static inline float logf(float x) { return __builtin_logf(x); }
static inline float log2f(float x) { return __builtin_log2f(x); }
static inline float log10f(float x) { return __builtin_log10f(x); }
static inline float log1pf(float x) { return __builtin_log1pf(x); }
static inline float expm1f(float x) { return __builtin_expm1f(x); }
static inline float erff(float x) { return __builtin_erff(x); }
static inline float sinf(float x) { return __builtin_sinf(x); }
static inline float cosf(float x) { return __builtin_cosf(x); }
static inline float floorf(float x) { return __builtin_floorf(x); }
static inline float powf(float x, float y) { return __builtin_powf(x, y); }
static inline float fmodf(float x, float y) { return __builtin_fmodf(x, y); }
static inline void sincosf(float x, float* sine, float* cosine) { *sine = __builtin_sinf(x); *cosine = __builtin_cosf(x); }
static inline float __expf(float x) { return __builtin_expf(x); }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __int_as_float(int x) { float y; __builtin_memcpy(&y, &x, 4); return y; }
static inline int atomicAdd(int* to, int more) { *to += more; return *to - more; }
static inline float sqrtf(float x) { return __builtin_sqrtf(x); }
static inline float rsqrtf(float x) { return 1.f / __builtin_sqrtf(x); }
static inline uint __float_as_uint(float x) { uint y; __builtin_memcpy(&y, &x, 4); return y; }
static inline float __uint_as_float(uint x) { float y; __builtin_memcpy(&y, &x, 4); return y; }
static inline uint __byte_perm(uint a, uint b, uint which) {
  const uint64_t both = (uint64_t)b << 32 | a;
  uint to = 0;
  for (int i = 0; i < 4; i++) to |= (uint)(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return to;
}
static inline uint raised(uint word, int shift) { return (word >> shift & 0x000F000Fu) | 0x43004300u; }
static inline uint raised16(uint bits, uint mask) { return (bits & mask) | 0x64006400u; }
static inline uint places_of(uint codes) { return (codes ^ codes >> 1) & 0x77777777u; }
static inline uint chosen(uint x, uint y, uint mask) { return (x & mask) | (y & ~mask); }
static inline uint bytes_at(uint low, uint high, uint places) { return __byte_perm(low, high, places); }

typedef uint Place;
#pragma GCC visibility push(hidden)
namespace emulated {
extern uint3 block, blocks;
extern unsigned char* dynamic;  // shared memory that is asked for at launch
void ask_for(size_t size);
void forget();
// Threads of a group that are at a barrier wait for so many.
void meet(int barrier, int threads);
void yield();

// Copies in the background arrive when their thread waits for them, and no sooner.
void copy(void* to, const void* from, int bytes, int aligned);
void end_turn();
// All turns but the last `left` arrive.
void arrive(int left);

// What the lanes of a warp say, once all have.
struct Posts {
  const uint (*lanes)[2][6];
  int turn;
  const uint* operator[](int lane) const { return lanes[lane][turn]; }
};
Posts post(const uint* what, int size);
static inline float half_of(uint pair, int which) {
  float16_t x;
  const uint16_t bits = pair >> 16 * which;
  __builtin_memcpy(&x, &bits, 2);
  return (float)x;
}
static inline float brain_of(uint pair, int which) {
  return __uint_as_float(which ? pair & 0xFFFF0000u : pair << 16);
}
uint halves_of(float low, float high);
// m16n8k16 of halves, and of bfloat16; m16n8k32 of bytes.
void multiply_halves(float* c, const uint (&own)[6]);
void multiply_brains(float* c, const uint (&own)[6]);
void multiply_bytes(int* c, const uint (&own)[6]);
}  // namespace emulated
#pragma GCC visibility pop

// Pieces of other ranks, whose kernels run in other threads.
static inline void sent(uint4* to, const uint* words, uint round) {
  uint* at = (uint*)to;
  at[0] = words[0];
  at[2] = words[1];
  __atomic_store_n(at + 1, round, __ATOMIC_RELEASE);
  __atomic_store_n(at + 3, round, __ATOMIC_RELEASE);
}
static inline bool received(const uint4* from, uint* words, uint round) {
  const uint* at = (const uint*)from;
  if (__atomic_load_n(at + 3, __ATOMIC_ACQUIRE) != round) {
    emulated::yield();
    return false;
  }
  words[0] = at[0];
  words[1] = at[2];
  return true;
}

#define threadIdx (uint3{(uint)emulated::current, 0, 0})
#define blockDim (uint3{(uint)emulated::count, 1, 1})
#define blockIdx emulated::block
#define gridDim emulated::blocks

static inline float __shfl_sync(uint, float x, int lane) {
  const uint own = __float_as_uint(x);
  return __uint_as_float(emulated::post(&own, 1)[lane][0]);
}
static inline int __shfl_sync(uint, int x, int lane) { return emulated::post((const uint*)&x, 1)[lane][0]; }
static inline int __shfl_sync(uint, int x, int lane, int width) {
  return emulated::post((const uint*)&x, 1)[emulated::current % 32 / width * width + lane][0];
}
static inline int __shfl_up_sync(uint, int x, int by) {
  const int lane = emulated::current % 32;
  return emulated::post((const uint*)&x, 1)[lane < by ? lane : lane - by][0];
}
static inline int __shfl_xor_sync(uint, int x, int by) {
  return emulated::post((const uint*)&x, 1)[(emulated::current ^ by) % 32][0];
}
static inline float __shfl_xor_sync(uint mask, float x, int by) {
  return __shfl_sync(mask, x, emulated::current % 32 ^ by);
}
static inline uint __shfl_xor_sync(uint, uint x, int by) {
  return emulated::post(&x, 1)[(emulated::current ^ by) % 32][0];
}
static inline bool __any_sync(uint, bool x) {
  return emulated::over_lanes(x, [](float a, float b) { return a + b; }) > 0.f;
}
static inline int __reduce_max_sync(uint, int x) {
  const emulated::Posts all = emulated::post((const uint*)&x, 1);
  for (int lane = 0; lane < 32; lane++) x = max(x, (int)all[lane][0]);
  return x;
}
static inline int __reduce_min_sync(uint mask, int x) { return ~__reduce_max_sync(mask, ~x); }
static inline void __syncwarp() { emulated::over_lanes(0.f, [](float a, float) { return a; }); }
static inline void product16(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  emulated::multiply_halves(c, {a0, a1, a2, a3, b0, b1});
}
static inline void product(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  emulated::multiply_brains(c, {a0, a1, a2, a3, b0, b1});
}
static inline void byte_product(int* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  emulated::multiply_bytes(c, {a0, a1, a2, a3, b0, b1});
}
// A warp's part of wgmma: 16 rows of W, all of x. Pieces of 16 bytes of rows of 128 are swizzled.
typedef unsigned long long Tile;
static inline Tile tile_at(const void* tile) { return (Tile)tile; }
static inline Tile moved(Tile tile, int pieces) { return tile + 16 * pieces; }
static inline uint swizzled(Tile tile, int row, int pair) {
  return ((const uint*)tile)[row * 32 + (pair / 4 ^ row & 7) * 4 + pair % 4];
}
// `right(row, k)` is an element of the right matrix.
template <int N, typename Right>
static inline void add_products(float (&c)[N], uint a0, uint a1, uint a2, uint a3, Right right) {
  const uint own[4] = {a0, a1, a2, a3};
  const emulated::Posts all = emulated::post(own, 4);
  const int lane = emulated::current % 32;
  for (int i = 0; i < N; i++) {
    const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, half = i / 2 % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; k++)
      sum += emulated::brain_of(all[lane / 4 * 4 + k % 8 / 2][half + k / 8 * 2], k % 2) * right(row, k);
    c[i] += sum;
  }
}
template <int N>
static inline void wgmma(float (&c)[N], uint a0, uint a1, uint a2, uint a3, Tile x, int slice) {
  add_products(c, a0, a1, a2, a3, [=](int row, int k) {
    return emulated::brain_of(swizzled(x, row, slice * 8 + k / 2), k % 2);
  });
}
// Further columns of such a tile are as many pieces on as its highest bits say.
static inline Tile columns_at(const void* tile, int pieces) { return (Tile)tile | (Tile)pieces << 48; }
template <int N>
static inline void wgmma_turned(float (&c)[N], uint a0, uint a1, uint a2, uint a3, Tile x, int slice) {
  const Tile low = x & ((Tile)1 << 48) - 1;
  add_products(c, a0, a1, a2, a3, [=](int column, int k) {
    return emulated::brain_of(
      swizzled(low + column / 64 * (x >> 48) * 16, slice * 16 + k, column % 64 / 2), column % 2);
  });
}
template <int N, typename Add>
static inline void of_shared(float (&c)[N], Tile w, int slice, int add, Add products) {
  const int lane = emulated::current % 32, row = emulated::current / 32 % 4 * 16 + lane / 4;
  uint a[4];
  for (int i = 0; i < 4; i++) a[i] = swizzled(w, row + i % 2 * 8, slice * 8 + lane % 4 + i / 2 * 4);
  for (int i = 0; i < N && !add; i++) c[i] = 0.f;
  products(a);
}
template <int N>
static inline void wgmma_shared(float (&c)[N], Tile w, Tile x, int slice, int add = 1) {
  of_shared(c, w, slice, add, [&](const uint* a) { wgmma(c, a[0], a[1], a[2], a[3], x, slice); });
}
template <int N>
static inline void wgmma_shared_turned(float (&c)[N], Tile w, Tile x, int slice, int add = 1) {
  of_shared(c, w, slice, add, [&](const uint* a) { wgmma_turned(c, a[0], a[1], a[2], a[3], x, slice); });
}
// Kernels run one after the other, so all blocks are counted before they are awaited.
static inline void count_block(int* count) {
  __syncthreads();
  if (threadIdx.x == 0) ++*count;
}
static inline void await_blocks(const int* count, int wanted) {
  if (*count != wanted) __builtin_trap();
  __syncthreads();
}
static inline void set_flag(uint* flag) { *flag = 1; }
static inline void await_flag(const uint* flag) {
  if (!*flag) emulated::fail("awaits a thread block that has not run", 0, 0);
}
static inline float4 stored_by_another(const float4* at) { return *at; }
template <int COUNT>
static inline void keep_registers() {}
template <int COUNT>
static inline void take_registers() {}
static inline void initialize(unsigned long long* barrier, int count) {
  *barrier = (unsigned long long)count << 32 | (uint)count << 1;
}
static inline void arrive(unsigned long long* barrier) {
  *barrier -= 2;
  if ((uint)*barrier < 2) *barrier = *barrier >> 32 << 32 | (*barrier >> 32) << 1 | (*barrier & 1 ^ 1);
}
static inline void arrive_with_copies(unsigned long long* barrier) {
  emulated::arrive(-1);
  arrive(barrier);
}
static inline void expect(unsigned long long*, int) {}
// A box arrives at once. It may not end behind a page that nobody has.
template <int BOX_ROWS>
static inline void copy_box(void* to, const void*, const void* matrix, int columns, int column, int row,
                            unsigned long long*) {
  for (int r = 0; r < BOX_ROWS; r++) {
    const uint4* const from = (const uint4*)((const uint16_t*)matrix + (size_t)(row + r) * columns + column);
    for (int piece = 0; piece < 8; piece++) ((uint4*)to)[r * 8 + (piece ^ r & 7)] = from[piece];
  }
}
static inline void await_barrier(unsigned long long* barrier, int odd) {
  while ((int)(*barrier & 1) == odd) emulated::wait(emulated::READY);
}
static inline void shared_memory_is_written() {}
static inline void start_products() {}
static inline void end_products() {}
template <int LEFT>
static inline void await_products() {}
static inline void computed(float&) {}
static inline uint pack(float low, float high) {
  return (uint)bfloat16_t(high).bits << 16 | bfloat16_t(low).bits;
}
static inline uint pack16(float low, float high) { return emulated::halves_of(low, high); }
static inline uint times16(uint x, uint y) {
  using emulated::half_of;
  return pack16(half_of(x, 0) * half_of(y, 0), half_of(x, 1) * half_of(y, 1));
}
static inline uint minus16(uint x, uint y) {
  using emulated::half_of;
  return pack16(half_of(x, 0) - half_of(y, 0), half_of(x, 1) - half_of(y, 1));
}
static inline uint fused16(uint x, uint y, uint z) {
  using emulated::half_of;
  return pack16(half_of(x, 0) * half_of(y, 0) + half_of(z, 0), half_of(x, 1) * half_of(y, 1) + half_of(z, 1));
}
static inline uint transposed(uint two) {
  const emulated::Posts all = emulated::post(&two, 1);
  const int lane = emulated::current % 32, row = lane / 4, column = lane % 4 * 2;
  const uint low = all[column * 4 + row / 2][0], high = all[(column + 1) * 4 + row / 2][0];
  return (row % 2 ? low >> 16 : low & 0xFFFF) | (row % 2 ? high >> 16 : high & 0xFFFF) << 16;
}
static inline float power(float x) { return __builtin_exp2f(x); }
static inline void copy_ahead(void* to, const void* from) { emulated::copy(to, from, 16, ALIGNED); }
static inline void copy_half_ahead(void* to, const void* from) { emulated::copy(to, from, 8, ALIGNED); }
static inline void copy_few_ahead(void* to, const void* from, int bytes) { emulated::copy(to, from, bytes, ALIGNED); }
static inline void copy_of_line(const void* to, const void* from) { emulated::copy((void*)to, from, 16, ALIGNED); }
static inline Place place_of(const void* shared) { return (const unsigned char*)shared - emulated::dynamic; }
template <typename V>
static inline V shared_at(Place place) { return *(const V*)(emulated::dynamic + place); }
static inline void copy_of_line(Place to, const void* from) { copy_of_line(emulated::dynamic + to, from); }
template <typename V>
static inline void keep(V&) {}
static inline void end_turn() { emulated::end_turn(); }
static inline void await_turn() {
  emulated::arrive(1);
  __syncwarp();
}
static inline void await_all() {
  emulated::arrive(0);
  __syncwarp();
}
template <int LEFT>
static inline void await_turns() { emulated::arrive(LEFT); }
static inline void await_copies() { emulated::arrive(-1); }
static inline void matrices(uint* to, const void* row) {
  const emulated::Posts all = emulated::post((const uint*)&row, 2);
  const int lane = emulated::current % 32;
  for (int i = 0; i < 4; i++) to[i] = ((const uint*)*(const void* const*)all[i * 8 + lane / 4])[lane % 4];
}
static inline void turned_matrices(uint* to, const void* row) {
  const emulated::Posts all = emulated::post((const uint*)&row, 2);
  const int lane = emulated::current % 32, from = lane % 4 * 2;
  for (int i = 0; i < 4; i++) {
    const uint16_t low = ((const uint16_t*)*(const void* const*)all[i * 8 + from])[lane / 4];
    const uint16_t high = ((const uint16_t*)*(const void* const*)all[i * 8 + from + 1])[lane / 4];
    to[i] = (uint)high << 16 | low;
  }
}
static inline void __threadfence() {}
static inline void meet(int barrier, int threads) { emulated::meet(barrier, threads); }
