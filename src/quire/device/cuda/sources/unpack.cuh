  // A matrix from its codes of 4 bits, eight numbers a thread.
  const size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= (size_t)w_shape[0] * w_shape[1]) return;
  const size_t group = at / (GROUP / 8);
  const __nv_bfloat162 scale = __bfloat162bfloat162(scales[group]);
  const __nv_bfloat162 bias = __bfloat162bfloat162(biases[group]);
  ((uint4*)y)[at] = numbers(w[at], scale, bias);
