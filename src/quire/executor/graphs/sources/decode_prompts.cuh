  // Puts the blocks that a step's prompts read side by side into the workspace, as numbers of the model's; keys of a
  // codebook in the coordinates of their codes, as the queries are. Thread blocks [n, KV_HEADS, 2]: keys, then values.
  // decoded [4]: blocks of the workspace, and where their ids begin in `table`. Where an id is below 0, the step has
  // written the block there; at -2 - m it becomes tail m, too.
#if CODEBOOK
  const float *key_more = key_levels, *value_more = value_levels;
#else
  const __half *key_more = key_biases, *value_more = value_biases;
#endif
  const int kv_head = blockIdx.y;
  const int* ids = table + decoded[1];
  for (int n = blockIdx.x; n < decoded[0]; n += gridDim.x) {
    const int id = ids[n];
    const size_t place = ((size_t)n * KV_HEADS + kv_head) * BLOCK, row = (size_t)id * KV_HEADS + kv_head;
    if (blockIdx.z == 0) {
      T* to = to_keys + place * K_DIM;
#if BY_CHANNEL
      if (id >= 0) decode_channels<K_DIM, K_GROUP, K_BITS>(keys, key_scales, key_more, row, to);
      else if (id < -1) copy_block(to, BLOCK * K_DIM, tail_keys + ((size_t)(-2 - id) * KV_HEADS + kv_head) * (BLOCK * K_DIM));
#else
      decode_tokens<K_DIM, K_GROUP, K_BITS>(keys, key_scales, key_more, row, nullptr, 1.f, to);
#endif
    }
#if !IN_KEY
    if (blockIdx.z == 1) {
      T* to = to_values + place * V_DIM;
#if BY_CHANNEL
      if (id < -1) copy_block(to, BLOCK * V_DIM, tail_values + ((size_t)(-2 - id) * KV_HEADS + kv_head) * (BLOCK * V_DIM));
      if (id < 0) continue;
#endif
      decode_tokens<V_DIM, V_GROUP, V_BITS>(values, value_scales, value_more, row, value_signs, 1.f, to);
    }
#endif
  }
