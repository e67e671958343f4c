// Products in bfloat16 that are summed in float32: by AMX tiles, or by AVX-512's dot products of pairs.
//
// Weights lie in panels of NR output columns, two rows side by side: panel[k / 2][NR][2], with zeros up to a whole
// number of 32 rows. Knows nothing of layers. Only where the instruction set has such products (HEADWAY_BF16).
#pragma once

#include "tiles.h"

#if HEADWAY_BF16

constexpr int K_STEP = Shape<bf16>::COLUMNS;     // rows of a panel that are taken at a time
constexpr int STEP_ELEMENTS = K_STEP * NR;       // of a panel, in one such step
constexpr int STEP_LINES = STEP_ELEMENTS * (int)sizeof(bf16) / LINE;

static inline int64_t panel_elements(int64_t k) { return Tiles<bf16>::width(k) * NR; }

// Of 16 even ones and then 16 odd ones in one vector, the pairs.
static inline __m512i interleaved(__m512i halves) {
  alignas(LINE) static const uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), halves);
}

// How many lines of the next panel each step of each group of tiles asks for.
static inline Ahead fetch(const void* from, int64_t bytes, int k, int groups) {
  const int64_t steps = Tiles<bf16>::width(k) / K_STEP * std::max(1, groups);
  return {(const char*)from, (int)((bytes + steps * LINE - 1) / (steps * LINE))};
}

#if HEADWAY_AMX

// The compiler's own intrinsics do not say that tiles are read from memory and written to it, so these do.
template <int T>
static inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
static inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int T>
static inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int C, int A, int B>
static inline void tile_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
static inline void tiles_release() { asm volatile("tilerelease" ::); }

// Tiles 0 to 3 are sums, 4 and 5 rows of the left matrix, 6 and 7 of the right one; all are 64 bytes wide.
static inline void tiles_configure(int rows) {
  struct alignas(LINE) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int t = 0; t < 8; t++) {
    config.bytes[t] = LINE;
    config.rows[t] = (uint8_t)(t < 6 ? rows : 16);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

// Two tiles of rows (or one) times one panel, into sums[2 * 16][NR].
template <int TILES>
static inline void tiles_times_panel(const bf16* a0, const bf16* a1, int height, const bf16* panel, int steps,
                                     const Ahead& ahead, float* sums) {
  tile_zero<0>();
  tile_zero<1>();
  if constexpr (TILES > 1) {
    tile_zero<2>();
    tile_zero<3>();
  }
  const char* next = ahead.from;
  for (int s = 0; s < steps; s++, panel += STEP_ELEMENTS, a0 += height * K_STEP, a1 += height * K_STEP) {
    tile_load<6>(panel, NR * 4);
    tile_load<4>(a0, LINE);
    tile_load<7>(panel + W * 2, NR * 4);
    tile_product<0, 4, 6>();
    tile_product<1, 4, 7>();
    if constexpr (TILES > 1) {
      tile_load<5>(a1, LINE);
      tile_product<2, 5, 6>();
      tile_product<3, 5, 7>();
    }
    for (int line = 0; line < ahead.step; line++, next += LINE) __builtin_prefetch(next, 0, 2);
  }
  tile_store<0>(sums, NR * 4);
  tile_store<1>(sums + W, NR * 4);
  if constexpr (TILES > 1) {
    tile_store<2>(sums + 16 * NR, NR * 4);
    tile_store<3>(sums + 16 * NR + W, NR * 4);
  }
}

// Tiles first .. end of `a` times one panel.
template <class T>
static void rows_times_panel(const Tiles<bf16>& a, int first, int end, const bf16* panel, int rows, const Out<T>& o,
                             int number, Ahead ahead) {
  alignas(LINE) float sums[32 * NR];
  const int h = a.height, steps = (int)(a.width(a.columns) / K_STEP);
  for (int i = first, n = 0; i < end; i += 2, n++, ahead.from += (int64_t)steps * ahead.step * LINE) {
    if (n == FETCHING) ahead.step = 0;
    const bool two = i + 1 < end;
    if (two) tiles_times_panel<2>(a.tile(i), a.tile(i + 1), h, panel, steps, ahead, sums);
    else tiles_times_panel<1>(a.tile(i), a.tile(i), h, panel, steps, ahead, sums);
    for (int t = 0; t < (two ? 2 : 1); t++) {
      const int row = (i + t) * h, some = std::min(h, rows - row);
      const float* from = sums + t * 16 * NR;
      for (int m = 0; m < some; m++) finish(load(from + m * NR), load(from + m * NR + W), o, row + m, number);
    }
  }
}

constexpr int GROUP_TILES = 2;  // that go through a panel together

#else

static inline void tiles_configure(int) {}
static inline void tiles_release() {}

typedef int32_t pair __attribute__((aligned(4), may_alias));  // two bfloat16

template <int M, class T>
static inline void pairs_times_panel(const bf16* a, int height, const bf16* panel, int steps, const Out<T>& o, int row,
                                     int number, const Ahead& ahead) {
  vf acc[M][2];
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = vf{};
  const char* next = ahead.from;
  for (int s = 0; s < steps; s++, a += height * K_STEP) {
    for (int line = 0; line < ahead.step; line++, next += LINE) __builtin_prefetch(next, 0, 2);
    for (int i = 0; i < K_STEP / 2; i++, panel += 2 * NR) {
      const __m512bh b0 = (__m512bh)_mm512_loadu_si512(panel), b1 = (__m512bh)_mm512_loadu_si512(panel + 2 * W);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const __m512bh x = (__m512bh)_mm512_set1_epi32(*(const pair*)(a + m * K_STEP + 2 * i));
        acc[m][0] = (vf)_mm512_dpbf16_ps((__m512)acc[m][0], x, b0);
        acc[m][1] = (vf)_mm512_dpbf16_ps((__m512)acc[m][1], x, b1);
      }
    }
  }
  for (int m = 0; m < M; m++) finish(acc[m][0], acc[m][1], o, row + m, number);
}

template <int M, class T>
static inline void some_pairs(int m, const bf16* a, int height, const bf16* panel, int steps, const Out<T>& o, int row,
                              int number, const Ahead& ahead) {
  if constexpr (M > 0) {
    if (m == M) pairs_times_panel<M>(a, height, panel, steps, o, row, number, ahead);
    else some_pairs<M - 1>(m, a, height, panel, steps, o, row, number, ahead);
  }
}

template <class T>
static void rows_times_panel(const Tiles<bf16>& a, int first, int end, const bf16* panel, int rows, const Out<T>& o,
                             int number, Ahead ahead) {
  const int h = a.height, steps = (int)(a.width(a.columns) / K_STEP);
  for (int i = first, n = 0; i < end; i++, n++, ahead.from += (int64_t)steps * ahead.step * LINE) {
    if (n == FETCHING) ahead.step = 0;
    some_pairs<Shape<bf16>::ROWS>(std::min(h, rows - i * h), a.tile(i), h, panel, steps, o, i * h, number, ahead);
  }
}

constexpr int GROUP_TILES = 1;

#endif

// As `product` in float32, of panels in pairs.
template <class T>
static void product_bf16(Shares& shares, int number, const Tiles<bf16>& a, const bf16* weights, int rows, int panels,
                         const Out<T>& o) {
  const int64_t size = panel_elements(a.columns);
  const Units units(a, rows, panels);
  tiles_configure(a.height);
  shares.go(number, units.count(), [&](int unit, int after) {
    const int p = units.panel(unit), first = units.first(unit), end = units.end(unit);
    const int groups = std::min(FETCHING, (end - first + GROUP_TILES - 1) / GROUP_TILES);
    const Ahead ahead = fetch(weights + units.next(unit, after) * size, size * sizeof(bf16), a.columns, groups);
    rows_times_panel(a, first, end, weights + p * size, rows, o, p, ahead);
  });
#pragma omp barrier
}

#else

static inline void tiles_release() {}

#endif  // HEADWAY_BF16
