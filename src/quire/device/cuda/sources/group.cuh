  // MOST is how many tiles there is room for.
#ifndef MOST
#define MOST min(pairs, EXPERT_COUNT + pairs / TILE)
#endif
  // Pairs of row and expert, [P], in the order of their experts, and the tiles of that order:
  // expert, first place, count, [most, 3]; those past the last have a count of 0. One thread block.
  // TILE_COUNTS: behind the tiles, a 0 for each of them, where products count the thread blocks that have stored it.
#ifndef TILE_COUNTS
#define TILE_COUNTS 0
#endif
  __shared__ int starts[EXPERT_COUNT], cursor[EXPERT_COUNT], counts[EXPERT_COUNT], tile_starts[EXPERT_COUNT];
  __shared__ int total;
  const int pairs = chosen_shape[0], most = MOST;
  for (int e = threadIdx.x; e < EXPERT_COUNT; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) atomicAdd(&counts[chosen[i]], 1);
  __syncthreads();
  if (threadIdx.x < 32) {
    constexpr int EACH = (EXPERT_COUNT + 31) / 32;  // neighbouring experts of a lane
    const int first = threadIdx.x * EACH;
    int own[EACH], at = 0, tile = 0;
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
      own[i] = first + i < EXPERT_COUNT ? counts[first + i] : 0;
      at += own[i];
      tile += (own[i] + TILE - 1) / TILE;
    }
    const int sum = at, tile_sum = tile;
    #pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, at, by), tiles_before = __shfl_up_sync(0xffffffffu, tile, by);
      if (threadIdx.x >= by) {
        at += before;
        tile += tiles_before;
      }
    }
    if (threadIdx.x == 31) total = tile;
    at -= sum;
    tile -= tile_sum;
    #pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (first + i >= EXPERT_COUNT) break;
      starts[first + i] = cursor[first + i] = at;
      tile_starts[first + i] = tile;
      at += own[i];
      tile += (own[i] + TILE - 1) / TILE;
    }
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
#if TILE_COUNTS
  for (int t = threadIdx.x; t < most; t += blockDim.x) tiles[3 * most + t] = 0;
#endif
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) order[atomicAdd(&cursor[chosen[i]], 1)] = i;
