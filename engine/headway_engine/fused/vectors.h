// Vectors of W floats through the compiler's vector extension, one width per instruction set.
//
// On 64-bit Arm the compiler makes NEON of it: products and sums become fmla, comparisons that choose become bsl,
// bfloat16 is widened by ushll. Intrinsics stand only where it finds no single instruction by itself.
// Also half precision and bfloat16, e^x and sums across one vector and across W of them. Knows nothing of matrices
// and models.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define HEADWAY_AMX 1  // there are matrix tiles
#endif
#if defined(__AVX512BF16__)
#define HEADWAY_BF16 1  // there are products of bfloat16
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;  // vectors that a core names
#else
constexpr int REGISTERS = 16;
#endif

constexpr int LINE = 64;  // bytes of a cache line

typedef float vf __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef uint16_t bf16;
struct f16 {  // half precision, finite
  uint16_t bits;
};

static inline vf load(const float* p) { return *(const vf*)p; }
static inline vf load(const bf16* p) { return (vf)(__builtin_convertvector(*(const vh*)p, vu) << 16); }
static inline vf load(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16((float16x4_t)*(const vh*)p);
#else
  vu u = __builtin_convertvector(*(const vh*)p, vu);
  vf size = (vf)((u & 0x7fff) << 13) * 0x1p112f;  // the exponent's bias, right for small values too
  return (vf)((vu)size | (u & 0x8000) << 16);
#endif
}
static inline void store(float* p, vf v) { *(vf*)p = v; }
// To nearest, ties to even; NaN stays NaN.
static inline void store(bf16* p, vf v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  vu u = (vu)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  *(vh*)p = __builtin_convertvector(v == v ? rounded : (u >> 16) | 0x40, vh);
#endif
}
static inline vf all(float x) { return x - vf{}; }  // not plus: -0 + 0 is +0, so that could not be folded

// Memory that is needed soon, asked for bit by bit while something else is computed: a core has few requests open at
// a time, so that whoever asks for much at once waits, and computes nothing meanwhile.
class Soon {
 public:
  Soon() : at_(nullptr), end_(nullptr), step_(0) {}
  Soon(const void* from, int64_t bytes, int64_t turns)
      : at_((const char*)from), end_(at_ + bytes), step_((bytes + LINE * turns - 1) / (LINE * turns) * LINE) {}

  // One turn of so many: ask for a part, as far as the second-level cache.
  void some() {
    if (at_ < end_) {
      const char* to = at_ + step_;
      for (; at_ < to; at_ += LINE) __builtin_prefetch(at_, 0, 2);
    }
  }

 private:
  const char *at_, *end_;
  int64_t step_;
};

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline float widen(f16 x) {
  uint32_t u = (uint32_t)(x.bits & 0x7fff) << 13;
  float f;
  memcpy(&f, &u, 4);
  return x.bits & 0x8000 ? -(f * 0x1p112f) : f * 0x1p112f;
}
static inline void narrow(float x, float* to) { *to = x; }
static inline void narrow(float x, bf16* to) {  // to nearest, ties to even; NaN stays NaN
  uint32_t u;
  memcpy(&u, &x, 4);
  *to = x != x ? 0x7fc0 : (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// n numbers, in the type of `to`.
template <class F, class T>
static inline void put_row(const F* from, int64_t n, T* to) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  for (; i < n; i++) narrow(widen(from[i]), to + i);
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
#elif defined(__aarch64__)
  return vaddvq_f32((float32x4_t)v);
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// Lane i of the result is lane i ^ H.
template <int H>
static inline vf swapped(vf v) {
#if defined(__AVX512F__)
  if constexpr (H == 8) return (vf)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e);
  if constexpr (H == 4) return (vf)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1);
  if constexpr (H == 2) return (vf)_mm512_permute_ps((__m512)v, 0x4e);
  if constexpr (H == 1) return (vf)_mm512_permute_ps((__m512)v, 0xb1);
#elif defined(__AVX2__)
  if constexpr (H == 4) return (vf)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1);
  if constexpr (H == 2) return (vf)_mm256_permute_ps((__m256)v, 0x4e);
  if constexpr (H == 1) return (vf)_mm256_permute_ps((__m256)v, 0xb1);
#elif defined(__aarch64__)
  if constexpr (H == 2) return (vf)vextq_f32((float32x4_t)v, (float32x4_t)v, 2);
  if constexpr (H == 1) return (vf)vrev64q_f32((float32x4_t)v);
#endif
  vf to;
  for (int i = 0; i < W; i++) to[i] = v[i ^ H];
  return to;
}

// Lane i of the result is the sum across of(first + i), for N vectors: pairs share their lanes, then pairs of pairs.
template <int N, class Of>
static inline vf sums_across(const Of& of, int first = 0) {
  if constexpr (N == 1) return of(first);
  else {
    constexpr int H = N / 2;
    vf a = sums_across<H>(of, first), b = sums_across<H>(of, first + H);
    vi second;
    for (int i = 0; i < W; i++) second[i] = i & H ? -1 : 0;
    return (second ? b : a) + swapped<H>(second ? a : b);
  }
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
