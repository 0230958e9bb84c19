// AVX-512, VNNI and AMX on a processor that has AVX2: what the kernels use of them, by loops over lanes, as Intel's
// manual defines them. Included before a kernel's source. Names in namespace quire hide the compiler's; what is
// missing here does not compile. Addresses that must be aligned and tiles that must fit are checked.
#pragma once

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace quire {

inline void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "an instruction's rule is broken: %s\n", what);
    std::abort();
}

// Vectors as arrays of lanes.
template <class Lane, class Vector> struct Lanes {
    static constexpr int count = sizeof(Vector) / sizeof(Lane);
    Lane of[count];
    Lanes() : of{} {}
    Lanes(Vector x) { std::memcpy(of, &x, sizeof x); }
    operator Vector() const {
        Vector x;
        std::memcpy(&x, of, sizeof x);
        return x;
    }
};
using F32 = Lanes<float, __m512>;
using I32 = Lanes<int32_t, __m512i>;
using U32 = Lanes<uint32_t, __m512i>;
using U64 = Lanes<uint64_t, __m512i>;
using I16 = Lanes<int16_t, __m512i>;
using U16 = Lanes<uint16_t, __m512i>;
using I8 = Lanes<int8_t, __m512i>;
using U8 = Lanes<uint8_t, __m512i>;

template <class To, class Use> To each_lane(const Use& use) {
    To to;
    for (int i = 0; i < To::count; i++) to.of[i] = use(i);
    return to;
}
template <class To> To loaded(const void* p) {
    To to;
    std::memcpy(to.of, p, sizeof to.of);
    return to;
}
template <class To> To loaded_by(unsigned mask, const void* p) {  // other lanes are not read
    return each_lane<To>([&](int i) {
        decltype(To().of[0] + 0) lane = 0;
        if (mask >> i & 1) std::memcpy(&lane, (const char*)p + i * sizeof(To().of[0]), sizeof(To().of[0]));
        return lane;
    });
}
template <class From> void stored_by(unsigned mask, void* p, const From& x) {
    for (int i = 0; i < From::count; i++)
        if (mask >> i & 1) std::memcpy((char*)p + i * sizeof x.of[0], &x.of[i], sizeof x.of[0]);
}

// -- floats -----------------------------------------------------------------------------------------

inline __m512 _mm512_setzero_ps() { return F32(); }
inline __m512 _mm512_set1_ps(float x) { return each_lane<F32>([=](int) { return x; }); }
inline __m512 _mm512_loadu_ps(const void* p) { return loaded<F32>(p); }
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* p) { return loaded_by<F32>(mask, p); }
inline void _mm512_storeu_ps(void* p, __m512 x) { std::memcpy(p, &x, sizeof x); }
inline void _mm512_mask_storeu_ps(void* p, __mmask16 mask, __m512 x) { stored_by(mask, p, F32(x)); }
inline __m512 _mm512_add_ps(F32 a, F32 b) { return each_lane<F32>([&](int i) { return a.of[i] + b.of[i]; }); }
inline __m512 _mm512_sub_ps(F32 a, F32 b) { return each_lane<F32>([&](int i) { return a.of[i] - b.of[i]; }); }
inline __m512 _mm512_mul_ps(F32 a, F32 b) { return each_lane<F32>([&](int i) { return a.of[i] * b.of[i]; }); }
inline __m512 _mm512_div_ps(F32 a, F32 b) { return each_lane<F32>([&](int i) { return a.of[i] / b.of[i]; }); }
inline __m512 _mm512_max_ps(F32 a, F32 b) {
    return each_lane<F32>([&](int i) { return a.of[i] > b.of[i] ? a.of[i] : b.of[i]; });
}
inline __m512 _mm512_min_ps(F32 a, F32 b) {
    return each_lane<F32>([&](int i) { return a.of[i] < b.of[i] ? a.of[i] : b.of[i]; });
}
inline __m512 _mm512_fmadd_ps(F32 a, F32 b, F32 c) {
    return each_lane<F32>([&](int i) { return std::fma(a.of[i], b.of[i], c.of[i]); });
}
inline __m512 _mm512_roundscale_ps(F32 x, int how) {
    require(how == (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), "only rounding to the nearest is emulated");
    return each_lane<F32>([&](int i) { return std::nearbyint(x.of[i]); });
}
inline float _mm512_reduce_max_ps(F32 x) { return *std::max_element(x.of, x.of + 16); }
inline __m512 _mm512_cvtph_ps(__m256i x) {
    __m256 halves[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
    return loaded<F32>(halves);
}
inline __m512 _mm512_cvtepi32_ps(I32 x) { return each_lane<F32>([&](int i) { return (float)x.of[i]; }); }
inline __m512i _mm512_cvtps_epi32(F32 x) {
    return each_lane<I32>([&](int i) { return _mm_cvtss_si32(_mm_set_ss(x.of[i])); });
}
inline __m512 _mm512_permutexvar_ps(U32 places, F32 x) {
    return each_lane<F32>([&](int i) { return x.of[places.of[i] & 15]; });
}
inline __m512 _mm512_shuffle_ps(F32 a, F32 b, int which) {  // within 128 bits
    return each_lane<F32>([&](int i) { return (i % 4 < 2 ? a : b).of[i / 4 * 4 + (which >> i % 4 * 2 & 3)]; });
}
inline __m512 _mm512_shuffle_f32x4(F32 a, F32 b, int which) {
    return each_lane<F32>([&](int i) { return (i < 8 ? a : b).of[(which >> i / 4 * 2 & 3) * 4 + i % 4]; });
}
inline __m256 _mm512_castps512_ps256(F32 x) { return _mm256_loadu_ps(x.of); }
inline __m128 _mm512_castps512_ps128(F32 x) { return _mm_loadu_ps(x.of); }
inline __m256 _mm512_extractf32x8_ps(F32 x, int half) { return _mm256_loadu_ps(x.of + 8 * half); }
inline __m512 _mm512_castsi512_ps(__m512i x) { return (__m512)x; }
inline __m512i _mm512_castps_si512(__m512 x) { return (__m512i)x; }

// -- integers ---------------------------------------------------------------------------------------

#undef _mm512_setr_epi32
inline __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k, int l,
                                 int m, int n, int o, int p) {
    const int32_t all[] = {a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
    return loaded<I32>(all);
}
inline __m512i _mm512_set1_epi8(char x) { return each_lane<I8>([=](int) { return (int8_t)x; }); }
inline __m512i _mm512_set1_epi32(int x) { return each_lane<I32>([=](int) { return x; }); }
inline __m512i _mm512_set1_epi64(long long x) { return each_lane<U64>([=](int) { return (uint64_t)x; }); }
inline __m512i _mm512_broadcast_i32x4(__m128i x) {
    int32_t four[4];
    std::memcpy(four, &x, 16);
    return each_lane<I32>([&](int i) { return four[i % 4]; });
}
inline __m512i _mm512_loadu_si512(const void* p) { return loaded<I32>(p); }
inline __m512i _mm512_load_si512(const void* p) {
    require((uintptr_t)p % 64 == 0, "an aligned load is aligned");
    return loaded<I32>(p);
}
inline __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* p) { return loaded_by<I32>(mask, p); }
inline __m128i _mm_maskz_loadu_epi8(__mmask16 mask, const void* p) {
    uint8_t bytes[16] = {0};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) bytes[i] = ((const uint8_t*)p)[i];
    return _mm_loadu_si128((const __m128i*)bytes);
}
inline void _mm512_storeu_si512(void* p, __m512i x) { std::memcpy(p, &x, sizeof x); }
inline void _mm512_mask_storeu_epi32(void* p, __mmask16 mask, __m512i x) { stored_by(mask, p, I32(x)); }
inline __m512i _mm512_i32gather_epi32(I32 places, const void* p, int scale) {
    return each_lane<I32>([&](int i) {
        int32_t word;
        std::memcpy(&word, (const char*)p + (int64_t)places.of[i] * scale, 4);
        return word;
    });
}
inline __m512i _mm512_and_si512(U64 a, U64 b) { return each_lane<U64>([&](int i) { return a.of[i] & b.of[i]; }); }
inline __m512i _mm512_or_si512(U64 a, U64 b) { return each_lane<U64>([&](int i) { return a.of[i] | b.of[i]; }); }
inline __m512i _mm512_xor_si512(U64 a, U64 b) { return each_lane<U64>([&](int i) { return a.of[i] ^ b.of[i]; }); }
inline __m512i _mm512_add_epi32(U32 a, U32 b) { return each_lane<U32>([&](int i) { return a.of[i] + b.of[i]; }); }
inline __m512i _mm512_mullo_epi32(U32 a, U32 b) { return each_lane<U32>([&](int i) { return a.of[i] * b.of[i]; }); }
inline __m512i _mm512_max_epi32(I32 a, I32 b) {
    return each_lane<I32>([&](int i) { return std::max(a.of[i], b.of[i]); });
}
inline __m512i _mm512_slli_epi32(U32 x, unsigned n) {
    return each_lane<U32>([&](int i) { return n < 32 ? x.of[i] << n : 0; });
}
inline __m512i _mm512_srli_epi32(U32 x, unsigned n) {
    return each_lane<U32>([&](int i) { return n < 32 ? x.of[i] >> n : 0; });
}
inline __m512i _mm512_srlv_epi32(U32 x, U32 n) {
    return each_lane<U32>([&](int i) { return n.of[i] < 32 ? x.of[i] >> n.of[i] : 0; });
}
inline __m512i _mm512_srli_epi16(U16 x, unsigned n) {
    return each_lane<U16>([&](int i) { return (uint16_t)(n < 16 ? x.of[i] >> n : 0); });
}
inline int _mm512_reduce_add_epi32(U32 x) {
    uint32_t sum = 0;
    for (uint32_t lane : x.of) sum += lane;
    return (int)sum;
}
inline int _mm512_reduce_max_epi32(I32 x) { return *std::max_element(x.of, x.of + 16); }
inline __m512i _mm512_cvtepu8_epi32(__m128i x) {
    uint8_t bytes[16];
    std::memcpy(bytes, &x, 16);
    return each_lane<I32>([&](int i) { return (int32_t)bytes[i]; });
}
inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
    uint16_t words[16];
    std::memcpy(words, &x, 32);
    return each_lane<I32>([&](int i) { return (int32_t)words[i]; });
}
inline __m128i _mm512_cvtepi32_epi8(U32 x) {
    return each_lane<Lanes<uint8_t, __m128i>>([&](int i) { return (uint8_t)x.of[i]; });
}
inline __m256i _mm512_cvtepi32_epi16(U32 x) {
    return each_lane<Lanes<uint16_t, __m256i>>([&](int i) { return (uint16_t)x.of[i]; });
}
inline __m512i _mm512_permutexvar_epi8(U8 places, U8 x) {
    return each_lane<U8>([&](int i) { return x.of[places.of[i] & 63]; });
}
inline __m512i _mm512_permutexvar_epi32(U32 places, U32 x) {
    return each_lane<U32>([&](int i) { return x.of[places.of[i] & 15]; });
}
inline __m512i _mm512_permutex2var_epi32(U32 a, U32 places, U32 b) {
    return each_lane<U32>([&](int i) { return (places.of[i] & 16 ? b : a).of[places.of[i] & 15]; });
}
inline __m512i _mm512_shuffle_epi8(U8 x, U8 places) {  // within 128 bits
    return each_lane<U8>([&](int i) {
        return (uint8_t)(places.of[i] & 128 ? 0 : x.of[i / 16 * 16 + (places.of[i] & 15)]);
    });
}
inline __m512i _mm512_multishift_epi64_epi8(U8 shifts, U64 x) {
    return each_lane<U8>([&](int i) {
        const int n = shifts.of[i] & 63;
        const uint64_t eight = x.of[i / 8];
        return (uint8_t)(n ? eight >> n | eight << (64 - n) : eight);
    });
}
inline __m512i _mm512_shuffle_i32x4(U32 a, U32 b, int which) {
    return each_lane<U32>([&](int i) { return (i < 8 ? a : b).of[(which >> i / 4 * 2 & 3) * 4 + i % 4]; });
}
inline __m512i _mm512_unpacklo_epi32(U32 a, U32 b) {
    return each_lane<U32>([&](int i) { return (i % 2 ? b : a).of[i / 4 * 4 + i % 4 / 2]; });
}
inline __m512i _mm512_unpackhi_epi32(U32 a, U32 b) {
    return each_lane<U32>([&](int i) { return (i % 2 ? b : a).of[i / 4 * 4 + 2 + i % 4 / 2]; });
}
inline __m512i _mm512_unpacklo_epi64(U64 a, U64 b) {
    return each_lane<U64>([&](int i) { return (i % 2 ? b : a).of[i / 2 * 2]; });
}
inline __m512i _mm512_unpackhi_epi64(U64 a, U64 b) {
    return each_lane<U64>([&](int i) { return (i % 2 ? b : a).of[i / 2 * 2 + 1]; });
}
inline __m512i _mm512_madd_epi16(I16 a, I16 b) {
    return each_lane<U32>([&](int i) {
        return (uint32_t)(a.of[2 * i] * b.of[2 * i]) + (uint32_t)(a.of[2 * i + 1] * b.of[2 * i + 1]);
    });
}
inline __m512i _mm512_add_epi16(U16 a, U16 b) {
    return each_lane<U16>([&](int i) { return (uint16_t)(a.of[i] + b.of[i]); });
}
inline __m512i _mm512_maddubs_epi16(U8 a, I8 b) {  // saturates
    return each_lane<I16>([&](int i) {
        return (int16_t)std::clamp(a.of[2 * i] * b.of[2 * i] + a.of[2 * i + 1] * b.of[2 * i + 1], -32768, 32767);
    });
}

// Four products of an unsigned and a signed byte are added to each lane.
template <class Vector> Vector added_products(Vector sums, Vector codes, Vector digits) {
    const Lanes<uint32_t, Vector> before(sums);
    const Lanes<uint8_t, Vector> a(codes);
    const Lanes<int8_t, Vector> b(digits);
    return each_lane<Lanes<uint32_t, Vector>>([&](int i) {
        int sum = 0;
        for (int j = 4 * i; j < 4 * i + 4; j++) sum += a.of[j] * b.of[j];
        return before.of[i] + (uint32_t)sum;
    });
}
inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i codes, __m512i digits) {
    return added_products(sums, codes, digits);
}
inline __m256i _mm256_dpbusd_avx_epi32(__m256i sums, __m256i codes, __m256i digits) {
    return added_products(sums, codes, digits);
}

}  // namespace quire

#define __builtin_cpu_supports(feature) 1
#define __get_cpuid_count(leaf, subleaf, a, b, c, d) (*(a) = *(b) = *(c) = *(d) = ~0u, 1)
#define syscall(...) 0
#define asm(...)  // that hold values in registers, which there are not
