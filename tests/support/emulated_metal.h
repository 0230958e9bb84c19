// Enough of Metal to run a kernel on a CPU: its names, thread groups whose threads take turns between
// barriers, and checks that a GPU does not make. Included before a kernel's source.
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

typedef unsigned int uint;
struct uint3 { uint x, y, z; };
typedef _Float16 float16_t;

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    bits = x != x ? 0x7FC0 : (word + 0x7FFF + (word >> 16 & 1)) >> 16;
  }
  explicit operator float() const {
    const uint32_t word = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
  }
};

namespace emulated {
enum State { READY, AT_LANES, AT_BARRIER, DONE };
struct Thread {
  ucontext_t start;
  jmp_buf at;
  State state;
  bool started;
  int turn;
  float given[2];
};
static Thread threads[1024];
static int count, current;
static jmp_buf scheduler;
static char error[256];

static void __attribute__((noinline)) wait(State state) {
  threads[current].state = state;
  if (!_setjmp(threads[current].at)) _longjmp(scheduler, 1);
}
static void __attribute__((noinline)) fail(const char* what, size_t place, size_t size) {
  if (!error[0]) snprintf(error, sizeof error, "%s: %zu of %zu", what, place, size);
  wait(DONE);
}

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

// All threads run the kernel for each thread group in turn; their stacks are made once.
static void (*body)();
static void run_thread() {
  for (;;) {
    body();
    wait(DONE);
  }
}
static void resume(int thread) {
  current = thread;
  if (_setjmp(scheduler)) return;
  if (threads[thread].started) _longjmp(threads[thread].at, 1);
  threads[thread].started = true;
  setcontext(&threads[thread].start);
}
static bool all(State state, int begin, int end) {
  for (int i = begin; i < end; i++)
    if (threads[i].state != state) return false;
  return true;
}
static void release(int begin, int end) {
  for (int i = begin; i < end; i++) threads[i].state = READY;
}
// Threads go on one after the other: all SIMD groups from one operation across lanes to the next, or each as
// far as it gets before the next one moves; the first thread first, or the last.
static void run_group(bool backwards, bool group_by_group) {
  release(0, count);
  while (!error[0] && !all(DONE, 0, count)) {
    bool moved = false;
    for (int i = 0; i < count; i += 32) {
      const int first = backwards ? count - 32 - i : i;
      bool again = true;
      while (again && !error[0]) {
        for (int lane = 0; lane < 32; lane++) {
          const int thread = first + (backwards ? 31 - lane : lane);
          if (threads[thread].state != READY) continue;
          resume(thread);
          moved = true;
        }
        const bool agreed = all(AT_LANES, first, first + 32);
        if (agreed) release(first, first + 32);
        again = agreed && group_by_group;
      }
    }
    if (all(AT_BARRIER, 0, count)) release(0, count);
    if (!moved) strcpy(error, "some threads wait for others that do not come");
  }
}

template <typename Operation>
static float over_lanes(float x, Operation operation) {
  Thread& own = threads[current];
  const int turn = own.turn ^= 1, first = current / 32 * 32;
  own.given[turn] = x;
  wait(AT_LANES);
  float result = threads[first].given[turn];
  for (int i = 1; i < 32; i++) result = operation(result, threads[first + i].given[turn]);
  return result;
}
}  // namespace emulated

// Shared memory lies in a section of its own; it is full of NaN when a thread group begins.
extern char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));
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

namespace emulated {
static sigjmp_buf faulty;
static void caught(int number) {
  const bool outside = number == SIGSEGV;
  snprintf(error, sizeof error, "thread %d: %s", current,
           outside ? "memory outside arrays" : "an index out of range, or a misaligned address");
  siglongjmp(faulty, 1);
}
static void forget_shared() {
  memset(__start_shared_memory, 0xFF, __stop_shared_memory - __start_shared_memory);
}
// `forget` is called when a thread group begins.
static const char* run(const int* groups, uint3* group, void (*kernel)(), void (*forget)() = forget_shared) {
  static char* stacks = nullptr;
  constexpr size_t STACK = 64 << 10, MOST_SHARED = 32 << 10;
  const size_t shared = __stop_shared_memory - __start_shared_memory;
  error[0] = 0;
  if (shared > MOST_SHARED) return "more than 32 KiB of threadgroup memory";
  if (count % 32) return "a SIMD group with fewer than 32 threads";
  body = kernel;
  if (!stacks) stacks = (char*)malloc(1024 * STACK);
  for (int i = 0; i < count; i++) {
    threads[i].started = false;
    getcontext(&threads[i].start);
    threads[i].start.uc_stack.ss_sp = stacks + i * STACK;
    threads[i].start.uc_stack.ss_size = STACK;
    makecontext(&threads[i].start, run_thread, 0);
  }
  struct sigaction handler = {}, before[2];
  handler.sa_handler = caught;
  handler.sa_flags = SA_NODEFER;
  sigaction(SIGSEGV, &handler, &before[0]);
  sigaction(SIGILL, &handler, &before[1]);
  if (!sigsetjmp(faulty, 1)) {
    int order = 0;
    for (group->z = 0; group->z < (uint)groups[2] && !error[0]; group->z++)
      for (group->y = 0; group->y < (uint)groups[1] && !error[0]; group->y++)
        for (group->x = 0; group->x < (uint)groups[0] && !error[0]; group->x++) {
          forget();
          run_group(order & 1, order & 2);
          order++;
        }
  }
  sigaction(SIGSEGV, &before[0], nullptr);
  sigaction(SIGILL, &before[1], nullptr);
  return error[0] ? error : nullptr;
}
}  // namespace emulated
