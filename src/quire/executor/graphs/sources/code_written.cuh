  // Codes the blocks that this step's prompts fill in the workspace, behind what a sequence's tail holds of its first.
  // Behind the last token stand zeros: attention may read them, with weights of 0, so they must be numbers.
  // decoded [4]: blocks of the workspace, -, blocks that prompts write, -
  // written [n, 5]: place in the workspace, id of the block that gets the codes or -1, tail, tokens from it, tokens
  wait_for_others();
  const int kv_head = blockIdx.y;
  for (int n = blockIdx.x; n < decoded[2]; n += gridDim.x) {
    const int* own = written + n * 5;
    const size_t place = ((size_t)own[0] * KV_HEADS + kv_head) * 64, tail = ((size_t)own[2] * KV_HEADS + kv_head) * 64;
    copy_block(tail_keys + tail * K_DIM, own[3] * K_DIM, keys + place * K_DIM);
    clear(keys + (place + own[4]) * K_DIM, (64 - own[4]) * K_DIM);
#if V_DIM
    copy_block(tail_values + tail * V_DIM, own[3] * V_DIM, values + place * V_DIM);
    clear(values + (place + own[4]) * V_DIM, (64 - own[4]) * V_DIM);
#endif
    if (own[1] < 0) continue;
    __syncthreads();
    const size_t head = (size_t)own[1] * KV_HEADS + kv_head;
    code_keys(keys + place * K_DIM, head, key_codes, key_scales, key_biases);
#if V_DIM
    code_values(values + place * V_DIM, head, signs, value_codes, value_scales, value_biases);
#endif
  }
