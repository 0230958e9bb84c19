// Vectors of `size` numbers, `count` numbers in all, each to its Hadamard transform in shared memory.
#define TURN(x, count, size) \
  for (int by = 1; by < (size); by *= 2) { \
    BARRIER(); \
    for (int i = index; i < (count) / 2; i += THREADS) { \
      const int at = i + (i & -by); \
      const float low_one = x[at], high_one = x[at + by]; \
      x[at] = low_one + high_one; \
      x[at + by] = low_one - high_one; \
    } \
  } \
  BARRIER();
