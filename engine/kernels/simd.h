// Vectors of fp32, and products of the element types that weights and KV are stored in.
//
// Everything rounds exactly where it says: products and sums are contracted by nobody (-ffp-contract=off),
// fma() is one rounding. So a lane's result depends on its own operands only, not on where it stands.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace headwater {

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int kLanes = 16;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// The larger of both; where one is NaN, b.
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec nearest(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a); }
inline float maximum(Vec a) { return _mm512_reduce_max_ps(a); }
// Lanes from `count` on become `fill`.
inline Vec keep_first(Vec a, int count, Vec fill) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>((1u << count) - 1), fill, a);
}
// p * 2^n for whole n; below the range of fp32 it is 0.
inline Vec scale_by_power(Vec p, Vec n) { return _mm512_scalef_ps(p, n); }

#elif defined(__AVX2__) && defined(__FMA__)

using Vec = __m256;
constexpr int kLanes = 8;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec all(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// The larger of both; where one is NaN, b.
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec smaller(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec nearest(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline float sum(Vec a) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float maximum(Vec a) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
// Lanes from `count` on become `fill`.
inline Vec keep_first(Vec a, int count, Vec fill) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i kept = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane);
  return _mm256_blendv_ps(fill, a, _mm256_castsi256_ps(kept));
}
// p * 2^n for whole n; below the range of normal fp32 it is 0, above it infinite.
inline Vec scale_by_power(Vec p, Vec n) {
  n = smaller(all(128.0f), n);
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  const __m256 kept = _mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm256_and_ps(kept, _mm256_mul_ps(p, _mm256_castsi256_ps(exponent)));
}

#else
#error "this kernel needs AVX2 with FMA, or AVX-512"
#endif

// 2^x for finite x: 2^n for the nearest whole n, times a polynomial in the rest, with the least relative error
// on [-1/2, 1/2] of all that are 1 at 0: 1e-4 with degree 3 (bf16 keeps 4e-3), 2e-9 with degree 6. So exp2(0)
// is 1 exactly; what is too small for fp32 is 0. A NaN or an infinity gives a NaN.
template <int Degree>
inline Vec exp2(Vec x) {
  static_assert(Degree == 3 || Degree == 6);
  constexpr float kThree[] = {1.0f, 0.69328290f, 0.24221098f, 0.055008922f};
  constexpr float kSix[] = {1.0f,          0.69314718f,   0.24022648f,   0.055503324f,
                            0.0096184369f, 0.0013398875f, 0.00015353362f};
  const float* terms = Degree == 3 ? kThree : kSix;
  const Vec whole = nearest(x);
  const Vec rest = sub(x, whole);
  Vec series = all(terms[Degree]);
#pragma GCC unroll 8
  for (int i = Degree - 1; i >= 0; --i) series = fma(series, rest, all(terms[i]));
  return scale_by_power(series, whole);
}

// x / (1 + e^-x)
inline Vec silu(Vec x) { return div(x, add(all(1.0f), exp2<6>(mul(x, all(-1.44269504f))))); }

// An element type T: how many of them along the reduced dimension make one step of a dot product (they lie
// side by side in memory), one such step, and conversion of whole vectors.
template <class T>
struct Element;

template <>
struct Element<float> {
  static constexpr int kPair = 1;
  static constexpr int kExpDegree = 6;
  using Packed = Vec;
  static Packed packed(const float* p) { return load(p); }
  static Packed broadcast(const float* p) { return all(*p); }
  static Vec dot(Vec sum, Packed a, Packed b) { return fma(a, b, sum); }
  static Vec widen(const float* p) { return load(p); }
  static void narrow(float* p, Vec v) { store(p, v); }
};

#if defined(__AVX512BF16__)

struct bf16 {
  uint16_t bits;
};

template <>
struct Element<bf16> {
  static constexpr int kPair = 2;
  static constexpr int kExpDegree = 3;
  using Packed = __m512bh;
  static Packed packed(const bf16* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
  static Packed broadcast(const bf16* p) {
    int32_t two;
    std::memcpy(&two, p, sizeof two);
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(two));
  }
  static Vec dot(Vec sum, Packed a, Packed b) { return _mm512_dpbf16_ps(sum, a, b); }
  static Vec widen(const bf16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static void narrow(bf16* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
  }
};

#endif

}  // namespace headwater
