// The kernels' C entry points: plain C, no torch headers, so that a build takes seconds.
//
// This file is compiled once per instruction set (see isa.py) and the loader picks at run time. Each idea has a header
// of its own. Threads are OpenMP's, shared with torch.

#include "attend.h"
#include "linear.h"
#include "llama.h"
#include "matrix.h"
#include "sampling.h"

#include <cstdint>
#include <new>

#if HEADWAY_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern "C" {

// 0 when this process may use the instruction set. Tiles must be asked for: their registers are large.
int32_t hw_ready() {
#if HEADWAY_AMX
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 0 : 1;
#else
  return 0;
#endif
}

int32_t hw_panel_columns() { return NR; }

// 1 where products of bfloat16 are to be had: weights of bfloat16 are then packed as PAIRS.
int32_t hw_multiplies_bf16() {
#if HEADWAY_BF16
  return 1;
#else
  return 0;
#endif
}

int64_t hw_workspace(const Model* m, int64_t tokens) { return workspace_bytes(*m, tokens); }

// Bytes of the panels of a matrix with n rows, `width` of which share a panel.
int64_t hw_packed_bytes(int32_t element, int32_t n, int32_t k, int32_t group, int32_t width) {
  return (int64_t)((n + width - 1) / width) * bytes_of_panel(element, k, group);
}

// Panels of a row-major [n, k] matrix: `width` of its rows in each, from column `first` of the panel on. `from` holds
// weights in the element's own type, or codes of one byte each, with scales and offsets [n, k / group] in half precision.
void hw_pack(const void* from, const void* scales, const void* offsets, int32_t n, int32_t k, int32_t element,
             int32_t group, void* to, int32_t first, int32_t width) {
  pack_matrix(from, scales, offsets, n, k, element, group, to, first, width);
}

// x.to[i] = row ids[i] of a packed matrix, which has it. 0, or 1 when memory ran out.
int32_t hw_gather_rows(const Matrix* m, const int64_t* ids, const PlainRows* x, int32_t threads) {
  try {
    gather_rows(*m, ids, *x, threads);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// x.to[rows, m.rows] = x.from[rows, m.columns] x the matrix + bias (or null). 0, or 1 when memory ran out.
int32_t hw_linear(const Matrix* m, const PlainRows* x, const float* bias, int32_t short_sums, int32_t threads) {
  try {
    linear(*m, *x, bias, short_sums, threads);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// 0, or 1 when memory ran out before anything was computed.
int32_t hw_run(const Model* m, const Step* s) {
  try {
    run(*m, *s);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// Write keys and values [tokens, kv_heads, width] to their slots, then attend with query [tokens, heads, width].
int32_t hw_attend(const Cache* c, int32_t heads, float scale, int32_t tokens, int32_t chunks, const Chunk* chunk,
                  const int32_t* tables, const int64_t* slots, const float* query, const float* key,
                  const float* value, void* keys, void* values, float* out, int32_t is_bf16, int32_t threads) {
  try {
    if (is_bf16)
      attend_all<bf16>(*c, heads, scale, tokens, chunks, chunk, tables, slots, query, key, value, (bf16*)keys,
                       (bf16*)values, out, threads);
    else
      attend_all<float>(*c, heads, scale, tokens, chunks, chunk, tables, slots, query, key, value, (float*)keys,
                        (float*)values, out, threads);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

int64_t hw_sample_workspace(int32_t vocabulary, int32_t threads) { return threads * bench_bytes(vocabulary); }

// A token for each row of logits [rows, vocabulary]; rows >= 1, `workspace` holds hw_sample_workspace bytes. What is
// not a number, or infinite, yields any token.
void hw_sample(const float* logits, int32_t rows, int32_t vocabulary, const Wish* wishes, int32_t* tokens,
               void* workspace, int32_t threads) {
  sample_rows(logits, rows, vocabulary, wishes, tokens, workspace, threads);
}

// The highest value of each row; not a number where any of its values is none.
void hw_highest(const float* logits, int32_t rows, int32_t vocabulary, float* highest, int32_t threads) {
  highest_of_rows(logits, rows, vocabulary, highest, threads);
}
}
