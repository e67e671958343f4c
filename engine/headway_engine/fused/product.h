// Products of rows with a packed matrix.
//
// Weights lie in panels of NR output columns: panel[k][NR], float32, bfloat16 or half precision. Narrow ones are
// widened while the first tile reads them, and kept wide for the tiles that follow.
// Gate and up projections share panels, W columns each. What a product reads lies in tiles of rows, see Tiles.
// Knows nothing of layers.
#pragma once

#include "vectors.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#if defined(__AVX512F__)
constexpr int MR = 12;
#elif defined(__AVX2__)
constexpr int MR = 6;
#else
constexpr int MR = 4;
#endif
constexpr int NR = 2 * W;
constexpr int AHEAD = 24;    // how many rows of a panel are fetched before their turn
constexpr int FETCHING = 8;  // tiles that fetch the next panel, at most: more would only fetch lines twice
constexpr int64_t WIDE_BYTES = 512 << 10;   // of a panel that is kept wide, at most: it shares the second cache
constexpr int64_t BLOCK_BYTES = 512 << 10;  // of tiles that meet one panel after another: they stay in that cache, too
constexpr int LEAST_TILES = 16;             // of these, though: all weights are read once for so many

enum Mode { STORE, ADD, GATE };

// A matrix in tiles of `height` rows, MR at most: tile[column / W][height][W]. A tile is read from front to back, and
// all its rows are a constant away from one address. The last tile has room for all rows whatever it holds.
struct Tiles {
  float* at;
  int columns, height;

  static int64_t width(int64_t columns) { return (columns + W - 1) / W * W; }
  // Room for any number of rows up to `rows`.
  static int64_t floats(int64_t rows, int64_t columns) { return (rows + MR - 1) / MR * MR * width(columns); }
  // The same memory for so many rows, in tiles of nearly one height: a low last tile would wait for its own sums.
  Tiles of(int64_t rows) const {
    const int64_t tiles = std::max<int64_t>(1, (rows + MR - 1) / MR);
    return {at, columns, (int)std::max<int64_t>(1, (rows + tiles - 1) / tiles)};
  }
  float* tile(int64_t number) const { return at + number * height * width(columns); }
  int64_t step() const { return (int64_t)height * W; }  // from a row's W columns to its next ones
  float* row(int64_t number) const { return tile(number / height) + number % height * W; }
  void put(int64_t number, int column, const float* from, int n) const {
    float* to = row(number);
    for (int i = 0; i < n;) {
      const int first = (column + i) % W, some = std::min(n - i, W - first);
      float* part = to + (column + i) / W * step() + first;
      if (some == W) store(part, load(from + i));
      else std::copy_n(from + i, some, part);
      i += some;
    }
  }
};

struct Out {  // rows of `stride` floats, or with GATE tiles of `stride` rows
  float* to;
  int64_t stride;
  const float* bias;
  int columns;
  Mode mode;
};

template <int M>
static inline void finish(const vf (&acc)[M][2], const Out& o, int row, int panel) {
  if (o.mode == GATE) {
    const Tiles tiles = {o.to, o.columns, (int)o.stride};
    float* to = tiles.row(row) + panel * tiles.step();
    for (int m = 0; m < M; m++) store(to + m * W, acc[m][0] / (1.0f + exp_(-acc[m][0])) * acc[m][1]);
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

// LINES: how many cache lines to fetch ahead for each row of the panel. KEEP: write the panel to `wide`, too.
template <int M, int LINES, class T, bool KEEP = false>
static void tile(const float* a, int64_t step, const T* panel, int k, const Out& o, int row, int number,
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
  finish<M>(acc, o, row, number);
}

template <int M, int LINES, class T, bool KEEP = false>
static inline void some_rows(int m, const float* a, int64_t step, const T* panel, int k, const Out& o, int row,
                             int number, const Ahead& ahead, float* wide = nullptr) {
  if constexpr (M > 0) {
    if (m == M) tile<M, LINES, T, KEEP>(a, step, panel, k, o, row, number, ahead, wide);
    else some_rows<M - 1, LINES, T, KEEP>(m, a, step, panel, k, o, row, number, ahead, wide);
  }
}

template <class T>
static void tile_of_rows(int m, int lines, const float* a, int64_t step, const T* panel, int k, const Out& o, int row,
                         int number, const Ahead& ahead) {
  constexpr int MOST = (NR * sizeof(T) + LINE - 1) / LINE;  // lines that a row of a panel is long
  if (lines == MOST) some_rows<MR, MOST, T>(m, a, step, panel, k, o, row, number, ahead);
  else if (lines == 1) some_rows<MR, 1, T>(m, a, step, panel, k, o, row, number, ahead);
  else some_rows<MR, 0, T>(m, a, step, panel, k, o, row, number, ahead);
}

// Floats that a thread needs for a product of narrow weights with so many columns of what it reads.
static int64_t wide_floats(int64_t k) { return k * NR * (int64_t)sizeof(float) <= WIDE_BYTES ? k * NR : 0; }

// Who of a team does which part of a product: each thread has a share of its own, in order, and takes from others'
// when its own is done, since the machine may have kept another thread from working. For a number of products.
class Shares {
 public:
  Shares(int products, int threads) : threads_(threads), done_((size_t)products * threads) {}

  // Calls work(unit, units of the same share after it) until nothing is left of `units`. By every thread of the team.
  template <class Work>
  void go(int product, int units, const Work& work) {
    const int team = omp_get_num_threads(), me = omp_get_thread_num();
    for (int i = 0; i < team; i++) {
      const int whose = (me + i) % team, end = (int64_t)units * (whose + 1) / team;
      std::atomic<int>& done = done_[(size_t)product * threads_ + whose].count;
      for (int unit; (unit = (int64_t)units * whose / team + done.fetch_add(1, std::memory_order_relaxed)) < end;)
        work(unit, end - unit - 1);
    }
  }

 private:
  struct alignas(LINE) Done {
    std::atomic<int> count{0};
  };
  int threads_;
  std::vector<Done> done_;
};

// out[rows, columns] (mode)= a[rows, k] x panels. Called by every thread of a team; ends in a barrier. `number` is
// that of the product in `shares`; `wide` has wide_floats(k) of the thread's own.
//
// Memory is as slow as a tile's arithmetic or slower, so both must go on at once: the tiles of one panel fetch the
// panel that this thread takes next if all goes as usual. A wrong guess costs a little, and no answer.
template <class T>
static void product(Shares& shares, int number, const Tiles& a, const T* weights, int rows, const Out& o,
                    float* wide) {
  const int k = a.columns, width = o.mode == GATE ? W : NR, panels = (o.columns + width - 1) / width;
  const int64_t size = (int64_t)k * NR;
  const int h = a.height, tiles = (rows + h - 1) / h;
  const int most = std::max<int64_t>(LEAST_TILES, BLOCK_BYTES / (a.width(k) * h * sizeof(float)));
  const int blocks = (tiles + most - 1) / most;
  shares.go(number, blocks * panels, [&](int unit, int after) {
    const int block = unit / panels, p = unit % panels, end = (int64_t)tiles * (block + 1) / blocks;
    int i = (int64_t)tiles * block / blocks;
    const int fetching = std::min(end - i, FETCHING), step = ((int)(NR * sizeof(T)) + fetching - 1) / fetching;
    const T* panel = weights + p * size;
    Ahead ahead = {(const char*)(weights + (after ? (p + 1) % panels : p) * size), step};
    const bool keep = sizeof(T) < sizeof(float) && end - i > 1 && wide_floats(k);
    for (int n = 0; i < end; i++, n++, ahead.from += (int64_t)k * step) {
      const int row = i * h, m = std::min(h, rows - row), lines = step > LINE ? 2 : n < fetching ? 1 : 0;
      if (!keep) tile_of_rows<T>(m, lines, a.tile(i), a.step(), panel, k, o, row, p, ahead);
      else if (n) tile_of_rows<float>(m, lines, a.tile(i), a.step(), wide, k, o, row, p, ahead);
      else some_rows<MR, 1, T, true>(m, a.tile(i), a.step(), panel, k, o, row, p, ahead, wide);
    }
  });
#pragma omp barrier
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
