  // The activation of one array times another, eight elements a thread.
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= gate_shape[0]) return;
  const uint4 left = ((const uint4*)gate)[at], right = ((const uint4*)up)[at];
  uint4 out;
  #pragma unroll
  for (int i = 0; i < 8; i++)
    ((T*)&out)[i] = (T)gated((float)((const T*)&left)[i], (float)((const T*)&right)[i]);
  ((uint4*)y)[at] = out;
