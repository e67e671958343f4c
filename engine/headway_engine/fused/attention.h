// Attention over keys and values in blocks, for the chunks of one step.
//
// Queries, scores and results are float32; keys and values are float32 or bfloat16. Knows nothing of weights.
#pragma once

#include "vectors.h"

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

constexpr int SCORE_FLOATS = 1 << 16;  // scores one attention item may hold, per thread

struct Chunk {  // rows first .. first + length of the step: positions start .. of one sequence
  int32_t first, length, start, table;  // table: offset of its block numbers
};

struct Item {  // part of a chunk for one key-value head
  int32_t chunk, head, row, rows;
};

struct Cache {
  int32_t kv_heads, block_tokens, key_width, value_width;
};

static std::vector<Item> items_of(const Chunk* chunks, int n, int kv_heads, int group) {
  std::vector<Item> items;
  for (int c = 0; c < n; c++) {
    int context = chunks[c].start + chunks[c].length;
    int most = std::max(1, std::min(32, SCORE_FLOATS / context / group));
    for (int row = 0; row < chunks[c].length; row += most)
      for (int h = 0; h < kv_heads; h++)
        items.push_back({c, h, row, std::min(most, chunks[c].length - row)});
  }
  // Longest first, so that the last items to finish are short ones.
  std::stable_sort(items.begin(), items.end(), [&](const Item& x, const Item& y) {
    return (int64_t)x.rows * (chunks[x.chunk].start + x.row) > (int64_t)y.rows * (chunks[y.chunk].start + y.row);
  });
  return items;
}

struct Scratch {  // of one thread; sized before the threads start, since none may throw
  std::vector<float> scores, query, turned, keys, out;
};

static std::vector<Scratch> scratch_of(int threads, const std::vector<Item>& items, const Chunk* chunks, int group,
                                       const Cache& c) {
  size_t scores = 0, queries = 0;
  for (const Item& i : items) {
    size_t q = (size_t)i.rows * group;
    queries = std::max(queries, q);
    scores = std::max(scores, q * (chunks[i.chunk].start + i.row + i.rows));
  }
  int width = std::max(c.key_width, c.value_width);
  std::vector<Scratch> team(threads);
  for (Scratch& s : team) {
    s.scores.resize(scores);
    s.query.resize(queries * c.key_width);
    s.out.resize(queries * c.value_width);
    s.turned.resize((size_t)c.key_width * W);
    s.keys.resize((size_t)c.block_tokens * width);
  }
  return team;
}

// Products of `a` with four rows of `b` that follow one another.
static inline void dot_four(const float* a, const float* b, int n, float* to) {
  vf s[4] = {vf{}, vf{}, vf{}, vf{}};
  int i = 0;
  for (; i + W <= n; i += W) {
    vf x = load(a + i);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) s[j] += x * load(b + j * n + i);
  }
  for (int j = 0; j < 4; j++) to[j] = sum_of(s[j]);
  for (; i < n; i++)
    for (int j = 0; j < 4; j++) to[j] += a[i] * b[j * n + i];
}

static inline const float* as_floats(const float* p, int64_t, std::vector<float>&) { return p; }
static inline const float* as_floats(const bf16* p, int64_t n, std::vector<float>& to) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(&to[i], load(p + i));
  for (; i < n; i++) to[i] = widen(p[i]);
  return to.data();
}

// to[d][i] = keys[i][d] for i < n, else 0: W tokens side by side.
static void turn(const float* keys, int n, int width, float* to) {
  if (n < W) std::fill_n(to, (size_t)width * W, 0.0f);
  int d = 0;
  for (; d + W <= width; d += W) {
    float square[W][W];
    for (int i = 0; i < n; i++) store(square[i], load(keys + i * width + d));
    for (int j = 0; j < W; j++)
      for (int i = 0; i < n; i++) to[(d + j) * W + i] = square[i][j];
  }
  for (; d < width; d++)
    for (int i = 0; i < n; i++) to[d * W + i] = keys[i * width + d];
}

// scores[q][first + t] for the t of one block.
static void score_block(const float* query, int queries, const float* keys, int tokens, int width, float* scores,
                        int64_t stride, Scratch& s) {
  if (queries < 8) {
    for (int q = 0; q < queries; q++) {
      const float* x = query + q * width;
      int t = 0;
      for (; t + 4 <= tokens; t += 4) dot_four(x, keys + (int64_t)t * width, width, scores + q * stride + t);
      for (; t < tokens; t++) scores[q * stride + t] = dot(x, keys + (int64_t)t * width, width);
    }
    return;
  }
  // Many queries: turn W keys over once, so that tokens lie in lanes and no sum across lanes is needed.
  for (int t = 0; t < tokens; t += W) {
    int n = std::min(W, tokens - t);
    turn(keys + (int64_t)t * width, n, width, s.turned.data());
    int q = 0;
    for (; q + 4 <= queries; q += 4) {
      vf a0 = vf{}, a1 = vf{}, a2 = vf{}, a3 = vf{};
      const float *q0 = query + q * width, *q1 = q0 + width, *q2 = q1 + width, *q3 = q2 + width;
      for (int d = 0; d < width; d++) {
        vf k = load(&s.turned[d * W]);
        a0 += k * q0[d];
        a1 += k * q1[d];
        a2 += k * q2[d];
        a3 += k * q3[d];
      }
      const vf* found[4] = {&a0, &a1, &a2, &a3};
      for (int j = 0; j < 4; j++) {
        float* to = scores + (q + j) * stride + t;
        if (n == W) store(to, *found[j]);
        else for (int i = 0; i < n; i++) to[i] = (*found[j])[i];
      }
    }
    for (; q < queries; q++) {
      vf a = vf{};
      for (int d = 0; d < width; d++) a += load(&s.turned[d * W]) * query[q * width + d];
      for (int i = 0; i < n; i++) scores[q * stride + t + i] = a[i];
    }
  }
}

// scores[0 .. seen) become weights that sum to one; the rest up to `context` becomes zero.
static void softmax(float* scores, int seen, int context) {
  float top = scores[0];
  for (int t = 1; t < seen; t++) top = std::max(top, scores[t]);
  vf sums = vf{};
  int t = 0;
  for (; t + W <= seen; t += W) {
    vf e = exp_(load(scores + t) - top);
    store(scores + t, e);
    sums += e;
  }
  float sum = sum_of(sums);
  for (; t < seen; t++) {
    scores[t] = exp_(all(scores[t] - top))[0];
    sum += scores[t];
  }
  float scale = 1.0f / sum;
  for (t = 0; t < seen; t++) scores[t] *= scale;
  for (t = seen; t < context; t++) scores[t] = 0.0f;
}

// out[Q][V * W] += weights[Q][tokens] x values[tokens][V * W], from column `column` on.
template <int Q, int V>
static inline void weigh(const float* weights, int64_t stride, const float* values, int tokens, int width, int column,
                         float* out) {
  vf acc[Q][V];
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) acc[q][v] = load(out + q * width + column + v * W);
  for (int t = 0; t < tokens; t++) {
    vf x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) x[v] = load(values + (int64_t)t * width + column + v * W);
#pragma GCC unroll 4
    for (int q = 0; q < Q; q++) {
      vf w = all(weights[q * stride + t]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) acc[q][v] += w * x[v];
    }
  }
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < V; v++) store(out + q * width + column + v * W, acc[q][v]);
}

static void weigh_block(const float* weights, int64_t stride, int queries, const float* values, int tokens, int width,
                        float* out) {
  constexpr int Q = W == 16 ? 4 : 2;  // Q * 4 sums, 4 values and a weight fit the registers
  int column = 0;
  for (; column + 4 * W <= width; column += 4 * W) {
    int q = 0;
    for (; q + Q <= queries; q += Q)
      weigh<Q, 4>(weights + q * stride, stride, values, tokens, width, column, out + q * width);
    for (; q < queries; q++) weigh<1, 4>(weights + q * stride, stride, values, tokens, width, column, out + q * width);
  }
  for (; column + W <= width; column += W)
    for (int q = 0; q < queries; q++)
      weigh<1, 1>(weights + q * stride, stride, values, tokens, width, column, out + q * width);
  for (; column < width; column++)
    for (int q = 0; q < queries; q++)
      for (int t = 0; t < tokens; t++) out[q * width + column] += weights[q * stride + t] * values[t * width + column];
}

template <class T>
static void attend(const Item& item, const Chunk& chunk, const int32_t* table, const Cache& c, int group, float scale,
                   const float* query, int64_t query_stride, const T* keys, const T* values, float* out,
                   int64_t out_stride, Scratch& s) {
  int queries = item.rows * group, context = chunk.start + item.row + item.rows;
  std::fill_n(s.out.begin(), (size_t)queries * c.value_width, 0.0f);
  for (int r = 0; r < item.rows; r++) {
    const float* from = query + (chunk.first + item.row + r) * query_stride + item.head * group * c.key_width;
    for (int i = 0; i < group * c.key_width; i++) s.query[r * group * c.key_width + i] = from[i] * scale;
  }
  for (int t = 0; t < context; t += c.block_tokens) {
    int n = std::min(c.block_tokens, context - t);
    int64_t at = ((int64_t)table[t / c.block_tokens] * c.kv_heads + item.head) * c.block_tokens;
    const float* block = as_floats(keys + at * c.key_width, (int64_t)n * c.key_width, s.keys);
    score_block(s.query.data(), queries, block, n, c.key_width, s.scores.data() + t, context, s);
  }
  for (int q = 0; q < queries; q++)
    softmax(s.scores.data() + (int64_t)q * context, chunk.start + item.row + q / group + 1, context);
  for (int t = 0; t < context; t += c.block_tokens) {
    int n = std::min(c.block_tokens, context - t);
    int64_t at = ((int64_t)table[t / c.block_tokens] * c.kv_heads + item.head) * c.block_tokens;
    const float* block = as_floats(values + at * c.value_width, (int64_t)n * c.value_width, s.keys);
    weigh_block(s.scores.data() + t, context, queries, block, n, c.value_width, s.out.data());
  }
  for (int r = 0; r < item.rows; r++)
    memcpy(out + (chunk.first + item.row + r) * out_stride + item.head * group * c.value_width,
           s.out.data() + (size_t)r * group * c.value_width, sizeof(float) * group * c.value_width);
}

template <class T>
static void write_token(const float* key, const float* value, T* keys, T* values, int64_t slot, const Cache& c) {
  int64_t block = slot / c.block_tokens, offset = slot % c.block_tokens;
  for (int h = 0; h < c.kv_heads; h++) {
    int64_t at = (block * c.kv_heads + h) * c.block_tokens + offset;
    for (int i = 0; i < c.key_width; i++) narrow(key[h * c.key_width + i], keys + at * c.key_width + i);
    for (int i = 0; i < c.value_width; i++) narrow(value[h * c.value_width + i], values + at * c.value_width + i);
  }
}

// Write all keys and values to their slots, then attend: one team of threads for both.
template <class T>
static void attend_all(const Cache& c, int heads, float scale, int tokens, int n, const Chunk* chunks,
                       const int32_t* tables, const int64_t* slots, const float* query, const float* key,
                       const float* value, T* keys, T* values, float* out, int threads) {
  const int group = heads / c.kv_heads;
  const std::vector<Item> items = items_of(chunks, n, c.kv_heads, group);
  std::vector<Scratch> team = scratch_of(threads, items, chunks, group, c);
#pragma omp parallel num_threads(threads)
  {
    Scratch& scratch = team[omp_get_thread_num()];
#pragma omp for
    for (int t = 0; t < tokens; t++)
      write_token<T>(key + (int64_t)t * c.kv_heads * c.key_width, value + (int64_t)t * c.kv_heads * c.value_width,
                     keys, values, slots[t], c);
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < items.size(); i++) {
      const Chunk& chunk = chunks[items[i].chunk];
      attend<T>(items[i], chunk, tables + chunk.table, c, group, scale, query, (int64_t)heads * c.key_width, keys,
                values, out, (int64_t)heads * c.value_width, scratch);
    }
  }
}
