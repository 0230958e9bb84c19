  // Copies each row's chosen keys [T, LIMIT] from blocks [blocks, BLOCK, DIM] to `to` [T, ROOM, DIM], where
  // attention reads them side by side. It reads whole runs of 32 keys: zeros stand behind the last one.
  constexpr int PARTS = DIM / 8;  // of 16 bytes
  const int row = blockIdx.x;
  wait_for_others();
  if (row >= *rows) return;
  const int count = found[row * 6 + 3], filled = (count + 31) / 32 * 32;
  const int* blocks = table + tiles[row * 6 + 4];
  for (int i = blockIdx.y * THREADS + threadIdx.x; i < filled * PARTS; i += gridDim.y * THREADS) {
    const int n = i / PARTS, part = i % PARTS;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (n < count) {
      const int key = chosen[(size_t)row * LIMIT + n];
      x = ((const uint4*)(keys + ((size_t)blocks[key / BLOCK] * BLOCK + key % BLOCK) * DIM))[part];
    }
    ((uint4*)(to + ((size_t)row * ROOM + n) * DIM))[part] = x;
  }
