// One product of plain rows with a packed matrix, for models whose other parts are computed elsewhere.
//
// Rows come and go as they lie in memory, in float32 or bfloat16. Knows nothing of layers.
#pragma once

#include "matrix.h"

extern "C" {

struct PlainRows {  // [rows, columns], one after another
  const void* from;
  void* to;
  int64_t rows;
  int32_t is_short;  // bfloat16, both; else float32
};
}

template <class A, class E>
static void take_rows(const E* from, int64_t rows, const Tiles<A>& to) {
#pragma omp for
  for (int64_t r = 0; r < rows; r++) {
    const E* row = from + r * to.columns;
    int i = 0;
    for (; i + W <= to.columns; i += W) store(to.place(r, i), load(row + i));
    for (; i < to.columns; i++) narrow(widen(row[i]), to.place(r, i));
  }
}

template <class A>
static void linear_in(const Matrix& m, const PlainRows& x, const float* bias, bool short_sums, int threads) {
  // Kept from call to call: new memory would have to be zeroed by the system each time.
  static thread_local std::vector<char> memory;
  const int64_t bytes = Tiles<A>::elements(x.rows, m.columns) * (int64_t)sizeof(A) + LINE;
  if ((int64_t)memory.size() < bytes) memory.resize(bytes);
  static thread_local Workbench bench;
  bench.make_room(m, threads);
  char* at = memory.data() + (LINE - (int64_t)memory.data() % LINE) % LINE;
  const Tiles<A> a = Tiles<A>{(A*)at, m.columns, 1}.of(x.rows);
  Out<A> out = {(float*)x.to, m.rows, bias, m.rows, STORE, Tiles<A>{nullptr, 1, 1}};
  if (x.is_short) out.short_to = (bf16*)x.to;
  Shares shares(1, threads);
  Workbench* const shared = &bench;  // the team's, not each thread's own
#pragma omp parallel num_threads(threads)
  {
    a.clear_rest(x.rows);
    if (x.is_short) take_rows((const bf16*)x.from, x.rows, a);
    else take_rows((const float*)x.from, x.rows, a);
    multiply(shares, 0, a, m, (int)x.rows, out, *shared, short_sums);
    tiles_release();
  }
}

// to[i][columns] = row ids[i] of the matrix.
static void gather_rows(const Matrix& m, const int64_t* ids, const PlainRows& x, int threads) {
  std::vector<float> wide((size_t)m.columns * threads);
#pragma omp parallel num_threads(threads)
  {
    float* own = wide.data() + (size_t)m.columns * omp_get_thread_num();
#pragma omp for
    for (int64_t i = 0; i < x.rows; i++) {
      matrix_row(m, ids[i], own);
      if (x.is_short) put_row(own, m.columns, (bf16*)x.to + i * m.columns);
      else put_row(own, m.columns, (float*)x.to + i * m.columns);
    }
  }
}

static void linear(const Matrix& m, const PlainRows& x, const float* bias, bool short_sums, int threads) {
#if HEADWAY_BF16
  if (short_sums && (m.element == PAIRS || (in_groups(m) && x.rows > FEW_ROWS))) {
    linear_in<bf16>(m, x, bias, short_sums, threads);
    return;
  }
#endif
  linear_in<float>(m, x, bias, short_sums, threads);
}
