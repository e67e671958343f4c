// What products of rows with packed matrices share: rows in tiles, where results go, and who computes which part.
//
// Knows nothing of how a product is computed.
#pragma once

#include "vectors.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

constexpr int NR = 2 * W;  // columns of a panel of weights
constexpr int FETCHING = 8;  // tiles that fetch the next panel, at most: more would only fetch lines twice
constexpr int64_t BLOCK_BYTES = 512 << 10;  // of tiles that meet one panel after another: they stay in that cache, too
constexpr int LEAST_TILES = 16;              // of these, though: all weights are read once for so many

// Of a type of activations: columns that lie side by side in a tile, and rows of a tile at most.
template <class T>
struct Shape;
template <>
struct Shape<float> {
  static constexpr int COLUMNS = W;
#if defined(__AVX512F__)
  static constexpr int ROWS = 12;
#elif defined(__aarch64__)
  static constexpr int ROWS = 8;  // GCC loads all rows' numbers first: of 12, sums would not stay in registers
#elif defined(__AVX2__)
  static constexpr int ROWS = 6;
#else
  static constexpr int ROWS = 4;
#endif
};
template <>
struct Shape<bf16> {
  static constexpr int COLUMNS = 32;
#if HEADWAY_AMX
  static constexpr int ROWS = 16;
#else
  static constexpr int ROWS = 12;
#endif
};

// A matrix in tiles of `height` rows, Shape<T>::ROWS at most: tile[column / C][height][C]. A tile is read from front to
// back, and all its rows are a constant away from one address. The last tile has room for all rows whatever it holds.
template <class T>
struct Tiles {
  static constexpr int C = Shape<T>::COLUMNS, MR = Shape<T>::ROWS;
  T* at;
  int columns, height;

  static int64_t width(int64_t columns) { return (columns + C - 1) / C * C; }
  // Room for any number of rows up to `rows`.
  static int64_t elements(int64_t rows, int64_t columns) { return (rows + MR - 1) / MR * MR * width(columns); }
  // The same memory for so many rows, in tiles of nearly one height: a low last tile would wait for its own sums.
  Tiles of(int64_t rows) const {
    const int64_t tiles = std::max<int64_t>(1, (rows + MR - 1) / MR);
    return {at, columns, (int)std::max<int64_t>(1, (rows + tiles - 1) / tiles)};
  }
  T* tile(int64_t number) const { return at + number * height * width(columns); }
  int64_t step() const { return (int64_t)height * C; }  // from a row's C columns to its next ones
  T* row(int64_t number) const { return tile(number / height) + number % height * C; }
  T* place(int64_t number, int column) const { return row(number) + column / C * step() + column % C; }
  void put(int64_t number, int column, const float* from, int n) const {
    for (int i = 0; i < n;) {
      const int some = std::min(n - i, C - (column + i) % C);
      T* to = place(number, column + i);
      int j = 0;
      for (; j + W <= some; j += W) store(to + j, load(from + i + j));
      for (; j < some; j++) narrow(from[i + j], to + j);
      i += some;
    }
  }
  // Columns that fill the last C up are read by products, and must be zero. By every thread of a team.
  void clear_rest(int64_t rows) const {
    if (columns % C == 0) return;
#pragma omp for
    for (int64_t r = 0; r < rows; r++) std::fill(place(r, columns), row(r) + width(columns) / C * step() - step() + C, T(0));
  }
};

enum Mode { STORE, ADD, GATE };

// Where a product goes. STORE, ADD: rows of `stride` floats; STORE may write bfloat16 instead, to `short_to`. GATE:
// SiLU(first half of a panel) * second half, in tiles.
template <class T>
struct Out {
  float* to;
  int64_t stride;
  const float* bias;
  int columns;
  Mode mode;
  Tiles<T> tiles;
  bf16* short_to = nullptr;
};

// to[n] (+)= the first n of NR results, plus bias.
template <class E>
static inline void finish_row(vf low, vf high, E* to, const float* bias, int n, bool add) {
  for (int half = 0; half < 2; half++) {
    const int at = half * W, left = std::min(W, n - at);
    if (left <= 0) break;
    vf y = half ? high : low;
    if (left == W) {
      if (bias) y += load(bias + at);
      if (add) y += load(to + at);
      store(to + at, y);
    } else {
      for (int i = 0; i < left; i++)
        narrow(y[i] + (bias ? bias[at + i] : 0.0f) + (add ? widen(to[at + i]) : 0.0f), to + at + i);
    }
  }
}

// A row's NR results of one panel, on their way out.
template <class T>
static inline void finish(vf low, vf high, const Out<T>& o, int64_t row, int panel) {
  if (o.mode == GATE) {
    store(o.tiles.place(row, panel * W), low / (1.0f + exp_(-low)) * high);
    return;
  }
  const int first = panel * NR, n = std::min(NR, o.columns - first);
  const int64_t at = row * o.stride + first;
  const float* bias = o.bias ? o.bias + first : nullptr;
  if (o.short_to) finish_row(low, high, o.short_to + at, bias, n, false);
  else finish_row(low, high, o.to + at, bias, n, o.mode == ADD);
}

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

struct Ahead {  // of another panel, what is fetched from memory while something is computed: `step` bytes each time
  const char* from;
  int step;
};

// How a product is cut into units: groups of tiles that stay in the cache, times panels.
struct Units {
  int tiles, panels, blocks;

  template <class T>
  Units(const Tiles<T>& a, int rows, int panels) : tiles((rows + a.height - 1) / a.height), panels(panels) {
    const int64_t bytes = a.width(a.columns) * a.height * (int64_t)sizeof(T);
    const int64_t most = std::max<int64_t>(LEAST_TILES, BLOCK_BYTES / bytes);
    blocks = (int)((tiles + most - 1) / most);
  }
  int count() const { return blocks * panels; }
  int panel(int unit) const { return unit % panels; }
  int first(int unit) const { return (int)((int64_t)tiles * (unit / panels) / blocks); }
  int end(int unit) const { return (int)((int64_t)tiles * (unit / panels + 1) / blocks); }
  // The panel that this thread takes next if all goes as usual.
  int next(int unit, int after) const { return after ? (unit % panels + 1) % panels : unit % panels; }
};
