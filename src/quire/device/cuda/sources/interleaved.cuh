// Interleaved rows of x, for products by codes of 4 bits: of 64 columns, each 16 neighbours are the same word of eight
// pieces of 16 bytes, a word being two columns four apart. So a lane that unpacks two neighbouring words of codes has
// columns of all four slices that wgmma multiplies.
// Pairs (j, j + 4) of eight numbers.
__device__ __forceinline__ uint4 apart(uint4 eight) {
  return make_uint4(__byte_perm(eight.x, eight.z, 0x5410), __byte_perm(eight.x, eight.z, 0x7632),
                    __byte_perm(eight.y, eight.w, 0x5410), __byte_perm(eight.y, eight.w, 0x7632));
}
// The place of columns (j, j + 4) of eight neighbours, from `column` on.
__device__ __forceinline__ unsigned* pair_of_columns(__nv_bfloat16* row, int column, int j) {
  return (unsigned*)(row + column / 64 * 64) + (column / 8 % 2 * 4 + j) * 4 + column / 16 % 4;
}
// Stores eight neighbours of a row, from a column on.
__device__ __forceinline__ void store_interleaved(__nv_bfloat16* row, int column, const __nv_bfloat16* x) {
  const uint4 eight = apart(*(const uint4*)x);
  const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
  #pragma unroll
  for (int j = 0; j < 4; j++) *pair_of_columns(row, column, j) = pairs[j];
}
