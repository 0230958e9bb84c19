  // Joins what the splits of a row found: partial [T, HEADS, splits, V_DIM], stats [T, HEADS, splits, 2].
  // One thread block for each row and head: of PLACE. `count` splits have written. With TURNED they are sums of
  // values in coordinates of their own, which are turned back; `signs` include the scale. Of those the
  // first R_DIM are the result. With STORES_DIGITS the result is also written as digits, see `digits.cuh`.
#ifndef PLACE
#define PLACE blockIdx.x
#endif
#ifndef STORES_DIGITS
#define STORES_DIGITS 0
#endif
  __shared__ Weights weights;
  const size_t place = PLACE;
  const float sink = SINKS ? (float)sinks[place % HEADS] * 1.4426950408889634f : -1e30f;
  const int d0 = threadIdx.x * ELEMENTS;
  const float* const found = partial + place * splits * V_DIM + d0;
  const FirstElements first = first_elements(found, d0 < V_DIM ? count : 0);
  weigh(&weights, stats + place * splits * 2, count, nullptr, sink);
  __syncthreads();
#if TURNED
  __shared__ float turned_sums[V_DIM];
#elif STORES_DIGITS
  __shared__ __align__(16) T finished[V_DIM];
#endif
  if (d0 < V_DIM) {
    const Elements sum = joined_elements(first, found, &weights);
    #pragma unroll
    for (int e = 0; e < ELEMENTS; e++) {
#if TURNED
      turned_sums[d0 + e] = sum.x[e];
#else
      result[place * V_DIM + d0 + e] = (T)sum.x[e];
#if STORES_DIGITS
      finished[d0 + e] = (T)sum.x[e];
#endif
#endif
    }
  }
#if TURNED
  transform_runs(turned_sums);
  for (int d = threadIdx.x; d < R_DIM; d += blockDim.x) result[place * R_DIM + d] = (T)(across_runs(turned_sums, d) * signs[d]);
#elif STORES_DIGITS
  __syncthreads();
  store_all_digits(digits_of_row(digits, place / HEADS, HEADS * V_DIM), place % HEADS * V_DIM, finished, V_DIM);
#endif
