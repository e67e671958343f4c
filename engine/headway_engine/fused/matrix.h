// Packed matrices of weights of every element type: their panels, one weight of them, and products with them.
//
// Structures and numbers here and in `native.py` must be the same. Knows nothing of layers.
#pragma once

#include "groups.h"
#include "product.h"
#include "product_bf16.h"

extern "C" {

enum Element : int32_t {
  SINGLE = 0,        // float32 in panels [k][NR]
  BRAIN = 1,         // bfloat16, likewise
  HALF = 2,          // half precision, likewise
  PAIRS = 3,         // bfloat16 in panels [k / 2][NR][2], for products in bfloat16
  FOUR = 4,          // 4 bits in groups
  FOUR_OFFSET = 5,   // 4 bits in groups with offsets
  EIGHT = 6,         // 8 bits in groups
  EIGHT_OFFSET = 7,  // 8 bits in groups with offsets
};

struct Matrix {  // [rows, columns] as a model has it: a product has `rows` results. Panels of NR of its rows.
  const void* panels;
  int32_t rows, columns, element, group;  // group: weights that share a scale, 0 where none do
};
}

static inline bool in_groups(const Matrix& m) { return m.element >= FOUR; }

// Calls `with` with a value of the type that holds the matrix's groups.
template <class With>
static inline void groups_of(int32_t element, const With& with) {
  if (element == FOUR) with(Groups<4, false>());
  else if (element == FOUR_OFFSET) with(Groups<4, true>());
  else if (element == EIGHT) with(Groups<8, false>());
  else with(Groups<8, true>());
}

static int64_t bytes_of_panel(int32_t element, int64_t columns, int32_t group) {
  if (element == SINGLE) return columns * NR * 4;
  if (element == BRAIN || element == HALF) return columns * NR * 2;
  if (element == PAIRS) return (columns + 31) / 32 * 32 * NR * 2;
  int64_t bytes = 0;
  groups_of(element, [&](auto g) { bytes = columns / group * decltype(g)::bytes(group); });
  return bytes;
}

// Bytes of a thread's own that products with a matrix need.
static int64_t wide_bytes(const Matrix& m) {
  if (in_groups(m)) return ((int64_t)m.columns + 31) / 32 * 32 * NR * sizeof(float);
  const int64_t bytes = (int64_t)m.columns * NR * sizeof(float);
  return (m.element == BRAIN || m.element == HALF) && bytes <= WIDE_BYTES ? bytes : 0;
}

// to[columns] = one row of the matrix, which is a column of one panel.
static void matrix_row(const Matrix& m, int64_t row, float* to) {
  const char* panel = (const char*)m.panels + row / NR * bytes_of_panel(m.element, m.columns, m.group);
  const int column = (int)(row % NR);
  auto from = [&](auto at) {
    for (int i = 0; i < m.columns; i++) to[i] = at(i);
  };
  if (m.element == SINGLE) from([&](int64_t i) { return ((const float*)panel)[i * NR + column]; });
  else if (m.element == BRAIN) from([&](int64_t i) { return widen(((const bf16*)panel)[i * NR + column]); });
  else if (m.element == HALF) from([&](int64_t i) { return widen(((const f16*)panel)[i * NR + column]); });
  else if (m.element == PAIRS)
    from([&](int64_t i) { return widen(((const bf16*)panel)[(i / 2 * NR + column) * 2 + i % 2]); });
  else
    groups_of(m.element, [&](auto g) {
      from([&](int64_t i) { return weight_at<decltype(g)>((const uint8_t*)panel, m.group, (int)i, column); });
    });
}

struct Workbench {  // of one team of threads, for products
  std::vector<char> wide;
  int64_t wide_each;
  IntegerRows integers;

  Workbench() : wide_each(0) {}
  void make_room(const Matrix& m, int threads) {
    wide_each = std::max(wide_each, (wide_bytes(m) + LINE - 1) / LINE * LINE);
    if ((int64_t)wide.size() < wide_each * threads + LINE) wide.resize(wide_each * threads + LINE);
    if (in_groups(m)) integers.make_room(m.columns, 16);
  }
  void* own() {
    const int64_t first = (LINE - (int64_t)wide.data() % LINE) % LINE;
    return wide.data() + first + wide_each * omp_get_thread_num();
  }
};

// out = a times the matrix. By every thread of a team; ends in a barrier. `number`: of the product, in `shares`.
// `short_sums`: few rows may be multiplied as integers with quantized weights.
static void multiply(Shares& shares, int number, const Tiles<float>& a, const Matrix& m, int rows, const Out<float>& o,
                     Workbench& bench, bool short_sums) {
  const int panels = (m.rows + NR - 1) / NR;
  float* wide = (float*)bench.own();
  if (m.element == SINGLE) product(shares, number, a, (const float*)m.panels, rows, panels, o, wide);
  else if (m.element == BRAIN) product(shares, number, a, (const bf16*)m.panels, rows, panels, o, wide);
  else if (m.element == HALF) product(shares, number, a, (const f16*)m.panels, rows, panels, o, wide);
  else
    groups_of(m.element, [&](auto g) {
      using G = decltype(g);
      const uint8_t* weights = (const uint8_t*)m.panels;
      if (short_sums && rows <= FEW_ROWS && has_dot<G>())
        product_of_integers<G>(shares, number, a, weights, m.group, rows, panels, o, bench.integers);
      else product_widened<G>(shares, number, a, weights, m.group, rows, panels, o, wide);
    });
}

#if HEADWAY_BF16
static void multiply(Shares& shares, int number, const Tiles<bf16>& a, const Matrix& m, int rows, const Out<bf16>& o,
                     Workbench& bench, bool) {
  const int panels = (m.rows + NR - 1) / NR;
  if (m.element == PAIRS) product_bf16(shares, number, a, (const bf16*)m.panels, rows, panels, o);
  else
    groups_of(m.element, [&](auto g) {
      product_widened<decltype(g)>(shares, number, a, (const uint8_t*)m.panels, m.group, rows, panels, o, bench.own());
    });
}
#endif

// Into panels, at `first` of each, `width` columns of it: rows of `from` [n, k] are output columns.
template <class T>
static void pack(const T* from, int n, int k, T* to, int first, int width) {
  const int panels = (n + width - 1) / width;
#pragma omp parallel for
  for (int p = 0; p < panels; p++)
    for (int i = 0; i < k; i++)
      for (int j = 0; j < width; j++) {
        const int column = p * width + j;
        to[((int64_t)p * k + i) * NR + first + j] = column < n ? from[(int64_t)column * k + i] : T(0);
      }
}

static void pack_pairs(const bf16* from, int n, int k, bf16* to, int first, int width) {
  const int panels = (n + width - 1) / width, all = (k + 31) / 32 * 32;
#pragma omp parallel for
  for (int p = 0; p < panels; p++)
    for (int i = 0; i < all; i++)
      for (int j = 0; j < width; j++) {
        const int column = p * width + j;
        to[((int64_t)p * all + i / 2 * 2) * NR + (first + j) * 2 + i % 2] =
            column < n && i < k ? from[(int64_t)column * k + i] : bf16(0);
      }
}

// A whole matrix, or half of a gate-and-up one. Groups are packed from codes, scales and offsets.
static void pack_matrix(const void* from, const void* scales, const void* offsets, int n, int k, int32_t element,
                        int group, void* to, int first, int width) {
  if (element == SINGLE) pack((const float*)from, n, k, (float*)to, first, width);
  else if (element == PAIRS) pack_pairs((const bf16*)from, n, k, (bf16*)to, first, width);
  else if (!(element >= FOUR)) pack((const uint16_t*)from, n, k, (uint16_t*)to, first, width);
  else
    groups_of(element, [&](auto g) {
      pack_groups<decltype(g)>((const uint8_t*)from, (const f16*)scales, (const f16*)offsets, n, k, group,
                               (uint8_t*)to, first, width);
    });
}
