  // Writes each row's key [T, DIM] to its slot of blocks [blocks, BLOCK, DIM]. A thread block for a row.
  const int row = blockIdx.x;
  wait_for_others();
  if (row >= *rows) return;
  auto* to = keys + ((size_t)blocks[row] * BLOCK + offsets[row]) * DIM;
  for (int d = threadIdx.x; d < DIM; d += THREADS) to[d] = k[(size_t)row * DIM + d];
