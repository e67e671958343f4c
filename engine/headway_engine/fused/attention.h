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
#if HEADWAY_AMX
constexpr int ITEM_QUERIES = 192;  // of one item, at most; more where one row has more heads
#else
constexpr int ITEM_QUERIES = 96;
#endif
constexpr int ITEMS_EACH = 4;     // of few queries for each thread, before heads share one
constexpr int TILE = 64;          // tokens of context that many queries look at together, in whole blocks

struct Chunk {  // rows first .. first + length of the step: positions start .. of one sequence
  int32_t first, length, start, table;  // table: offset of its block numbers
};

struct Item {  // part of a chunk for some key-value heads; one head where there are many queries
  int32_t chunk, head, heads, row, rows;
};

struct Cache {
  int32_t kv_heads, block_tokens, key_width, value_width;
};

// Heads of few queries share an item as long as every thread has enough items: the keys of a block's heads follow one
// another in memory, and long stretches arrive faster.
static std::vector<Item> items_of(const Chunk* chunks, int n, int kv_heads, int group, int threads) {
  const int most = std::max(1, ITEM_QUERIES / group);
  auto few = [&](int rows) { return rows * group < FEW_QUERIES; };
  int64_t alone = 0;  // items of few queries, if each had one head
  for (int c = 0; c < n; c++) alone += few((chunks[c].length - 1) % most + 1) ? kv_heads : 0;
  const int together = (int)std::max<int64_t>(1, std::min<int64_t>(kv_heads, alone / (ITEMS_EACH * threads)));
  std::vector<Item> items;
  for (int c = 0; c < n; c++)
    for (int row = 0; row < chunks[c].length; row += most) {
      const int rows = std::min(most, chunks[c].length - row), heads = few(rows) ? together : 1;
      for (int h = 0; h < kv_heads; h += heads) items.push_back({c, h, std::min(heads, kv_heads - h), row, rows});
    }
  // Longest first, so that the last items to finish are short ones.
  std::stable_sort(items.begin(), items.end(), [&](const Item& x, const Item& y) {
    return (int64_t)x.rows * (chunks[x.chunk].start + x.row) > (int64_t)y.rows * (chunks[y.chunk].start + y.row);
  });
  return items;
}

#if HEADWAY_AMX
constexpr int LANES = 32;  // two tiles of queries
#else
constexpr int LANES = W;
#endif
constexpr int TURNED_TOKENS = 128;  // of context that AMX tiles look at together

static inline int lanes_of(int queries) { return (queries + LANES - 1) / LANES * LANES; }
static inline int tile_of(const Cache& c) { return std::max(1, TILE / c.block_tokens) * c.block_tokens; }

struct Scratch {  // of one thread; sized before the threads start, since none may throw
  std::vector<float> scores, query, keys, out;
  std::vector<float> top, sum, shrink;  // a lane per query: the running maximum and sum, and what a tile shrinks
  std::vector<bf16> pairs;              // of queries, in bfloat16
#if HEADWAY_AMX
  std::vector<bf16> weights, turned;  // see attention_amx.h
#endif
};

static void make_room(std::vector<Scratch>& team, const std::vector<Item>& items, const Chunk* chunks, int group,
                      const Cache& c) {
  size_t scores = 0, queries = 0;
  for (const Item& i : items) {
    const int q = i.rows * group;
    queries = std::max(queries, (size_t)lanes_of(q * i.heads));
    scores = std::max(scores, q < FEW_QUERIES ? (size_t)q * i.heads * (chunks[i.chunk].start + i.row + i.rows)
                                      : (size_t)lanes_of(q) * std::max({tile_of(c), TURNED_TOKENS, c.value_width}));
  }
  auto at_least = [](auto& v, size_t n) {
    if (v.size() < n) v.resize(n);
  };
  for (Scratch& s : team) {
    at_least(s.scores, scores);
    at_least(s.query, queries * c.key_width);
    at_least(s.out, queries * c.value_width);
    at_least(s.keys, (size_t)c.block_tokens * std::max(c.key_width, c.value_width));
    for (auto* lanes : {&s.top, &s.sum, &s.shrink}) at_least(*lanes, queries);
    at_least(s.pairs, queries * c.key_width);
#if HEADWAY_AMX
    at_least(s.weights, queries * TURNED_TOKENS);
    at_least(s.turned, (size_t)TURNED_TOKENS * c.value_width);
#endif
  }
}

static inline const float* as_floats(const float* p, int64_t, std::vector<float>&) { return p; }
static inline const float* as_floats(const bf16* p, int64_t n, std::vector<float>& to) {
  put_row(p, n, to.data());
  return to.data();
}

constexpr int ASK_EVERY = 4;  // tokens from one request for memory to the next

// scores[t] of W tokens for one query, of D vectors of keys each.
template <int D, class T>
static inline vf score_widened(const float* query, const T* keys, Soon& soon) {
  vf x[D];
  for (int d = 0; d < D; d++) x[d] = load(query + d * W);
  return sums_across<W>([&](int i) {
    if (i % ASK_EVERY == 0) soon.some();
    const T* key = keys + (int64_t)i * D * W;
    vf sum = x[0] * load(key);
#pragma GCC unroll 8
    for (int d = 1; d < D; d++) sum += x[d] * load(key + d * W);
    return sum;
  });
}

// The same; `pairs`: the query in bfloat16, for products of pairs where there are such.
template <int D>
static inline vf score_vector(const float* query, const bf16*, const float* keys, Soon& soon) {
  return score_widened<D>(query, keys, soon);
}
template <int D>
static inline vf score_vector(const float* query, const bf16* pairs, const bf16* keys, Soon& soon) {
#if HEADWAY_BF16
  if constexpr (D % 2 == 0) {
    __m512bh x[D / 2];
    for (int d = 0; d < D / 2; d++) x[d] = (__m512bh)_mm512_loadu_si512(pairs + d * 2 * W);
    return sums_across<W>([&](int i) {
      if (i % ASK_EVERY == 0) soon.some();
      const bf16* key = keys + (int64_t)i * D * W;
      __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int d = 0; d < D / 2; d++) sum = _mm512_dpbf16_ps(sum, x[d], (__m512bh)_mm512_loadu_si512(key + d * 2 * W));
      return (vf)sum;
    });
  }
#endif
  return score_widened<D>(query, keys, soon);
}

static inline float dot_of(const float* query, const float* key, int width) { return dot(query, key, width); }
static inline float dot_of(const float* query, const bf16* key, int width) {
  vf sums = vf{};
  int d = 0;
  for (; d + W <= width; d += W) sums += load(query + d) * load(key + d);
  float sum = sum_of(sums);
  for (; d < width; d++) sum += query[d] * widen(key[d]);
  return sum;
}

// scores[q][t] for the first tokens of one block, few queries of D vectors; how many tokens that were.
template <int D, class T>
static int score_vectors(const float* query, const bf16* pairs, int queries, const T* keys, int tokens, float* scores,
                         int64_t stride, Soon& soon) {
  const int width = D * W;
  int t = 0;
  for (; t + W <= tokens; t += W)
    for (int q = 0; q < queries; q++)
      store(scores + q * stride + t,
            score_vector<D>(query + q * width, pairs + q * width, keys + (int64_t)t * width, soon));
  return t;
}

// scores[q][t] for the tokens of one block, few queries; `pairs`: the queries in bfloat16.
template <class T>
static void score_few(const float* query, const bf16* pairs, int queries, const T* keys, int tokens, int width,
                      float* scores, int64_t stride, Soon& soon) {
  int t = 0;
  if (width == 2 * W) t = score_vectors<2>(query, pairs, queries, keys, tokens, scores, stride, soon);
  else if (width == 4 * W) t = score_vectors<4>(query, pairs, queries, keys, tokens, scores, stride, soon);
  else if (width == 6 * W) t = score_vectors<6>(query, pairs, queries, keys, tokens, scores, stride, soon);
  else if (width == 8 * W) t = score_vectors<8>(query, pairs, queries, keys, tokens, scores, stride, soon);
  else if (width == 16 * W) t = score_vectors<16>(query, pairs, queries, keys, tokens, scores, stride, soon);
  if constexpr (W == 4) {  // heads of 128 values
    if (width == 32 * W) t = score_vectors<32>(query, pairs, queries, keys, tokens, scores, stride, soon);
  }
  for (; t < tokens; t++) {
    soon.some();
    for (int q = 0; q < queries; q++)
      scores[q * stride + t] = dot_of(query + q * width, keys + (int64_t)t * width, width);
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
  constexpr int L = REGISTERS == 32 ? 3 : 2;  // 4 * L sums, L queries and a key fit the registers
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

// scores[0 .. seen), times `factor`, become weights that sum to one; the rest up to `context` becomes zero.
static void softmax(float* scores, int seen, int context, float factor) {
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
    vf e = exp_((load(scores + t) - top) * factor);
    store(scores + t, e);
    sums += e;
  }
  float sum = sum_of(sums);
  for (; t < seen; t++) {
    scores[t] = exp_(all((scores[t] - top) * factor))[0];
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
template <int Q, int V, class T>
static inline void weigh(const Weights& w, int q, const T* values, int tokens, int width, int column, float* out,
                         Soon& soon) {
  vf acc[Q][V];
  const float* weights = w.at + q * w.query;
  float* to = out + (int64_t)q * width + column;
  for (int i = 0; i < Q; i++)
    for (int v = 0; v < V; v++) acc[i][v] = load(to + i * width + v * W);
  for (int t = 0; t < tokens; t++) {
    if (t % ASK_EVERY == 0) soon.some();
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

template <class T>
static void weigh_block(const Weights& w, int queries, const T* values, int tokens, int width, float* out,
                        Soon& soon) {
  constexpr int Q = REGISTERS == 32 ? 4 : 2;  // Q * 4 sums, 4 values and a weight fit the registers
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
        out[q * width + column] += w.at[q * w.query + t * w.token] * widen(values[t * width + column]);
}

template <class T>
struct Context {  // the keys and values that one item looks at
  const T *keys, *values;
  const int32_t* table;
  const Cache& c;
  int head;

  Context of_head(int more) const { return {keys, values, table, c, head + more}; }
  int64_t place(int t) const {
    return ((int64_t)table[t / c.block_tokens] * c.kv_heads + head) * c.block_tokens;
  }
  const T* keys_of(int t) const { return keys + place(t) * c.key_width; }
  const T* values_of(int t) const { return values + place(t) * c.value_width; }
  const float* keys_at(int t, int n, Scratch& s) const {
    return as_floats(keys + place(t) * c.key_width, (int64_t)n * c.key_width, s.keys);
  }
  const float* values_at(int t, int n, Scratch& s) const {
    return as_floats(values + place(t) * c.value_width, (int64_t)n * c.value_width, s.keys);
  }
  // Decodes wait for memory, and blocks lie anywhere: the next one is asked for while this one is worked on. Of a
  // block, the heads from this one on.
  Soon keys_soon(int t, int heads, int turns) const {
    return {keys_of(t), (int64_t)sizeof(T) * heads * c.block_tokens * c.key_width, turns};
  }
  Soon values_soon(int t, int heads, int turns) const {
    return {values_of(t), (int64_t)sizeof(T) * heads * c.block_tokens * c.value_width, turns};
  }
};

// How often `some` is called for so many tokens.
static inline int asks(int tokens) { return (tokens + ASK_EVERY - 1) / ASK_EVERY; }

// `queries` of each of some heads, from x.head on: query[head][q][d] in, out[head][q][v].
template <class T>
static void attend_few(const Context<T>& x, int heads, int queries, int group, int context, int seen, float factor,
                       Scratch& s) {
  const Cache& c = x.c;
  const int all = heads * queries;
  for (int t = 0; t < context; t += c.block_tokens) {
    const int n = std::min(c.block_tokens, context - t), next = t + c.block_tokens;
    Soon soon = next < context ? x.keys_soon(next, heads, asks(n) * all) : x.values_soon(0, heads, asks(n) * all);
    for (int h = 0; h < heads; h++)
      score_few(&s.query[(size_t)h * queries * c.key_width], &s.pairs[(size_t)h * queries * c.key_width], queries,
                x.of_head(h).keys_of(t), n, c.key_width, &s.scores[(size_t)h * queries * context + t], context, soon);
  }
  for (int q = 0; q < all; q++)
    softmax(&s.scores[(size_t)q * context], seen + q % queries / group, context, factor);
  for (int t = 0; t < context; t += c.block_tokens) {
    const int n = std::min(c.block_tokens, context - t), next = t + c.block_tokens;
    Soon soon = next < context ? x.values_soon(next, heads, asks(n) * heads) : Soon();
    for (int h = 0; h < heads; h++)
      weigh_block({&s.scores[(size_t)h * queries * context + t], context, 1}, queries, x.of_head(h).values_of(t), n,
                  c.value_width, &s.out[(size_t)h * queries * c.value_width], soon);
  }
}

template <class T>
static void attend_many(const Context<T>& x, int queries, int group, int context, int seen, Scratch& s) {
  const Cache& c = x.c;
  const int lanes = lanes_of(queries), tile = tile_of(c);
  std::fill_n(s.top.begin(), lanes, -INFINITY);
  std::fill_n(s.sum.begin(), lanes, 0.0f);
  Soon nothing;
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
                  s.out.data(), nothing);
    }
  }
  for (int q = 0; q < queries; q++)
    for (int v = 0; v < c.value_width; v++) s.out[(size_t)q * c.value_width + v] /= s.sum[q];
}
