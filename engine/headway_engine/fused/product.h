// Products in float32: rows in tiles times a packed matrix.
//
// Weights lie in panels of NR output columns: panel[k][NR], float32, bfloat16 or half precision. Narrow ones are
// widened while the first tile reads them, and kept wide for the tiles that follow.
// Gate and up projections share panels, W columns each. Knows nothing of layers.
#pragma once

#include "tiles.h"

constexpr int AHEAD = 24;                  // how many rows of a panel are fetched before their turn
constexpr int64_t WIDE_BYTES = 512 << 10;  // of a panel that is kept wide, at most: it shares the second cache

// M rows times one panel. LINES: how many cache lines to fetch ahead for each row of the panel. KEEP: write the panel
// to `wide`, too.
template <int M, int LINES, class T, bool KEEP = false>
static void tile(const float* a, int64_t step, const T* panel, int k, const Out<float>& o, int row, int number,
                 const Ahead& ahead, float* wide) {
  vf acc[M][2];
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = vf{};
  const char* next = ahead.from;
  for (int first = 0; first < k; first += W, a += step) {
    const int n = std::min(W, k - first);
    for (int i = 0; i < n; i++, panel += NR, next += ahead.step) {
      vf b0 = load(panel), b1 = load(panel + W);
      if constexpr (KEEP) {
        store(wide, b0);
        store(wide + W, b1);
        wide += NR;
      }
      __builtin_prefetch(panel + AHEAD * NR);
      __builtin_prefetch(panel + AHEAD * NR + W);
#pragma GCC unroll 2
      for (int line = 0; line < LINES; line++) __builtin_prefetch(next + line * LINE, 0, 2);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        vf x = all(a[m * W + i]);
        acc[m][0] += x * b0;
        acc[m][1] += x * b1;
      }
    }
  }
  for (int m = 0; m < M; m++) finish(acc[m][0], acc[m][1], o, row + m, number);
}

template <int M, int LINES, class T, bool KEEP = false>
static inline void some_rows(int m, const float* a, int64_t step, const T* panel, int k, const Out<float>& o, int row,
                             int number, const Ahead& ahead, float* wide = nullptr) {
  if constexpr (M > 0) {
    if (m == M) tile<M, LINES, T, KEEP>(a, step, panel, k, o, row, number, ahead, wide);
    else some_rows<M - 1, LINES, T, KEEP>(m, a, step, panel, k, o, row, number, ahead, wide);
  }
}

template <class T>
static void tile_of_rows(int m, int lines, const float* a, int64_t step, const T* panel, int k, const Out<float>& o,
                         int row, int number, const Ahead& ahead) {
  constexpr int MR = Shape<float>::ROWS;
  constexpr int MOST = (NR * sizeof(T) + LINE - 1) / LINE;  // lines that a row of a panel is long
  if (lines == MOST) some_rows<MR, MOST, T>(m, a, step, panel, k, o, row, number, ahead);
  else if (lines == 1) some_rows<MR, 1, T>(m, a, step, panel, k, o, row, number, ahead);
  else some_rows<MR, 0, T>(m, a, step, panel, k, o, row, number, ahead);
}

// out[rows, columns] (mode)= a[rows, k] x panels. Called by every thread of a team; ends in a barrier. `number` is
// that of the product in `shares`; `wide` has WIDE_BYTES of the thread's own.
//
// Memory is as slow as a tile's arithmetic or slower, so both must go on at once: the tiles of one panel fetch the
// panel that this thread takes next if all goes as usual. A wrong guess costs a little, and no answer.
template <class T>
static void product(Shares& shares, int number, const Tiles<float>& a, const T* weights, int rows, int panels,
                    const Out<float>& o, float* wide) {
  const int k = a.columns, h = a.height;
  const int64_t size = (int64_t)k * NR;
  const Units units(a, rows, panels);
  shares.go(number, units.count(), [&](int unit, int after) {
    const int p = units.panel(unit), end = units.end(unit);
    int i = units.first(unit);
    const int fetching = std::min(end - i, FETCHING), step = ((int)(NR * sizeof(T)) + fetching - 1) / fetching;
    const T* panel = weights + p * size;
    Ahead ahead = {(const char*)(weights + units.next(unit, after) * size), step};
    const bool keep = sizeof(T) < sizeof(float) && end - i > 1 && size * (int64_t)sizeof(float) <= WIDE_BYTES;
    for (int n = 0; i < end; i++, n++, ahead.from += (int64_t)k * step) {
      const int row = i * h, m = std::min(h, rows - row), lines = step > LINE ? 2 : n < fetching ? 1 : 0;
      if (!keep) tile_of_rows<T>(m, lines, a.tile(i), a.step(), panel, k, o, row, p, ahead);
      else if (n) tile_of_rows<float>(m, lines, a.tile(i), a.step(), wide, k, o, row, p, ahead);
      else some_rows<Shape<float>::ROWS, 1, T, true>(m, a.tile(i), a.step(), panel, k, o, row, p, ahead, wide);
    }
  });
#pragma omp barrier
}
