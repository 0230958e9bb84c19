  // A warp for each of `count` vectors of DIM numbers, padded with zeros to SIZE.
  const int lane = threadIdx.x & 31;
  const size_t vector = (size_t)blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5);
  if (vector >= (size_t)*count) return;
  float numbers[SIZE / 32];
  #pragma unroll
  for (int e = 0; e < SIZE / 32; e++)
    numbers[e] = e * 32 + lane < DIM ? (float)x[vector * DIM + e * 32 + lane] : 0.f;
#if TURNED
  turned<SIZE / 32>(numbers, signs, *scale);
#endif
  code_vector<SIZE / 32, GROUP, BITS, REFITS>(numbers, words + vector * (SIZE * BITS / 32),
                                              scales + vector * (SIZE / GROUP), biases + vector * (SIZE / GROUP));
