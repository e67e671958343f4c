// The kernels' C entry points: plain C, no torch headers, so that a build takes seconds.
//
// This file is compiled once per instruction set (-mavx512..., -mavx2 -mfma, or the baseline) and the loader picks
// at run time. Each idea has a header of its own. Threads are OpenMP's, shared with torch. Activations are float32.

#include "attention.h"
#include "llama.h"
#include "product.h"
#include "sampling.h"

#include <cstdint>
#include <new>

extern "C" {

int32_t hw_panel_columns() { return NR; }

int64_t hw_workspace(const Model* m, int64_t tokens) {
  return Places(*m, tokens, nullptr).floats;
}

// Panels of a row-major [n, k] matrix of `bytes` (2 or 4) an element; `to` holds ceil(n / NR) * k * NR elements.
void hw_pack(const void* from, int32_t n, int32_t k, void* to, int32_t bytes) {
  if (bytes == 2) pack((const uint16_t*)from, n, k, (uint16_t*)to, 0, NR);
  else pack((const float*)from, n, k, (float*)to, 0, NR);
}

// Shared panels of gate and up, both [n, k]; `to` holds ceil(n / (NR / 2)) * k * NR elements.
void hw_pack_gate_up(const void* gate, const void* up, int32_t n, int32_t k, void* to, int32_t bytes) {
  if (bytes == 2) {
    pack((const uint16_t*)gate, n, k, (uint16_t*)to, 0, W);
    pack((const uint16_t*)up, n, k, (uint16_t*)to, W, W);
  } else {
    pack((const float*)gate, n, k, (float*)to, 0, W);
    pack((const float*)up, n, k, (float*)to, W, W);
  }
}

// 0, or 1 when memory ran out before anything was computed.
int32_t hw_run(const Model* m, const Step* s) {
  try {
    if (m->cache == BRAIN) run<bf16, bf16>(*m, *s);
    else if (m->weights == BRAIN) run<bf16, float>(*m, *s);
    else if (m->weights == HALF) run<f16, float>(*m, *s);
    else run<float, float>(*m, *s);
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
