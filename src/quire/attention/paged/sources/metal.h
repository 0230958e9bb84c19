// What the portable kernels need of Metal. MLX compiles with `using namespace metal`.
#define SHARED threadgroup
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_4 _Pragma("clang loop unroll_count(4)")
#define EXP2(x) metal::exp2(x)
// The fast one gives NaN from 45 on.
#define TANH(x) metal::precise::tanh(x)
inline float sum_of_lanes(float x) { return simd_sum(x); }
inline float max_of_lanes(float x) { return simd_max(x); }
