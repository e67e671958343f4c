// Attention over keys and values in blocks, for the chunks of one step.
//
// Queries, scores and results are float32; keys and values are float32 or bfloat16. Knows nothing of weights.
// Few queries (decodes) take a whole context at once, one query after another. Many (prefill) lie side by side in
// vector lanes, so that nothing is summed across lanes, and take the context in tiles that stay in the cache, with
// a running maximum and sum (the online softmax of FlashAttention, Dao et al. 2022).
#pragma once

#include "vectors.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

constexpr int FEW_QUERIES = 8;    // of one item: fewer than this go one by one
constexpr int ITEM_QUERIES = 96;  // of one item, at most; more where one row has more heads
constexpr int TILE = 64;          // tokens of context that many queries look at together, in whole blocks

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
    int most = std::max(1, ITEM_QUERIES / group);
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

static inline int lanes_of(int queries) { return (queries + W - 1) / W * W; }
static inline int tile_of(const Cache& c) { return std::max(1, TILE / c.block_tokens) * c.block_tokens; }

struct Scratch {  // of one thread; sized before the threads start, since none may throw
  std::vector<float> scores, query, keys, out;
  std::vector<float> top, sum, shrink;  // a lane per query: the running maximum and sum, and what a tile shrinks
};

static void make_room(std::vector<Scratch>& team, const std::vector<Item>& items, const Chunk* chunks, int group,
                      const Cache& c) {
  size_t scores = 0, queries = 0;
  for (const Item& i : items) {
    int q = i.rows * group;
    queries = std::max(queries, (size_t)lanes_of(q));
    scores = std::max(scores, q < FEW_QUERIES ? (size_t)q * (chunks[i.chunk].start + i.row + i.rows)
                                      : (size_t)lanes_of(q) * tile_of(c));
  }
  auto at_least = [](std::vector<float>& v, size_t n) {
    if (v.size() < n) v.resize(n);
  };
  for (Scratch& s : team) {
    at_least(s.scores, scores);
    at_least(s.query, queries * c.key_width);
    at_least(s.out, queries * c.value_width);
    at_least(s.keys, (size_t)c.block_tokens * std::max(c.key_width, c.value_width));
    for (auto* lanes : {&s.top, &s.sum, &s.shrink}) at_least(*lanes, queries);
  }
}

static inline const float* as_floats(const float* p, int64_t, std::vector<float>&) { return p; }
static inline const float* as_floats(const bf16* p, int64_t n, std::vector<float>& to) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(&to[i], load(p + i));
  for (; i < n; i++) to[i] = widen(p[i]);
  return to.data();
}

// scores[q][t] for the tokens of one block, few queries.
static void score_few(const float* query, int queries, const float* keys, int tokens, int width, float* scores,
                      int64_t stride, Soon soon) {
  for (int q = 0; q < queries; q++) {
    const float* x = query + q * width;
    float* to = scores + q * stride;
    int t = 0;
    if (width % W == 0)
      for (; t + W <= tokens; t += W)
        store(to + t, sums_across<W>([&](int i) {
                const float* key = keys + (int64_t)(t + i) * width;
                soon.some();
                vf sum = load(x) * load(key);
                for (int d = W; d < width; d += W) sum += load(x + d) * load(key + d);
                return sum;
              }));
    for (; t < tokens; t++) {
      soon.some();
      to[t] = dot(x, keys + (int64_t)t * width, width);
    }
  }
}

// scores[N tokens][L * W queries] = keys[N][width] x query[width][queries].
template <int N, int L>
static inline void score_tile(const float* query, int64_t lanes, const float* keys, int width, float* scores) {
  vf acc[N][L];
  for (int t = 0; t < N; t++)
    for (int l = 0; l < L; l++) acc[t][l] = vf{};
  for (int d = 0; d < width; d++) {
    vf x[L];
#pragma GCC unroll 4
    for (int l = 0; l < L; l++) x[l] = load(query + d * lanes + l * W);
#pragma GCC unroll 4
    for (int t = 0; t < N; t++) {
      vf k = all(keys[(int64_t)t * width + d]);
#pragma GCC unroll 4
      for (int l = 0; l < L; l++) acc[t][l] += k * x[l];
    }
  }
  for (int t = 0; t < N; t++)
    for (int l = 0; l < L; l++) store(scores + t * lanes + l * W, acc[t][l]);
}

template <int L>
static inline void score_lanes(const float* query, int64_t lanes, const float* keys, int tokens, int width,
                               float* scores) {
  int t = 0;
  for (; t + 4 <= tokens; t += 4)
    score_tile<4, L>(query, lanes, keys + (int64_t)t * width, width, scores + t * lanes);
  for (; t < tokens; t++) score_tile<1, L>(query, lanes, keys + (int64_t)t * width, width, scores + t * lanes);
}

// scores[t][q] for the tokens of one block, many queries.
static void score_many(const float* query, int lanes, const float* keys, int tokens, int width, float* scores) {
  constexpr int L = W == 16 ? 3 : 2;  // 4 * L sums, L queries and a key fit the registers
  int lane = 0;
  for (; lane + L * W <= lanes; lane += L * W)
    score_lanes<L>(query + lane, lanes, keys, tokens, width, scores + lane);
  for (; lane < lanes; lane += W) score_lanes<1>(query + lane, lanes, keys, tokens, width, scores + lane);
}

// One tile of scores[t][q] becomes weights under the running maximum of each query; `shrink` says by what all that
// was summed before must be multiplied. Query q sees the tile's first seen + q / group tokens.
static void soften(float* scores, int tokens, int lanes, int seen, int group, Scratch& s) {
  for (int t = std::max(0, seen); t < tokens; t++) {
    int hidden = std::min(lanes, (t - seen + 1) * group);  // queries that come before this token
    std::fill_n(scores + (int64_t)t * lanes, hidden, -INFINITY);
  }
  for (int lane = 0; lane < lanes; lane += W) {
    vf before = load(&s.top[lane]), top = before;
    for (int t = 0; t < tokens; t++) {
      vf x = load(scores + t * lanes + lane);
      top = x > top ? x : top;
    }
    vf shrink = exp_(before - top), sum = load(&s.sum[lane]) * shrink;
    for (int t = 0; t < tokens; t++) {
      float* at = scores + t * lanes + lane;
      vf x = load(at), e = exp_(x - top);
      e = x == all(-INFINITY) ? vf{} : e;
      store(at, e);
      sum += e;
    }
    store(&s.top[lane], top);
    store(&s.sum[lane], sum);
    store(&s.shrink[lane], shrink);
  }
}

// scores[0 .. seen) become weights that sum to one; the rest up to `context` becomes zero.
static void softmax(float* scores, int seen, int context) {
  vf tops = all(-INFINITY), sums = vf{};
  int t = 0;
  for (; t + W <= seen; t += W) {
    vf x = load(scores + t);
    tops = x > tops ? x : tops;
  }
  float top = tops[0];
  for (int i = 1; i < W; i++) top = std::max(top, tops[i]);
  for (; t < seen; t++) top = std::max(top, scores[t]);
  t = 0;
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

struct Weights {  // of query q for token t: at[q * query + t * token]
  const float* at;
  int64_t query, token;
};

// out[Q][V * W] += weights[Q][tokens] x values[tokens][V * W], from column `column` on.
template <int Q, int V>
static inline void weigh(const Weights& w, int q, const float* values, int tokens, int width, int column, float* out,
                         Soon& soon) {
  vf acc[Q][V];
  const float* weights = w.at + q * w.query;
  float* to = out + (int64_t)q * width + column;
  for (int i = 0; i < Q; i++)
    for (int v = 0; v < V; v++) acc[i][v] = load(to + i * width + v * W);
  for (int t = 0; t < tokens; t++) {
    soon.some();
    vf x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) x[v] = load(values + (int64_t)t * width + column + v * W);
#pragma GCC unroll 4
    for (int i = 0; i < Q; i++) {
      vf share = all(weights[i * w.query + t * w.token]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) acc[i][v] += share * x[v];
    }
  }
  for (int i = 0; i < Q; i++)
    for (int v = 0; v < V; v++) store(to + i * width + v * W, acc[i][v]);
}

static void weigh_block(const Weights& w, int queries, const float* values, int tokens, int width, float* out,
                        Soon soon = {}) {
  constexpr int Q = W == 16 ? 4 : 2;  // Q * 4 sums, 4 values and a weight fit the registers
  int column = 0;
  for (; column + 4 * W <= width; column += 4 * W) {
    int q = 0;
    for (; q + Q <= queries; q += Q) weigh<Q, 4>(w, q, values, tokens, width, column, out, soon);
    if (queries - q == 3) weigh<3, 4>(w, q, values, tokens, width, column, out, soon);
    if (queries - q == 2) weigh<2, 4>(w, q, values, tokens, width, column, out, soon);
    if (queries - q == 1) weigh<1, 4>(w, q, values, tokens, width, column, out, soon);
  }
  for (; column + W <= width; column += W)
    for (int q = 0; q < queries; q++) weigh<1, 1>(w, q, values, tokens, width, column, out, soon);
  for (; column < width; column++)
    for (int q = 0; q < queries; q++)
      for (int t = 0; t < tokens; t++)
        out[q * width + column] += w.at[q * w.query + t * w.token] * values[t * width + column];
}

template <class T>
struct Context {  // the keys and values that one item looks at
  const T *keys, *values;
  const int32_t* table;
  const Cache& c;
  int head;

  int64_t place(int t) const {
    return ((int64_t)table[t / c.block_tokens] * c.kv_heads + head) * c.block_tokens;
  }
  const float* keys_at(int t, int n, Scratch& s) const {
    return as_floats(keys + place(t) * c.key_width, (int64_t)n * c.key_width, s.keys);
  }
  const float* values_at(int t, int n, Scratch& s) const {
    return as_floats(values + place(t) * c.value_width, (int64_t)n * c.value_width, s.keys);
  }
  // Decodes wait for memory, and blocks lie anywhere: the next one is asked for while this one is worked on.
  Soon keys_soon(int t, int context, int turns) const {
    return {keys + place(t) * c.key_width, bytes(t, context, c.key_width), turns};
  }
  Soon values_soon(int t, int context, int turns) const {
    return {values + place(t) * c.value_width, bytes(t, context, c.value_width), turns};
  }
  int64_t bytes(int t, int context, int width) const {
    return (int64_t)sizeof(T) * width * std::min(c.block_tokens, context - t);
  }
};

template <class T>
static void attend_few(const Context<T>& x, int queries, int group, int context, int seen, Scratch& s) {
  const Cache& c = x.c;
  for (int t = 0; t < context; t += c.block_tokens) {
    const int n = std::min(c.block_tokens, context - t), next = t + c.block_tokens, turns = n * queries;
    const Soon soon = next < context ? x.keys_soon(next, context, turns) : x.values_soon(0, context, turns);
    score_few(s.query.data(), queries, x.keys_at(t, n, s), n, c.key_width, s.scores.data() + t, context, soon);
  }
  for (int q = 0; q < queries; q++) softmax(s.scores.data() + (int64_t)q * context, seen + q / group, context);
  for (int t = 0; t < context; t += c.block_tokens) {
    const int n = std::min(c.block_tokens, context - t), next = t + c.block_tokens;
    const Soon soon = next < context ? x.values_soon(next, context, n) : Soon();
    weigh_block({s.scores.data() + t, context, 1}, queries, x.values_at(t, n, s), n, c.value_width, s.out.data(),
                soon);
  }
}

template <class T>
static void attend_many(const Context<T>& x, int queries, int group, int context, int seen, Scratch& s) {
  const Cache& c = x.c;
  const int lanes = lanes_of(queries), tile = tile_of(c);
  std::fill_n(s.top.begin(), lanes, -INFINITY);
  std::fill_n(s.sum.begin(), lanes, 0.0f);
  for (int first = 0; first < context; first += tile) {
    int tokens = std::min(tile, context - first);
    for (int t = 0; t < tokens; t += c.block_tokens) {
      int n = std::min(c.block_tokens, tokens - t);
      score_many(s.query.data(), lanes, x.keys_at(first + t, n, s), n, c.key_width, &s.scores[(size_t)t * lanes]);
    }
    soften(s.scores.data(), tokens, lanes, seen - first, group, s);
    if (first)
      for (int q = 0; q < queries; q++)
        if (s.shrink[q] != 1.0f)
          for (int v = 0; v < c.value_width; v++) s.out[(size_t)q * c.value_width + v] *= s.shrink[q];
    for (int t = 0; t < tokens; t += c.block_tokens) {
      int n = std::min(c.block_tokens, tokens - t);
      weigh_block({&s.scores[(size_t)t * lanes], 1, lanes}, queries, x.values_at(first + t, n, s), n, c.value_width,
                  s.out.data());
    }
  }
  for (int q = 0; q < queries; q++)
    for (int v = 0; v < c.value_width; v++) s.out[(size_t)q * c.value_width + v] /= s.sum[q];
}

struct Rows {  // a plain matrix to write to
  float* at;
  int64_t stride;

  void put(int64_t row, int column, const float* from, int n) const {
    memcpy(at + row * stride + column, from, sizeof(float) * n);
  }
};

// `To` has put(row, column, from, n).
template <class T, class To>
static void attend(const Item& item, const Chunk& chunk, const int32_t* table, const Cache& c, int group, float scale,
                   const float* query, int64_t query_stride, const T* keys, const T* values, const To& out,
                   Scratch& s) {
  const int queries = item.rows * group, first = chunk.start + item.row, context = first + item.rows;
  const bool few = queries < FEW_QUERIES;
  const Context<T> x = {keys, values, table, c, item.head};
  // Few: query[q][d]. Many: query[d][q], with the lanes that are left over 0.
  const int64_t along = few ? 1 : lanes_of(queries), across = few ? c.key_width : 1;
  if (!few) std::fill_n(s.query.begin(), along * c.key_width, 0.0f);
  std::fill_n(s.out.begin(), (size_t)queries * c.value_width, 0.0f);
  for (int r = 0; r < item.rows; r++) {
    const float* from = query + (chunk.first + item.row + r) * query_stride + item.head * group * c.key_width;
    for (int g = 0; g < group; g++)
      for (int d = 0; d < c.key_width; d++)
        s.query[(r * group + g) * across + d * along] = from[g * c.key_width + d] * scale;
  }
  if (few) attend_few(x, queries, group, context, first + 1, s);
  else attend_many(x, queries, group, context, first + 1, s);
  for (int r = 0; r < item.rows; r++)
    out.put(chunk.first + item.row + r, item.head * group * c.value_width,
            s.out.data() + (size_t)r * group * c.value_width, group * c.value_width);
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
  std::vector<Scratch> team(threads);
  make_room(team, items, chunks, group, c);
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
                values, Rows{out, (int64_t)heads * c.value_width}, scratch);
    }
  }
}
