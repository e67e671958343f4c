// Attention for the chunks of one step: new keys and values to their slots, then every item by the path that fits it.
#pragma once

#include "attention.h"
#include "attention_amx.h"

struct Rows {  // a plain matrix to write to
  float* at;
  int64_t stride;

  void put(int64_t row, int column, const float* from, int n) const {
    memcpy(at + row * stride + column, from, sizeof(float) * n);
  }
};

// Few: query[head][q][d], and the same in bfloat16. Many, of one head: query[d][q] times `factor`, with the lanes that are
// left over 0.
template <class T, class Q>
static void take_queries(const Item& item, const Chunk& chunk, const Cache& c, int group, float factor,
                         const Q* query, int64_t query_stride, bool few, Scratch& s) {
  const int queries = item.rows * group, width = c.key_width;
  const int64_t along = few ? 1 : lanes_of(queries), across = few ? width : 1;
  if (!few) std::fill_n(s.query.begin(), along * width, 0.0f);
  for (int h = 0; h < item.heads; h++)
    for (int r = 0; r < item.rows; r++) {
      const Q* from = query + (chunk.first + item.row + r) * query_stride + (int64_t)(item.head + h) * group * width;
      for (int g = 0; g < group; g++)
        for (int d = 0; d < width; d++)
          s.query[(h * queries + r * group + g) * across + d * along] = widen(from[g * width + d]) * factor;
    }
  if (few && sizeof(T) < sizeof(float)) put_row(s.query.data(), item.heads * queries * width, s.pairs.data());
}

// `To` has put(row, column, from, n). `from`: results [head][q][value_width].
template <class To>
static void give_results(const Item& item, const Chunk& chunk, const Cache& c, int group, const float* from,
                         const To& out) {
  const int width = group * c.value_width;
  for (int h = 0; h < item.heads; h++)
    for (int r = 0; r < item.rows; r++, from += width)
      out.put(chunk.first + item.row + r, (item.head + h) * width, from, width);
}

// Q: of queries, rows of `query_stride`. T: of keys and values.
template <class T, class Q, class To>
static void attend(const Item& item, const Chunk& chunk, const int32_t* table, const Cache& c, int group, float scale,
                   const Q* query, int64_t query_stride, const T* keys, const T* values, const To& out,
                   Scratch& s) {
  const int queries = item.rows * group, first = chunk.start + item.row, context = first + item.rows;
  const bool few = queries < FEW_QUERIES;
  const Context<T> x = {keys, values, table, c, item.head};
#if HEADWAY_AMX
  if constexpr (sizeof(T) < sizeof(float)) {
    if (!few && fits_tiles(c)) {
      attend_by_tiles(x, item, query + (chunk.first + item.row) * query_stride, query_stride, group, scale, context,
                      first + 1, s);
      give_results(item, chunk, c, group, s.scores.data(), out);
      return;
    }
  }
#endif
  take_queries<T>(item, chunk, c, group, few ? 1.0f : scale, query, query_stride, few, s);
  std::fill_n(s.out.begin(), (size_t)item.heads * queries * c.value_width, 0.0f);
  if (few) attend_few(x, item.heads, queries, group, context, first + 1, scale, s);
  else attend_many(x, queries, group, context, first + 1, s);
  give_results(item, chunk, c, group, s.out.data(), out);
}

template <class T>
static void write_token(const float* key, const float* value, T* keys, T* values, int64_t slot, const Cache& c) {
  int64_t block = slot / c.block_tokens, offset = slot % c.block_tokens;
  for (int h = 0; h < c.kv_heads; h++) {
    int64_t at = (block * c.kv_heads + h) * c.block_tokens + offset;
    put_row(key + h * c.key_width, c.key_width, keys + at * c.key_width);
    put_row(value + h * c.value_width, c.value_width, values + at * c.value_width);
  }
}

// Write all keys and values to their slots, then attend: one team of threads for both.
template <class T>
static void attend_all(const Cache& c, int heads, float scale, int tokens, int n, const Chunk* chunks,
                       const int32_t* tables, const int64_t* slots, const float* query, const float* key,
                       const float* value, T* keys, T* values, float* out, int threads) {
  const int group = heads / c.kv_heads;
  const std::vector<Item> items = items_of(chunks, n, c.kv_heads, group, threads);
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
    tiles_release();
  }
}
