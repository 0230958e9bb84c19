// What Hopper's warpgroups do together. A tile is rows of 64 columns, bfloat16, in shared
// memory, whose pieces of 16 bytes are permuted as the swizzle of 128 bytes has it; a slice is 16 of its columns.
typedef unsigned long long Tile;
__device__ __forceinline__ Tile tile_at(const void* tile) {
  return (unsigned)__cvta_generic_to_shared(tile) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// A tile of a right operand whose sums run over its rows. Each 64 further columns lie `pieces` pieces of 16 bytes on.
__device__ __forceinline__ Tile columns_at(const void* tile, int pieces) {
  return (unsigned)__cvta_generic_to_shared(tile) >> 4 | (Tile)pieces << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ Tile moved(Tile tile, int pieces) { return tile + pieces; }
// Orders what was written to shared memory before products that read it. After `await_barrier`, what others copied, too.
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
// Arrives at a barrier once all copies that this thread has started are in shared memory.
__device__ __forceinline__ void arrive_with_copies(unsigned long long* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
    :: "r"((unsigned)__cvta_generic_to_shared(barrier)) : "memory");
}
// Lets a turn of a barrier end only when so many bytes of boxes have arrived.
__device__ __forceinline__ void expect(unsigned long long* barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
    :: "r"((unsigned)__cvta_generic_to_shared(barrier)), "r"(bytes) : "memory");
}
// Copies a box of a matrix to a tile, in the background: BOX_ROWS rows of 64 columns, as `map` has it, which is of all
// memory as matrices of so many columns: see `boxes.py`.
template <int BOX_ROWS>
__device__ __forceinline__ void copy_box(void* to, const void* map, const void* matrix, int /*columns*/, int column,
                                         int row, unsigned long long* barrier) {
  const unsigned long long at = ((unsigned long long)matrix >> 8) - 1;
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(map), "r"(column), "r"(row), "r"((int)(at & 0x7FFFFFFF)),
       "r"((int)(at >> 31)), "r"((unsigned)__cvta_generic_to_shared(barrier)) : "memory");
}
__device__ __forceinline__ void await_barrier(unsigned long long* barrier, int odd) {
  int ended;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.s32 %0, 1, 0, p;}"
      : "=r"(ended) : "r"((unsigned)__cvta_generic_to_shared(barrier)), "r"(odd) : "memory");
  } while (!ended);
}
// Sets a flag, which was 0, when what this warp has stored is visible to other thread blocks.
__device__ __forceinline__ void set_flag(unsigned* flag) {
  asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(flag) : "memory");
}
__device__ __forceinline__ void await_flag(const unsigned* flag) {
  unsigned set;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(set) : "l"(flag) : "memory");
  } while (!set);
}
// Loads what another thread block stored before it set its flag.
__device__ __forceinline__ float4 stored_by_another(const float4* at) {
  float4 found;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
    : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w) : "l"(at) : "memory");
  return found;
}
