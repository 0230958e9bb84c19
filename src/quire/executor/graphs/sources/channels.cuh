// N neighbouring channels, in float32.
template <int N>
struct Channels {
  float at[N];
};
template <int N, typename E>
__device__ __forceinline__ Channels<N> read_channels(const E* from) {
  const Pack<E, N> found = *(const Pack<E, N>*)from;
  Channels<N> own;
  #pragma unroll
  for (int i = 0; i < N; i++) own.at[i] = number(found.at[i]);
  return own;
}
// A convolution's result: the sum over a channel's last inputs. MLX rounds it, and what is added to it, to its type.
template <int TAPS>
__device__ __forceinline__ float convolved(const float (&inputs)[TAPS], const float (&taps)[TAPS], float offset) {
  float sum = 0.f;
  #pragma unroll
  for (int n = 0; n < TAPS; n++) sum += inputs[n] * taps[n];
  if (BIASED) sum = ROUNDED(sum) + offset;
  sum = ROUNDED(sum);
  return SILU ? silu(sum) : sum;
}
template <int N, typename E>
__device__ __forceinline__ void write_channels(E* to, const Channels<N>& own) {
  Pack<E, N> made;
  #pragma unroll
  for (int i = 0; i < N; i++) put(made.at[i], own.at[i]);
  *(Pack<E, N>*)to = made;
}
