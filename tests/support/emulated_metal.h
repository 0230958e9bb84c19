// Enough of Metal to run a kernel on a CPU: its names, and checks that a GPU does not make. Included before
// a kernel's source. What does not depend on the kernel is in `emulated_metal.cpp`, compiled once.
#include <stddef.h>
#include <stdint.h>

typedef unsigned int uint;
struct uint3 { uint x, y, z; };
typedef _Float16 float16_t;

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float x) {
    uint32_t word;
    __builtin_memcpy(&word, &x, 4);
    bits = x != x ? 0x7FC0 : (word + 0x7FFF + (word >> 16 & 1)) >> 16;
  }
  explicit operator float() const {
    const uint32_t word = (uint32_t)bits << 16;
    float x;
    __builtin_memcpy(&x, &word, 4);
    return x;
  }
};

#pragma GCC visibility push(hidden)  // each kernel has threads of its own
namespace emulated {
enum State { READY, AT_LANES, AT_BARRIER, DONE };
extern int count, current;  // threads of a thread group, and the one that runs

// Let other threads go on, until they allow this one to.
void wait(State state);
// End the launch with an error.
void fail(const char* what, size_t place, size_t size);
// Say which of its two places a thread writes what its SIMD group reads next; the group may still read the other.
int next_turn();
// Return what the lanes of this thread's SIMD group give, once all have.
const float* given_by_lanes(float x);

// An array argument. Not a pointer, so that a kernel cannot mix up address spaces.
template <typename E>
struct Buffer {
  E* data;
  size_t size;
  const char* name;
  E& operator[](size_t place) const {
    if (place >= size) fail(name, place, size);
    return data[place];
  }
};

template <typename Operation>
static float over_lanes(float x, Operation operation) {
  const float* const given = given_by_lanes(x);
  float result = given[0];
  for (int i = 1; i < 32; i++) result = operation(result, given[i]);
  return result;
}

void forget_shared();
// Run a kernel over a grid of `groups` thread groups. Return its error, or null.
// `forget` is called when a thread group begins.
const char* run(const int* groups, uint3* group, void (*kernel)(), void (*forget)() = forget_shared);
}  // namespace emulated
#pragma GCC visibility pop

// Shared memory lies in a section of its own; it is full of NaN when a thread group begins.
#define threadgroup static __attribute__((section("shared_memory")))

namespace metal {
enum class mem_flags { mem_threadgroup };
static inline void threadgroup_barrier(mem_flags) { emulated::wait(emulated::AT_BARRIER); }
static inline float simd_sum(float x) {
  return emulated::over_lanes(x, [](float a, float b) { return a + b; });
}
static inline float simd_max(float x) {
  return emulated::over_lanes(x, [](float a, float b) { return a > b ? a : b; });
}
static inline float exp2(float x) { return __builtin_exp2f(x); }
namespace precise {
static inline float tanh(float x) { return __builtin_tanhf(x); }
}  // namespace precise
}  // namespace metal
using namespace metal;
