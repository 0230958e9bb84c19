// Rows of x as integers, for products by codes of 4 bits. Of 16 columns, x is integers up to 2^14 times a unit, a
// power of two. Each integer is two signed digits of base 256. A record of 64 columns of a row is ten pieces of 16
// bytes: of each digit four, of 16 columns each, by eight of them the even ones and then the odd ones; then, for each
// 16 columns, the unit and the sum.
#define DIGIT_PIECES 10
// An integer n of up to 2^22, added to these bits, is the float 1.5 * 2^23 + n.
#define INTEGER_BITS 0x4B400000
#define INTEGER_BASE 12582912.f
// The exponent's bits of the greatest of 16 columns; those of numbers too small for a unit are raised.
__device__ __forceinline__ int exponent_of(float most) { return max((int)(__float_as_uint(most) >> 23), 14); }
// Digits of a number, the low one in the lowest byte.
__device__ __forceinline__ unsigned digits_of(float x, int exponent) {
  const float inverse = __uint_as_float(267 - exponent << 23);
  const unsigned n = __float_as_uint(fmaf(x, inverse, INTEGER_BASE)) - INTEGER_BITS;
  return n + 0x8080u ^ 0x8080u;  // with 128 in each digit none is negative
}
// The records of a row, of rows of `width` columns.
template <class Records> __device__ __forceinline__ Records* digits_of_row(Records* records, int row, int width) {
  return records + (size_t)row * (width / 64) * DIGIT_PIECES;
}
__device__ __forceinline__ uint4* record_of(uint4* row, int column) { return row + column / 64 * DIGIT_PIECES; }
__device__ __forceinline__ void store_unit(uint4* record, int column, int exponent, float sum) {
  ((float2*)(record + 8))[column / 16 % 4] = make_float2(__uint_as_float(exponent - 13 << 23), sum);
}
// Stores eight neighbours of a row, from a column on; two lanes have 16. All lanes of a warp call it.
__device__ __forceinline__ void store_digits(uint4* row, int column, const __nv_bfloat16* x, bool inside) {
  float numbers[8], most = 0.f, sum = 0.f;
  #pragma unroll
  for (int i = 0; i < 8; i++) {
    numbers[i] = inside ? __bfloat162float(x[i]) : 0.f;
    most = fmaxf(most, fabsf(numbers[i]));
    sum += numbers[i];
  }
  most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  if (!inside) return;
  const int exponent = exponent_of(most);
  unsigned words[2][2];  // of each digit, of even and of odd columns
  #pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    unsigned n[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) n[i] = digits_of(numbers[2 * i + odd], exponent);
    const unsigned first = __byte_perm(n[0], n[1], 0x5140), last = __byte_perm(n[2], n[3], 0x5140);
    words[0][odd] = __byte_perm(first, last, 0x5410);
    words[1][odd] = __byte_perm(first, last, 0x7632);
  }
  uint4* const record = record_of(row, column);
  #pragma unroll
  for (int d = 0; d < 2; d++)
    ((uint2*)(record + d * 4))[column / 8 % 8] = make_uint2(words[d][0], words[d][1]);
  if (column % 16 == 0) store_unit(record, column, exponent, sum);
}
// The same of a row's neighbours in shared memory, from a column on, by all threads of a thread block.
__device__ __forceinline__ void store_all_digits(uint4* row, int column, const __nv_bfloat16* x, int count) {
  for (int n = threadIdx.x * 8; n / 256 * 256 < count; n += blockDim.x * 8)
    store_digits(row, column + n, x + n, n < count);
}
// Stores one number; 16 neighbouring lanes have 16 columns. All lanes of a warp call it.
__device__ __forceinline__ void store_own_digits(uint4* row, int column, float x, bool inside) {
  float most = fabsf(x), sum = x;
  #pragma unroll
  for (int by = 1; by < 16; by *= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, by));
    sum += __shfl_xor_sync(0xffffffffu, sum, by);
  }
  if (!inside) return;
  const int exponent = exponent_of(most), place = column / 8 % 8 * 8 + column % 2 * 4 + column % 8 / 2;
  const unsigned digits = digits_of(x, exponent);
  uint4* const record = record_of(row, column);
  ((unsigned char*)record)[place] = digits;
  ((unsigned char*)(record + 4))[place] = digits >> 8;
  if (column % 16 == 0) store_unit(record, column, exponent, sum);
}
// Stores the sum of the squares of 16 columns, for a norm. All lanes of a warp call it.
__device__ __forceinline__ void store_squares(float* to, int column, float x, bool inside) {
  float square = x * x;
  #pragma unroll
  for (int by = 1; by < 16; by *= 2) square += __shfl_xor_sync(0xffffffffu, square, by);
  if (inside && column % 16 == 0) to[column / 16] = square;
}
