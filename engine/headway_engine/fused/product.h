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
constexpr int AHEAD = 24;        // how many rows of a panel are fetched before their turn
constexpr int PAIR = 2;          // panels that a thread takes at once
constexpr int FETCHING = 8;      // tiles that fetch the next panel, at most: more would only fetch lines twice
constexpr int ROW_BLOCK = 512;   // rows that share one pass over the weights

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

struct Ahead {  // of another panel, what a tile fetches from memory while it computes: `step` bytes a row
  const char* from;
  int step;
};

// LINES: how many cache lines to fetch ahead for each row of the panel.
template <int M, int LINES, class T>
static void tile(const float* a, int64_t lda, const T* panel, int k, const Out& o, int row, int number,
                 const Ahead& ahead) {
  vf acc[M][2];
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = vf{};
  const float* base = a + row * lda;
  for (int i = 0; i < k; i++) {
    vf b0 = load(panel + (int64_t)i * NR), b1 = load(panel + (int64_t)i * NR + W);
    __builtin_prefetch(panel + (int64_t)(i + AHEAD) * NR);
    __builtin_prefetch(panel + (int64_t)(i + AHEAD) * NR + W);
#pragma GCC unroll 2
    for (int line = 0; line < LINES; line++)
      __builtin_prefetch(ahead.from + (int64_t)i * ahead.step + line * LINE, 0, 2);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      vf x = all(base[m * lda + i]);
      acc[m][0] += x * b0;
      acc[m][1] += x * b1;
    }
  }
  finish<M>(acc, o, row, number);
}

template <int M, int LINES, class T>
static inline void some_rows(int m, const float* a, int64_t lda, const T* panel, int k, const Out& o, int row,
                             int number, const Ahead& ahead) {
  if constexpr (M > 0) {
    if (m == M) tile<M, LINES, T>(a, lda, panel, k, o, row, number, ahead);
    else some_rows<M - 1, LINES, T>(m, a, lda, panel, k, o, row, number, ahead);
  }
}

// out[rows, columns] (mode)= a[rows, k] x panels. Called by every thread of a team; ends in a barrier.
//
// Memory is as slow as a tile's arithmetic or slower, so both must go on at once: the tiles of one panel fetch the
// panel that this thread takes next if all goes as usual. A wrong guess costs a little, and no answer.
template <class T>
static void product(const float* a, int64_t lda, const T* weights, int rows, int k, const Out& o) {
  int width = o.mode == GATE ? W : NR, panels = (o.columns + width - 1) / width;
  const int64_t size = (int64_t)k * NR, away = PAIR * (omp_get_num_threads() - 1);
  for (int block = 0; block < rows; block += ROW_BLOCK) {
    const int end = std::min(rows, block + ROW_BLOCK), tiles = (end - block + MR - 1) / MR;
    const int fetching = std::min(tiles, FETCHING), step = ((int)(NR * sizeof(T)) + fetching - 1) / fetching;
#pragma omp for schedule(dynamic, PAIR)
    for (int p = 0; p < panels; p++) {
      const T* panel = weights + p * size;
      const int64_t next = p % PAIR < PAIR - 1 ? p + 1 : p + 1 + away;
      Ahead ahead = {(const char*)(weights + (next < panels ? next : p) * size), step};
      for (int row = block, n = 0; row < end; row += MR, n++, ahead.from += (int64_t)k * step) {
        const int m = std::min(MR, end - row);
        if (step > LINE) some_rows<MR, 2, T>(m, a, lda, panel, k, o, row, p, ahead);
        else if (n < fetching) some_rows<MR, 1, T>(m, a, lda, panel, k, o, row, p, ahead);
        else some_rows<MR, 0, T>(m, a, lda, panel, k, o, row, p, ahead);
      }
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
