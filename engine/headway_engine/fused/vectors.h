// Vectors of W floats through the compiler's vector extension, one width per instruction set.
//
// Also bfloat16, e^x and sums across a vector. Knows nothing of matrices and models.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

constexpr int LINE = 64;  // bytes of a cache line

typedef float vf __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef uint16_t bf16;

static inline vf load(const float* p) { return *(const vf*)p; }
static inline vf load(const bf16* p) { return (vf)(__builtin_convertvector(*(const vh*)p, vu) << 16); }
static inline void store(float* p, vf v) { *(vf*)p = v; }
static inline vf all(float x) { return x - vf{}; }  // not plus: -0 + 0 is +0, so that could not be folded

// Ask for memory that is needed soon, as far as the second-level cache.
static inline void fetch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch((const char*)from + at, 0, 2);
}

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline void narrow(float x, float* to) { *to = x; }
static inline void narrow(float x, bf16* to) {  // to nearest, ties to even; NaN stays NaN
  uint32_t u;
  memcpy(&u, &x, 4);
  *to = x != x ? 0x7fc0 : (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// e^x to about one unit in the last place: Cephes' polynomial after splitting off the power of two.
static inline vf exp_(vf x) {
  vf low = all(-87.3f), high = all(88.3f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  vf scaled = x * 1.44269504088896341f;
  vi n = __builtin_convertvector(scaled + (scaled < 0 ? all(-0.5f) : all(0.5f)), vi);
  vf nf = __builtin_convertvector(n, vf);
  vf r = x - nf * 0.693359375f + nf * 2.12194440e-4f;
  vf p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (vf)((n + 127) << 23);
}

static inline float sum_of(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 x = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

static inline float dot(const float* a, const float* b, int n) {
  vf s0 = vf{}, s1 = vf{};
  int i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    s0 += load(a + i) * load(b + i);
    s1 += load(a + i + W) * load(b + i + W);
  }
  for (; i + W <= n; i += W) s0 += load(a + i) * load(b + i);
  float s = sum_of(s0 + s1);
  for (; i < n; i++) s += a[i] * b[i];
  return s;
}
