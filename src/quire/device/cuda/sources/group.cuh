  // MOST is how many tiles there is room for.
#ifndef MOST
#define MOST min(pairs, EXPERT_COUNT + pairs / TILE)
#endif
  // Pairs of row and expert, [P], in the order of their experts, and the tiles of that order:
  // expert, first place, count, [most, 3]; those past the last have a count of 0. One thread block.
  __shared__ int starts[EXPERT_COUNT], cursor[EXPERT_COUNT], counts[EXPERT_COUNT], tile_starts[EXPERT_COUNT];
  __shared__ int total;
  const int pairs = chosen_shape[0], most = MOST;
  for (int e = threadIdx.x; e < EXPERT_COUNT; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) atomicAdd(&counts[chosen[i]], 1);
  __syncthreads();
  if (threadIdx.x < 32) {
    int at = 0, tile = 0;
    for (int base = 0; base < EXPERT_COUNT; base += 32) {
      const int e = base + threadIdx.x, own = e < EXPERT_COUNT ? counts[e] : 0;
      const int own_tiles = (own + TILE - 1) / TILE;
      int sum = own, tile_sum = own_tiles;
      for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, by);
        const int other_tiles = __shfl_up_sync(0xffffffffu, tile_sum, by);
        if (threadIdx.x >= by) {
          sum += other;
          tile_sum += other_tiles;
        }
      }
      if (e < EXPERT_COUNT) {
        starts[e] = cursor[e] = at + sum - own;
        tile_starts[e] = tile + tile_sum - own_tiles;
      }
      at += __shfl_sync(0xffffffffu, sum, 31);
      tile += __shfl_sync(0xffffffffu, tile_sum, 31);
    }
    if (threadIdx.x == 0) total = tile;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERT_COUNT; e += blockDim.x)
    for (int j = 0; j * TILE < counts[e]; j++) {
      int* to = tiles + (tile_starts[e] + j) * 3;
      to[0] = e;
      to[1] = starts[e] + j * TILE;
      to[2] = min(TILE, counts[e] - j * TILE);
    }
  for (int t = total + threadIdx.x; t < most; t += blockDim.x) tiles[t * 3 + 2] = 0;
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) order[atomicAdd(&cursor[chosen[i]], 1)] = i;
