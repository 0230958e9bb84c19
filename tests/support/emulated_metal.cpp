// Runs a kernel's threads on a CPU: they take turns between barriers.
#include "emulated_metal.h"

#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

extern char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));

namespace emulated {
int count, current;

namespace {
typedef void* Jump[5];  // of the compiler's own setjmp: the C library's takes several times as long
struct Thread {
  Jump at;
  State state;
  bool started;
  int turn;
};
Thread threads[1024];
float given[2][1024];
Jump scheduler;
sigjmp_buf faulty;
char error[256];
void (*body)();

// All threads run the kernel for each thread group in turn, in all launches but those after an error.
void run_thread() {
  for (;;) {
    body();
    wait(DONE);
  }
}
void start(int thread) {
  constexpr size_t STACK = 64 << 10;
  static char* const stacks = (char*)malloc(1024 * STACK);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks + thread * STACK;
  context.uc_stack.ss_size = STACK;
  makecontext(&context, run_thread, 0);
  threads[thread].started = true;
  setcontext(&context);
}
// GCC must not look into functions that jump: it would keep values in registers that other threads change.
[[gnu::noipa]] void jump(Jump& to) { __builtin_longjmp(to, 1); }
[[gnu::noipa]] void resume(int thread) {
  current = thread;
  if (__builtin_setjmp(scheduler)) return;
  if (threads[thread].started) jump(threads[thread].at);
  start(thread);
}
bool all(State state, int begin, int end) {
  for (int i = begin; i < end; i++)
    if (threads[i].state != state) return false;
  return true;
}
void release(int begin, int end) {
  for (int i = begin; i < end; i++) threads[i].state = READY;
}
// Threads go on one after the other: all SIMD groups from one operation across lanes to the next, or each as
// far as it gets before the next one moves; the first thread first, or the last.
void run_group(bool backwards, bool group_by_group) {
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
void caught(int number) {
  const bool outside = number == SIGSEGV;
  snprintf(error, sizeof error, "thread %d: %s", current,
           outside ? "memory outside arrays" : "an index out of range, or a misaligned address");
  siglongjmp(faulty, 1);
}
}  // namespace

[[gnu::noipa]] void wait(State state) {
  threads[current].state = state;
  if (!__builtin_setjmp(threads[current].at)) jump(scheduler);
}
void fail(const char* what, size_t place, size_t size) {
  if (!error[0]) snprintf(error, sizeof error, "%s: %zu of %zu", what, place, size);
  wait(DONE);
}
int next_turn() { return threads[current].turn ^= 1; }
const float* given_by_lanes(float x) {
  const int turn = next_turn();
  given[turn][current] = x;
  wait(AT_LANES);
  return given[turn] + current / 32 * 32;
}
void forget_shared() {
  memset(__start_shared_memory, 0xFF, __stop_shared_memory - __start_shared_memory);
}
const char* run(const int* groups, uint3* group, void (*kernel)(), void (*forget)()) {
  constexpr size_t MOST_SHARED = 32 << 10;
  const size_t shared = __stop_shared_memory - __start_shared_memory;
  error[0] = 0;
  if (shared > MOST_SHARED) return "more than 32 KiB of threadgroup memory";
  if (count % 32) return "a SIMD group with fewer than 32 threads";
  body = kernel;
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
  if (!error[0]) return nullptr;
  for (Thread& each : threads) each.started = false;  // they are anywhere in the kernel
  return error;
}
}  // namespace emulated
