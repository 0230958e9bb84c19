// Of `warpgroup_gemm.cuh`: what Hopper's warpgroups do together. A tile is rows of 64 columns, bfloat16, in shared
// memory, whose pieces of 16 bytes are permuted as the swizzle of 128 bytes has it; a slice is 16 of its columns.
typedef unsigned long long Tile;
__device__ __forceinline__ Tile tile_at(const void* tile) {
  return (unsigned)__cvta_generic_to_shared(tile) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ Tile moved(Tile tile, int pieces) { return tile + pieces; }
__device__ __forceinline__ void shared_memory_is_written() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}
// Keeps the compiler from reading a sum before it is awaited.
__device__ __forceinline__ void computed(float& sum) { asm volatile("" : "+f"(sum) :: "memory"); }
// What a warpgroup keeps of its registers, and to how many it adds what others gave up.
template <int COUNT>
__device__ __forceinline__ void keep_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT)); }
// Barriers in shared memory. A turn of one ends when `count` have arrived; turns are even or odd.
__device__ __forceinline__ void initialize(unsigned long long* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
    :: "r"((unsigned)__cvta_generic_to_shared(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(unsigned long long* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
    :: "r"((unsigned)__cvta_generic_to_shared(barrier)) : "memory");
}
__device__ __forceinline__ void await_barrier(unsigned long long* barrier, int odd) {
  int ended;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.s32 %0, 1, 0, p;}"
      : "=r"(ended) : "r"((unsigned)__cvta_generic_to_shared(barrier)), "r"(odd) : "memory");
  } while (!ended);
}
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}
// What a thread block of the cluster has at this address of its shared memory.
__device__ __forceinline__ float4 of_cluster(const float* at, int rank) {
  unsigned there;
  float4 found;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
    : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(at)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
    : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w) : "r"(there) : "memory");
  return found;
}
// The low four bits of a byte of a word, in bits 0 to 3, and its high ones, in bits 16 to 19. Bits above are of
// other codes.
__device__ __forceinline__ unsigned pair_of_byte(unsigned word, int byte) {
  return __byte_perm(word, word >> 4, byte * 0x11 + (byte + 4) * 0x1100);
}
// A byte of a word, of its half `odd & 1`, in bits 0 to 7, and the next one, in bits 16 to 23.
__device__ __forceinline__ unsigned pair_of_half(unsigned word, int odd) {
  return __byte_perm(word, 0, odd & 1 ? 0x4342 : 0x4140);
}
#if FLOATS
__device__ __forceinline__ __nv_bfloat162 float_pair(unsigned codes) {
#if BITS == 4
  return __hmul2(halves((codes << 12 & 0x80008000u) | (codes << 6 & 0x01C001C0u)), halves(0x7E807E80u));
#else
  return of_e4m3(codes);
#endif
}
#elif BITS < 16
// What two codes stand for, by a word of scale and bias.
__device__ __forceinline__ unsigned affine_pair(unsigned codes, unsigned scaling) {
#if BITS == 4
  const unsigned up = raised(codes, 0);
  const unsigned twice[2] = {__byte_perm(scaling, scaling, 0x1010), __byte_perm(scaling, scaling, 0x3232)};
  const __nv_bfloat162 n = __hsub2(*(const __nv_bfloat162*)&up, __float2bfloat162_rn(128.f));
  const __nv_bfloat162 both = __hfma2(n, *(const __nv_bfloat162*)&twice[0], *(const __nv_bfloat162*)&twice[1]);
#else
  const float scale = __uint_as_float(scaling << 16), bias = __uint_as_float(scaling & 0xFFFF0000u);
  const float low = (float)(codes & 255), high = (float)(codes >> 16);
  const __nv_bfloat162 both = __floats2bfloat162_rn(fmaf(low, scale, bias), fmaf(high, scale, bias));
#endif
  return *(const unsigned*)&both;
}
#endif
