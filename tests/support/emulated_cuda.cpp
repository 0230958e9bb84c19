// Does for the threads of a warp what CUDA's instructions do for all of them together.
#define ALIGNED 16
#include "emulated_cuda.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

namespace emulated {
uint3 block, blocks;
unsigned char* dynamic;

namespace {
struct Copy {
  void* to;
  const void* from;
  int bytes, turn;
};
struct Copies {
  Copy* data;
  int count, room;
};
alignas(8) uint posted[1024][2][6];
size_t dynamic_size;
Copies copies[1024];
int turns[1024];
int arrived[16], meetings[16];  // by barrier

template <typename Read>
void multiply(float* c, const uint (&own)[6], Read read) {
  const Posts all = post(own, 6);
  const int lane = current % 32, quad = lane % 4, group = lane / 4;
  for (int i = 0; i < 4; i++) {
    const int row = i / 2, column = 2 * quad + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; k++) {
      const int pair = k % 8 / 2, high = k / 8;
      const float a = read(all[group * 4 + pair][row + 2 * high], k % 2);
      const float b = read(all[column * 4 + pair][4 + high], k % 2);
      sum += a * b;
    }
    c[i] += sum;
  }
}
}  // namespace

// Pages that nobody may touch are behind it.
void ask_for(size_t size) {
  constexpr size_t MOST = 256 << 10, GUARD = 64 << 10;
  static unsigned char* all = nullptr;
  if (!all) {
    all = (unsigned char*)mmap(nullptr, MOST + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(all + MOST, GUARD, PROT_NONE);
  }
  dynamic_size = (size + 15) / 16 * 16;
  dynamic = all + MOST - dynamic_size;
}
void forget() {
  forget_shared();
  memset(arrived, 0, sizeof arrived);
  memset(dynamic, 0xFF, dynamic_size);
  for (int i = 0; i < count; i++) copies[i].count = 0;
}
void meet(int barrier, int threads) {
  const int turn = meetings[barrier];
  if (++arrived[barrier] == threads) {
    arrived[barrier] = 0;
    meetings[barrier]++;
  }
  while (meetings[barrier] == turn) wait(READY);
}
void yield() { sched_yield(); }

void copy(void* to, const void* from, int bytes, int most_aligned) {
  const int aligned = bytes < most_aligned ? bytes : most_aligned;
  if (((size_t)to | (size_t)from) % aligned) fail("a misaligned copy", ((size_t)to | (size_t)from) % aligned, bytes);
  memset(to, 0xFF, bytes);
  Copies& own = copies[current];
  if (own.count == own.room) {
    own.room = own.room ? 2 * own.room : 16;
    own.data = (Copy*)realloc(own.data, own.room * sizeof(Copy));
  }
  own.data[own.count++] = {to, from, bytes, turns[current]};
}
void end_turn() { turns[current]++; }
void arrive(int left) {
  Copies& own = copies[current];
  int later = 0;
  for (int i = 0; i < own.count; i++) {
    const Copy each = own.data[i];
    if (each.turn < turns[current] - left) memcpy(each.to, each.from, each.bytes);
    else own.data[later++] = each;
  }
  own.count = later;
}

Posts post(const uint* what, int size) {
  const int turn = next_turn();
  memcpy(posted[current][turn], what, 4 * size);
  wait(AT_LANES);
  return {posted + current / 32 * 32, turn};
}
uint halves_of(float low, float high) {
  const float most = 65504.f;
  const float16_t x = (float16_t)(low > most ? most : low < -most ? -most : low);
  const float16_t y = (float16_t)(high > most ? most : high < -most ? -most : high);
  uint16_t a, b;
  memcpy(&a, &x, 2);
  memcpy(&b, &y, 2);
  return (uint)b << 16 | a;
}
void multiply_halves(float* c, const uint (&own)[6]) {
  multiply(c, own, [](uint pair, int which) { return half_of(pair, which); });
}
void multiply_brains(float* c, const uint (&own)[6]) {
  multiply(c, own, [](uint pair, int which) { return brain_of(pair, which); });
}
void multiply_bytes(int* c, const uint (&own)[6]) {
  const Posts all = post(own, 6);
  const int lane = current % 32, quad = lane % 4;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 32; k++) {
      const int from = k % 16 / 4, by = k % 4 * 8;
      const uint left = all[lane / 4 * 4 + from][i / 2 + k / 16 * 2] >> by & 255;
      c[i] += (int)left * (signed char)(all[(quad * 2 + i % 2) * 4 + from][4 + k / 16] >> by);
    }
}
}  // namespace emulated
