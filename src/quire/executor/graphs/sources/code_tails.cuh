  // Codes the tails that this step's rows have filled. A thread block for each KV head and layer.
  // stores [layers, 8]: addresses of codes, scales and biases of keys, of values, then of tails; or
  // [layers, 4], those of keys and one tail, where values are the starts of keys (V_DIM is 0).
  // Rows that read a workspace come last, and have no tails; see `code_written`.
  constexpr int PARTS = V_DIM ? 6 : 3;
  const long long* store = stores + blockIdx.y * (V_DIM ? 8 : 4);
  const int kv_head = blockIdx.x;
  for (int row = 0; row < *rows && tails[row] >= 0; row++) {
    if (offsets[row] != 63) continue;
    const size_t head = (size_t)blocks[row] * KV_HEADS + kv_head;
    const size_t tail = ((size_t)tails[row] * KV_HEADS + kv_head) * 64;
    code_keys((const T*)store[PARTS] + tail * K_DIM, head, (unsigned*)store[0], (__half*)store[1], (__half*)store[2]);
#if V_DIM
    code_values((const T*)store[7] + tail * V_DIM, head, signs, (unsigned*)store[3], (__half*)store[4], (__half*)store[5]);
#endif
  }
