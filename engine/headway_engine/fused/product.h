// Products of a few rows with a packed matrix.
//
// Weights lie in panels of NR output columns: panel[k][NR], float32 or bfloat16 (widened while they are read).
// Gate and up projections share panels, W columns each. Knows nothing of layers.
#pragma once

#include "vectors.h"

#include <algorithm>
#include <cstdint>

#if defined(__AVX512F__)
constexpr int MR = 12;
#elif defined(__AVX2__)
constexpr int MR = 6;
#else
constexpr int MR = 4;
#endif
constexpr int NR = 2 * W;
constexpr int AHEAD = 24;       // how many rows of a panel are fetched before their turn
constexpr int ROW_BLOCK = 512;  // rows that share one pass over the weights

enum Mode { STORE, ADD, GATE };

struct Out {
  float* to;
  int64_t stride;
  const float* bias;
  int columns;
  Mode mode;
};

template <int M>
static inline void finish(const vf (&acc)[M][2], const Out& o, int row, int panel) {
  if (o.mode == GATE) {
    int first = panel * W, n = std::min(W, o.columns - first);
    for (int m = 0; m < M; m++) {
      vf y = acc[m][0] / (1.0f + exp_(-acc[m][0])) * acc[m][1];
      float* to = o.to + (row + m) * o.stride + first;
      if (n == W) store(to, y);
      else for (int i = 0; i < n; i++) to[i] = y[i];
    }
    return;
  }
  int first = panel * NR, n = std::min(NR, o.columns - first);
  for (int m = 0; m < M; m++) {
    float* to = o.to + (row + m) * o.stride + first;
    for (int half = 0; half < 2; half++) {
      int at = half * W, left = std::min(W, n - at);
      if (left <= 0) break;
      vf y = acc[m][half];
      if (left == W) {
        if (o.bias) y += load(o.bias + first + at);
        if (o.mode == ADD) y += load(to + at);
        store(to + at, y);
      } else {
        for (int i = 0; i < left; i++) {
          float x = y[i] + (o.bias ? o.bias[first + at + i] : 0.0f);
          to[at + i] = o.mode == ADD ? to[at + i] + x : x;
        }
      }
    }
  }
}

template <int M, class T>
static void tile(const float* a, int64_t lda, const T* panel, int k, const Out& o, int row, int number) {
  vf acc[M][2];
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = vf{};
  const float* base = a + row * lda;
  for (int i = 0; i < k; i++) {
    vf b0 = load(panel + (int64_t)i * NR), b1 = load(panel + (int64_t)i * NR + W);
    __builtin_prefetch(panel + (int64_t)(i + AHEAD) * NR);
    __builtin_prefetch(panel + (int64_t)(i + AHEAD) * NR + W);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      vf x = all(base[m * lda + i]);
      acc[m][0] += x * b0;
      acc[m][1] += x * b1;
    }
  }
  finish<M>(acc, o, row, number);
}

template <int M, class T>
static inline void rows_left(int m, const float* a, int64_t lda, const T* panel, int k, const Out& o, int row,
                             int number) {
  if constexpr (M > 0) {
    if (m == M) tile<M, T>(a, lda, panel, k, o, row, number);
    else rows_left<M - 1, T>(m, a, lda, panel, k, o, row, number);
  }
}

// out[rows, columns] (mode)= a[rows, k] x panels. Called by every thread of a team; ends in a barrier.
template <class T>
static void product(const float* a, int64_t lda, const T* weights, int rows, int k, const Out& o) {
  int width = o.mode == GATE ? W : NR, panels = (o.columns + width - 1) / width;
  for (int block = 0; block < rows; block += ROW_BLOCK) {
    int end = std::min(rows, block + ROW_BLOCK);
#pragma omp for schedule(dynamic, 2)
    for (int p = 0; p < panels; p++) {
      const T* panel = weights + (int64_t)p * k * NR;
      int row = block;
      for (; row + MR <= end; row += MR) tile<MR, T>(a, lda, panel, k, o, row, p);
      if (row < end) rows_left<MR - 1, T>(end - row, a, lda, panel, k, o, row, p);
    }
  }
}

// Into panels, at `first` of each, `width` columns of it: rows of `from` [n, k] are output columns.
template <class T>
static void pack(const T* from, int n, int k, T* to, int first, int width) {
  int panels = (n + width - 1) / width;
#pragma omp parallel for
  for (int p = 0; p < panels; p++)
    for (int i = 0; i < k; i++)
      for (int j = 0; j < width; j++) {
        int column = p * width + j;
        to[((int64_t)p * k + i) * NR + first + j] = column < n ? from[(int64_t)column * k + i] : T(0);
      }
}
