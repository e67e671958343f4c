// Products with quantized weights: codes of 4 or 8 bits in groups that share a scale and an offset.
//
// A weight is code * scale + offset; without offsets of their own, offset = -8 * scale (4 bits) or -128 * scale (8).
// A panel of NR columns is a row of groups; a group is f16 scale[NR], f16 offset[NR] where there are any, and codes of
// each half panel: vectors of W dwords, one dword a column, that hold 8 (or 4) codes which follow one another along k.
// Codes are widened to the activations' type, panel by panel; or, where few rows wait for memory anyway, rows become
// integers of 15 bits, in two bytes each, and are multiplied as such. Knows nothing of file formats and layers.
#pragma once

#include "product.h"
#include "product_bf16.h"

#if HEADWAY_BF16 || (defined(__aarch64__) && !defined(__ARM_FEATURE_DOTPROD))
constexpr int FEW_ROWS = 4;  // that are multiplied as integers, where the step allows it
#else
constexpr int FEW_ROWS = 8;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int DOT_ROWS = 4;  // rows whose sums are in registers at a time
#else
constexpr int DOT_ROWS = 1;
#endif

template <int BITS, bool OFFSET>
struct Groups {
  static constexpr int CODES = 32 / BITS;  // in a dword
  static constexpr uint32_t MASK = (1u << BITS) - 1;
  static constexpr float ZERO = BITS == 4 ? 8.0f : 128.0f;
  static constexpr int64_t HEAD_BYTES = (OFFSET ? 2 : 1) * NR * 2;
  // Where in a dword the code of row i is: even bytes first, so that a mask alone leaves four codes in four bytes.
  static constexpr int shift(int i) { return BITS == 8 ? 8 * i : 8 * (i % 4) + 4 * (i / 4); }
  static int64_t bytes(int size) { return HEAD_BYTES + (int64_t)NR * size * BITS / 8; }
  static int64_t half_bytes(int size) { return (int64_t)W * size * BITS / 8; }
  static vf scale(const uint8_t* group, int half) { return load((const f16*)group + half * W); }
  static vf offset(const uint8_t* group, int half) {
    return OFFSET ? load((const f16*)group + NR + half * W) : scale(group, half) * -ZERO;
  }
};

// One panel's weights, [k][NR] float32.
template <class G>
static void widen_panel(const uint8_t* panel, int k, int size, float* to) {
  for (int first = 0; first < k; first += size, panel += G::bytes(size))
    for (int half = 0; half < 2; half++) {
      const vf scale = G::scale(panel, half), offset = G::offset(panel, half);
      const uint8_t* codes = panel + G::HEAD_BYTES + half * G::half_bytes(size);
      for (int i = 0; i < size; i += G::CODES, codes += 4 * W) {
        const vu x = *(const vu*)codes;
#pragma GCC unroll 8
        for (int j = 0; j < G::CODES; j++) {
          const vi code = (vi)((x >> G::shift(j)) & G::MASK);
          store(to + (int64_t)(first + i + j) * NR + half * W, __builtin_convertvector(code, vf) * scale + offset);
        }
      }
    }
}

// One weight.
template <class G>
static float weight_at(const uint8_t* panel, int size, int k, int column) {
  const uint8_t* group = panel + k / size * G::bytes(size);
  const int half = column / W, i = k % size;
  const f16* head = (const f16*)group;
  uint32_t x;
  memcpy(&x, group + G::HEAD_BYTES + half * G::half_bytes(size) + (i / G::CODES * W + column % W) * 4, 4);
  const float scale = widen(head[column]);
  const float offset = G::HEAD_BYTES > NR * 2 ? widen(head[NR + column]) : -G::ZERO * scale;
  return (float)((x >> G::shift(i % G::CODES)) & G::MASK) * scale + offset;
}

#if HEADWAY_BF16
// One panel's weights in pairs, as product_bf16 reads them.
template <class G>
static void widen_panel(const uint8_t* panel, int k, int size, bf16* to) {
  for (int first = 0; first < k; first += size, panel += G::bytes(size))
    for (int half = 0; half < 2; half++) {
      const vf scale = G::scale(panel, half), offset = G::offset(panel, half);
      const uint8_t* codes = panel + G::HEAD_BYTES + half * G::half_bytes(size);
      for (int i = 0; i < size; i += G::CODES, codes += 4 * W) {
        const vu x = *(const vu*)codes;
        auto wide = [&](int j) {
          return __builtin_convertvector((vi)((x >> G::shift(j)) & G::MASK), vf) * scale + offset;
        };
#pragma GCC unroll 4
        for (int j = 0; j < G::CODES; j += 2) {
          const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)wide(j + 1), (__m512)wide(j));
          _mm512_storeu_si512(to + (int64_t)(first + i + j) * NR + half * 2 * W, interleaved(both));
        }
      }
    }
  const int64_t rest = (int64_t)k * NR;
  std::fill(to + rest, to + panel_elements(k), bf16(0));
}
#endif

// Rows as integers of 15 bits, high * 128 + low, each group with a scale of its own.
struct IntegerRows {
  static constexpr int MOST = 127 * 128;
  std::vector<int8_t> high, low;      // [rows][k]
  std::vector<float> scales, totals;  // [rows][groups]; totals: scale times the sum of the group's integers

  void make_room(int64_t k, int64_t least_size) {
    for (auto* codes : {&high, &low})
      if ((int64_t)codes->size() < FEW_ROWS * k) codes->resize(FEW_ROWS * k);
    for (auto* numbers : {&scales, &totals})
      if ((int64_t)numbers->size() < FEW_ROWS * (k / least_size + 1)) numbers->resize(FEW_ROWS * (k / least_size + 1));
  }
  void set(const Tiles<float>& a, int row, int size) {
    const int k = a.columns, groups = k / size;
    typedef int8_t vc __attribute__((vector_size(W), aligned(1), may_alias));
    for (int g = 0; g < groups; g++) {
      vf highest = vf{}, nothing = vf{};  // nothing: 0, or NaN where a number is not finite
      for (int i = g * size; i < (g + 1) * size; i += W) {
        const vf x = load(a.place(row, i)), magnitude = x < 0 ? -x : x;
        highest = magnitude > highest ? magnitude : highest;
        nothing += x * 0.0f;
      }
      float most = 0.0f;
      for (int lane = 0; lane < W; lane++) most = std::max(most, highest[lane]);
      const float wrong = sum_of(nothing);
      if (wrong != 0.0f) {  // NaN: no integer says that, but the group's scale can, and whoever samples must see it
        std::fill_n(&high[(int64_t)row * k + g * size], size, 0);
        std::fill_n(&low[(int64_t)row * k + g * size], size, 0);
        scales[(int64_t)row * groups + g] = totals[(int64_t)row * groups + g] = wrong;
        continue;
      }
      const float scale = most / MOST, inverse = most > 0.0f ? MOST / most : 0.0f;
      vi total = vi{};
      for (int i = g * size; i < (g + 1) * size; i += W) {
        const vf x = load(a.place(row, i)) * inverse;
        const vi code = __builtin_convertvector(x + (x < 0 ? all(-0.5f) : all(0.5f)), vi), top = (code + 64) >> 7;
        *(vc*)&high[(int64_t)row * k + i] = __builtin_convertvector(top, vc);
        *(vc*)&low[(int64_t)row * k + i] = __builtin_convertvector(code - (top << 7), vc);
        total += code;
      }
      int sum = 0;
      for (int lane = 0; lane < W; lane++) sum += total[lane];
      scales[(int64_t)row * groups + g] = scale;
      totals[(int64_t)row * groups + g] = scale * (float)sum;
    }
  }
};

// sum[i] += the dot product of four unsigned codes of `a` and four signed ones of `b`, for each dword i. Of 4 bits, or
// of 8 where the CPU has that as one instruction: halves of a sum would not fit otherwise. Arm multiplies signed codes
// with signed ones: there those of 8 bits come less SIGNED_ZERO, as their top bit inverted makes them, and sums of two
// products (127 * 128 each at most) fit 16 bits.
#if defined(__aarch64__)
constexpr int SIGNED_ZERO = 128;
#else
constexpr int SIGNED_ZERO = 0;
#endif
#if defined(__AVX512VNNI__)
constexpr bool HAS_DOT_4 = true, HAS_DOT_8 = true;
static inline vi dot_four_codes(vi sum, vu a, int32_t b) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, _mm512_set1_epi32(b));
}
#elif defined(__AVX512BW__)
constexpr bool HAS_DOT_4 = true, HAS_DOT_8 = false;
static inline vi dot_four_codes(vi sum, vu a, int32_t b) {
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)a, _mm512_set1_epi32(b));
  return sum + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#elif defined(__AVX2__)
constexpr bool HAS_DOT_4 = true, HAS_DOT_8 = false;
static inline vi dot_four_codes(vi sum, vu a, int32_t b) {
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)a, _mm256_set1_epi32(b));
  return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr bool HAS_DOT_4 = true, HAS_DOT_8 = true;
static inline vi dot_four_codes(vi sum, vu a, int32_t b) {
  return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)a, vreinterpretq_s8_s32(vdupq_n_s32(b)));
}
#elif defined(__aarch64__)
constexpr bool HAS_DOT_4 = true, HAS_DOT_8 = true;
static inline vi dot_four_codes(vi sum, vu a, int32_t b) {
  const int8x16_t left = (int8x16_t)a, right = vreinterpretq_s8_s32(vdupq_n_s32(b));
  const int16x8_t low = vmull_s8(vget_low_s8(left), vget_low_s8(right)), high = vmull_high_s8(left, right);
  return (vi)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
}
#else
constexpr bool HAS_DOT_4 = false, HAS_DOT_8 = false;
static inline vi dot_four_codes(vi sum, vu, int32_t) { return sum; }
#endif

template <class G>
constexpr bool has_dot() {
  return G::CODES == 8 ? HAS_DOT_4 : HAS_DOT_8;
}

static inline int32_t four_of(const int8_t* codes) {
  int32_t four;
  memcpy(&four, codes, 4);
  return four;
}

// M rows from `row` on times one panel.
template <class G, int M>
static void integers_times_panel(const IntegerRows& a, int row, int k, const uint8_t* panel, int size,
                                 const Out<float>& o, int number, const Ahead& ahead) {
  const int groups = k / size;
  const int8_t *high = a.high.data() + (int64_t)row * k, *low = a.low.data() + (int64_t)row * k;
  const float *scales = a.scales.data() + (int64_t)row * groups, *totals = a.totals.data() + (int64_t)row * groups;
  vf sums[M][2];
  for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = vf{};
  const char* next = ahead.from;
  for (int g = 0; g < groups; g++, panel += G::bytes(size), high += size, low += size) {
    for (int line = 0; line < ahead.step; line++, next += LINE) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      vi tops[M], rests[M];
      for (int m = 0; m < M; m++) tops[m] = rests[m] = vi{};
      const uint8_t* from = panel + G::HEAD_BYTES + half * G::half_bytes(size);
      for (int i = 0; i < size; i += G::CODES, from += 4 * W) {
        const vu x = *(const vu*)from;
        const vu first = G::CODES == 4 ? x ^ SIGNED_ZERO * 0x01010101u : x & 0x0f0f0f0fu, second = (x >> 4) & 0x0f0f0f0fu;
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const int8_t *h = high + (int64_t)m * k + i, *l = low + (int64_t)m * k + i;
          tops[m] = dot_four_codes(tops[m], first, four_of(h));
          rests[m] = dot_four_codes(rests[m], first, four_of(l));
          if constexpr (G::CODES == 8) {
            tops[m] = dot_four_codes(tops[m], second, four_of(h + 4));
            rests[m] = dot_four_codes(rests[m], second, four_of(l + 4));
          }
        }
      }
      const vf scale = G::scale(panel, half);
      vf offset = G::offset(panel, half);
      if constexpr (G::CODES == 4 && SIGNED_ZERO != 0) offset += scale * SIGNED_ZERO;
      for (int m = 0; m < M; m++)
        sums[m][half] += __builtin_convertvector((tops[m] << 7) + rests[m], vf) * scales[m * groups + g] * scale +
                         offset * totals[m * groups + g];
    }
  }
  for (int m = 0; m < M; m++) finish(sums[m][0], sums[m][1], o, row + m, number);
}

template <class G, int M>
static inline void some_integers(int m, const IntegerRows& a, int row, int k, const uint8_t* panel, int size,
                                 const Out<float>& o, int number, const Ahead& ahead) {
  if constexpr (M > 0) {
    if (m == M) integers_times_panel<G, M>(a, row, k, panel, size, o, number, ahead);
    else some_integers<G, M - 1>(m, a, row, k, panel, size, o, number, ahead);
  }
}

static inline Ahead fetch_bytes(const uint8_t* from, int64_t bytes, int turns) {
  return {(const char*)from, (int)((bytes + (int64_t)turns * LINE - 1) / ((int64_t)turns * LINE))};
}

// As `product`, of few rows as integers. Called by every thread of a team; ends in a barrier.
template <class G>
static void product_of_integers(Shares& shares, int number, const Tiles<float>& a, const uint8_t* weights, int size,
                                int rows, int panels, const Out<float>& o, IntegerRows& integers) {
  const int k = a.columns, groups = k / size;
  const int64_t bytes = G::bytes(size) * groups;
#pragma omp for
  for (int r = 0; r < rows; r++) integers.set(a, r, size);
  shares.go(number, panels, [&](int p, int after) {
    Ahead ahead = fetch_bytes(weights + (after ? p + 1 : p) * bytes, bytes, groups);
    for (int row = 0; row < rows; row += DOT_ROWS, ahead.step = 0)
      some_integers<G, DOT_ROWS>(std::min(DOT_ROWS, rows - row), integers, row, k, weights + p * bytes, size, o, p,
                                 ahead);
  });
#pragma omp barrier
}

// As `product`, by widening one panel after another. `wide` has room for one.
template <class G>
static void product_widened(Shares& shares, int number, const Tiles<float>& a, const uint8_t* weights, int size,
                            int rows, int panels, const Out<float>& o, void* wide) {
  const int k = a.columns, h = a.height;
  const int64_t bytes = G::bytes(size) * (k / size);
  const Units units(a, rows, panels);
  shares.go(number, units.count(), [&](int unit, int after) {
    const int p = units.panel(unit);
    const Ahead ahead = {(const char*)(weights + units.next(unit, after) * bytes), (int)((bytes + k - 1) / k)};
    widen_panel<G>(weights + p * bytes, k, size, (float*)wide);
    for (int i = units.first(unit), end = units.end(unit), n = 0; i < end; i++, n++)
      tile_of_rows<float>(std::min(h, rows - i * h), n ? 0 : 1, a.tile(i), a.step(), (const float*)wide, k, o, i * h,
                          p, ahead);
  });
#pragma omp barrier
}

#if HEADWAY_BF16
template <class G, class T>
static void product_widened(Shares& shares, int number, const Tiles<bf16>& a, const uint8_t* weights, int size,
                            int rows, int panels, const Out<T>& o, void* wide) {
  const int k = a.columns;
  const int64_t bytes = G::bytes(size) * (k / size);
  const Units units(a, rows, panels);
  tiles_configure(a.height);
  shares.go(number, units.count(), [&](int unit, int after) {
    const int p = units.panel(unit), first = units.first(unit), end = units.end(unit);
    const int groups = std::min(FETCHING, (end - first + GROUP_TILES - 1) / GROUP_TILES);
    widen_panel<G>(weights + p * bytes, k, size, (bf16*)wide);
    rows_times_panel(a, first, end, (const bf16*)wide, rows, o, p,
                     fetch(weights + units.next(unit, after) * bytes, bytes, k, groups));
  });
#pragma omp barrier
}
#endif

// Codes [n][k], scales and offsets [n][k / size] (or null) into panels, at `first` of each, `width` columns of it.
template <class G>
static void pack_groups(const uint8_t* codes, const f16* scales, const f16* offsets, int n, int k, int size,
                        uint8_t* to, int first, int width) {
  const int panels = (n + width - 1) / width, groups = k / size;
#pragma omp parallel for
  for (int p = 0; p < panels; p++)
    for (int g = 0; g < groups; g++) {
      uint8_t* group = to + ((int64_t)p * groups + g) * G::bytes(size);
      for (int j = 0; j < width; j++) {
        const int column = p * width + j, at = first + j;
        const bool there = column < n;
        f16* head = (f16*)group;
        head[at] = there ? scales[(int64_t)column * groups + g] : f16{0};
        if (G::HEAD_BYTES > NR * 2) head[NR + at] = there ? offsets[(int64_t)column * groups + g] : f16{0};
        uint8_t* half = group + G::HEAD_BYTES + at / W * G::half_bytes(size);
        for (int i = 0; i < size; i += G::CODES) {
          uint32_t x = 0;
          for (int c = 0; there && c < G::CODES; c++)
            x |= (uint32_t)codes[(int64_t)column * k + g * size + i + c] << G::shift(c);
          memcpy(half + ((int64_t)i / G::CODES * W + at % W) * 4, &x, 4);
        }
      }
    }
}
