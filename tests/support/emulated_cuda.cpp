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

// By warp and turn: products, and whether a lane has computed the one of what all lanes have posted.
template <typename E>
E products[32][2][16][8];
bool multiplied[32][2];

// Add this lane's part of a product of 16 rows by DEPTH by 8 columns; the first lane of a warp computes it whole.
// A lane has four words of the left matrix and two of the right one, which are DEPTH / 8 neighbours along the depth:
// `left_of` and `right_of` return one of them.
template <int DEPTH, typename E, typename Left, typename Right>
void multiply(E* c, const uint (&own)[6], Left left_of, Right right_of) {
  constexpr int PER_WORD = DEPTH / 8;
  const int warp = current / 32, lane = current % 32;
  const Posts all = post(own, 6);
  auto& product = products<E>[warp][all.turn];
  if (!multiplied[warp][all.turn]) {
    E left[16][DEPTH], right[DEPTH][8];
    for (int from = 0; from < 32; from++)
      for (int part = 0; part < 2; part++)
        for (int which = 0; which < PER_WORD; which++) {
          const int k = part * DEPTH / 2 + from % 4 * PER_WORD + which;
          left[from / 4][k] = left_of(all[from][2 * part], which);
          left[from / 4 + 8][k] = left_of(all[from][2 * part + 1], which);
          right[k][from / 4] = right_of(all[from][4 + part], which);
        }
    for (int row = 0; row < 16; row++) {
      E sums[8] = {};
      for (int k = 0; k < DEPTH; k++)
        for (int column = 0; column < 8; column++) sums[column] += left[row][k] * right[k][column];
      memcpy(product[row], sums, sizeof sums);
    }
    multiplied[warp][all.turn] = true;
  }
  for (int i = 0; i < 4; i++) c[i] += product[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
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
  multiplied[current / 32][turn] = false;
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
  multiply<16>(c, own, half_of, half_of);
}
void multiply_brains(float* c, const uint (&own)[6]) {
  multiply<16>(c, own, brain_of, brain_of);
}
void multiply_bytes(int* c, const uint (&own)[6]) {
  const auto left = [](uint word, int which) { return (int)(word >> 8 * which & 255); };
  const auto right = [](uint word, int which) { return (int)(signed char)(word >> 8 * which); };
  multiply<32>(c, own, left, right);
}
}  // namespace emulated
