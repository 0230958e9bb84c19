  // Thread blocks [n, 2]: keys, then values, of block n of the result.
  // rows [n]: where its codes lie; or -1 - m: it is block m of what was written.
#if CODEBOOK
  const float *key_more = key_levels, *value_more = value_levels;
#else
  const __half *key_more = key_biases, *value_more = value_biases;
#endif
  const int row = rows[blockIdx.x];
  if (blockIdx.y == 0) {
    T* to = decoded_keys + (size_t)blockIdx.x * (BLOCK * K_DIM);
    if (row < 0) copy_block(written_keys + (size_t)(-1 - row) * (BLOCK * K_DIM), BLOCK * K_DIM, to);
#if BY_CHANNEL
    else decode_channels<K_DIM, K_GROUP, K_BITS>(keys, key_scales, key_more, row, to);
#else
    else decode_tokens<K_DIM, K_GROUP, K_BITS>(keys, key_scales, key_more, row, key_signs, key_rotation_scale, to);
#endif
  } else {
    T* to = decoded_values + (size_t)blockIdx.x * (BLOCK * V_DIM);
    if (row < 0) copy_block(written_values + (size_t)(-1 - row) * (BLOCK * V_DIM), BLOCK * V_DIM, to);
    else decode_tokens<V_DIM, V_GROUP, V_BITS>(values, value_scales, value_more, row, value_signs, value_rotation_scale, to);
  }
