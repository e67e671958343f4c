// One whole step of a Llama-shaped model.
//
// Structures here and in `native.py` must be the same.
#pragma once

#include "attention.h"
#include "product.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

extern "C" {

struct Layer {
  const void *qkv, *o, *gate_up, *down;  // panels
  const float *norm_in, *norm_mid;
  const float *qkv_bias, *o_bias, *query_norm, *key_norm;  // or null
  void *keys, *values;
};

struct Model {
  int32_t layers, hidden, heads, kv_heads, width, inner, vocabulary, block_tokens, threads;
  int32_t weights, cache;  // an Element each; the cache is not HALF
  float epsilon, scale;
  const Layer* layer;
  const void* head;       // panels
  const void* embedding;  // [vocabulary, hidden]; null: read from the head's panels (tied)
  const float *norm, *cosines, *sines;  // cosines, sines: [positions, width / 2]
};

enum Element : int32_t { SINGLE, BRAIN, HALF };  // float32, bfloat16, half precision

struct Step {
  int32_t tokens, chunks, samples, pooled;
  const int32_t *ids, *positions;
  const int64_t* slots;  // block * block_tokens + offset
  const Chunk* chunk;
  const int32_t *tables, *sampled, *pooled_rows;
  float* logits;     // [samples, vocabulary]
  float* states;     // [pooled, hidden] what the head reads, of pooled_rows
  float* workspace;  // hw_workspace floats
};
}

static float rms_scale(const float* x, float epsilon, int n) { return 1.0f / std::sqrt(dot(x, x, n) / n + epsilon); }

static void rms_norm(const float* x, const float* weight, float epsilon, int n, float* to) {
  const float scale = rms_scale(x, epsilon, n);
  int i = 0;
  for (; i + W <= n; i += W) store(to + i, load(weight + i) * (load(x + i) * scale));
  for (; i < n; i++) to[i] = weight[i] * (x[i] * scale);
}

static void rms_norm(const float* x, const float* weight, float epsilon, const Tiles& to, int64_t row) {
  const float scale = rms_scale(x, epsilon, to.columns);
  float* part = to.row(row);
  int i = 0;
  for (; i + W <= to.columns; i += W, part += to.step()) store(part, load(weight + i) * (load(x + i) * scale));
  for (; i < to.columns; i++) part[i % W] = weight[i] * (x[i] * scale);
}

static void rotate(float* x, const float* cosines, const float* sines, int half) {
  int i = 0;
  for (; i + W <= half; i += W) {
    vf a = load(x + i), b = load(x + half + i), c = load(cosines + i), s = load(sines + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    float a = x[i], b = x[half + i];
    x[i] = a * cosines[i] - b * sines[i];
    x[half + i] = b * cosines[i] + a * sines[i];
  }
}

template <class T>
static void embed(const Model& m, int32_t id, float* to) {
  if (m.embedding) {
    const T* row = (const T*)m.embedding + (int64_t)id * m.hidden;
    for (int i = 0; i < m.hidden; i++) to[i] = widen(row[i]);
  } else {
    const T* column = (const T*)m.head + (int64_t)(id / NR) * m.hidden * NR + id % NR;
    for (int i = 0; i < m.hidden; i++) to[i] = widen(column[(int64_t)i * NR]);
  }
}

struct Places {  // of a step's activations, all in one workspace
  float* x;      // [tokens, hidden]
  Tiles normed;  // [tokens, hidden]
  float* qkv;    // [tokens, q_width + 2 * kv_width]
  Tiles attended, inner;
  int64_t floats;

  Places(const Model& m, int64_t tokens, float* workspace) : floats(0) {  // null: only counts
    const int q_width = m.heads * m.width, kv_width = m.kv_heads * m.width;
    auto take = [&](int64_t n) {
      float* at = workspace ? workspace + floats : nullptr;
      floats += Tiles::width(n);  // each begins a whole vector
      return at;
    };
    x = take(tokens * m.hidden);
    normed = Tiles{take(Tiles::floats(tokens, m.hidden)), m.hidden, 1}.of(tokens);
    qkv = take(tokens * (q_width + 2 * kv_width));
    attended = Tiles{take(Tiles::floats(tokens, q_width)), q_width, 1}.of(tokens);
    inner = Tiles{take(Tiles::floats(tokens, m.inner)), m.inner, 1}.of(tokens);
  }
};

// The rows that anybody reads after the last layer. Of the others only keys and values are wanted there: nearly all
// rows of a prompt.
struct Read {
  std::vector<int32_t> rows;             // ascending
  std::vector<int32_t> place;            // of each row of the step, among `rows`
  std::vector<int32_t> sampled, pooled;  // the step's, as places among `rows`
  std::vector<Chunk> chunks;             // of rows that follow one another

  explicit Read(const Step& s) : place(s.tokens, 0), sampled(s.samples), pooled(s.pooled) {
    for (int i = 0; i < s.samples; i++) place[s.sampled[i]] = 1;
    for (int i = 0; i < s.pooled; i++) place[s.pooled_rows[i]] = 1;
    for (int c = 0; c < s.chunks; c++) {
      const Chunk& chunk = s.chunk[c];
      for (int row = chunk.first, run = 0; row < chunk.first + chunk.length; row++) {
        run = place[row] ? run + 1 : 0;
        if (run == 1) chunks.push_back({row, 0, chunk.start + row - chunk.first, chunk.table});
        if (run) {
          chunks.back().length = run;
          place[row] = (int32_t)rows.size();
          rows.push_back(row);
        }
      }
    }
    for (int i = 0; i < s.samples; i++) sampled[i] = place[s.sampled[i]];
    for (int i = 0; i < s.pooled; i++) pooled[i] = place[s.pooled_rows[i]];
  }
};

struct Placed {  // rows that are written somewhere else
  const Tiles& to;
  const int32_t* place;

  void put(int64_t row, int column, const float* from, int n) const { to.put(place[row], column, from, n); }
};

// T: of weights. C: of keys and values.
template <class T, class C>
static void run(const Model& m, const Step& s) {
  const int q_width = m.heads * m.width, kv_width = m.kv_heads * m.width, all_width = q_width + 2 * kv_width;
  const int64_t tokens = s.tokens;
  const Places places(m, tokens, s.workspace);
  float *x = places.x, *qkv = places.qkv;
  const Cache cache = {m.kv_heads, m.block_tokens, m.width, m.width};
  const int group = m.heads / m.kv_heads;
  const Read read(s);
  const std::vector<Item> items = items_of(s.chunk, s.chunks, m.kv_heads, group);
  const std::vector<Item> last = items_of(read.chunks.data(), (int)read.chunks.size(), m.kv_heads, group);
  std::vector<Scratch> team(m.threads);
  make_room(team, items, s.chunk, group, cache);
  make_room(team, last, read.chunks.data(), group, cache);
  Shares shares(4 * m.layers + 1, m.threads);
  const int64_t wide_each = std::max({wide_floats(m.hidden), wide_floats(q_width), wide_floats(m.inner)});
  std::vector<float> all_wide(sizeof(T) < sizeof(float) ? wide_each * m.threads : 0);
#pragma omp parallel num_threads(m.threads)
  {
    Scratch& scratch = team[omp_get_thread_num()];
    float* wide = all_wide.data() + (all_wide.empty() ? 0 : wide_each * omp_get_thread_num());
    Tiles normed = places.normed, attended = places.attended, inner = places.inner;
    int64_t n = tokens;
#pragma omp for
    for (int64_t t = 0; t < n; t++) embed<T>(m, s.ids[t], x + t * m.hidden);
    for (int l = 0; l < m.layers; l++) {
      const Layer& y = m.layer[l];
      C *keys = (C*)y.keys, *values = (C*)y.values;
#pragma omp for
      for (int64_t t = 0; t < n; t++)
        rms_norm(x + t * m.hidden, y.norm_in, m.epsilon, normed, t);
      product<T>(shares, 4 * l, normed, (const T*)y.qkv, n, {qkv, all_width, y.qkv_bias, all_width, STORE}, wide);
#pragma omp for
      for (int64_t t = 0; t < n; t++) {
        float* row = qkv + t * all_width;
        const float *c = m.cosines + (int64_t)s.positions[t] * (m.width / 2),
                    *z = m.sines + (int64_t)s.positions[t] * (m.width / 2);
        for (int h = 0; h < m.heads + m.kv_heads; h++) {
          float* head = row + h * m.width;
          const float* norm = h < m.heads ? y.query_norm : y.key_norm;
          if (norm) rms_norm(head, norm, m.epsilon, m.width, head);
          rotate(head, c, z, m.width / 2);
        }
        write_token<C>(row + q_width, row + q_width + kv_width, keys, values, s.slots[t], cache);
      }
      if (l < m.layers - 1) {
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < items.size(); i++) {
          const Chunk& chunk = s.chunk[items[i].chunk];
          attend<C>(items[i], chunk, s.tables + chunk.table, cache, group, m.scale, qkv, all_width, keys, values,
                    attended, scratch);
        }
      } else {
        n = (int64_t)read.rows.size();
        normed = normed.of(n), attended = attended.of(n), inner = inner.of(n);
        const Placed out = {attended, read.place.data()};
#pragma omp single
        for (int64_t t = 0; t < n; t++)  // in order, so that no row is overwritten before it is read
          if (read.rows[t] != t) std::copy_n(x + read.rows[t] * (int64_t)m.hidden, m.hidden, x + t * m.hidden);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < last.size(); i++) {
          const Chunk& chunk = read.chunks[last[i].chunk];
          attend<C>(last[i], chunk, s.tables + chunk.table, cache, group, m.scale, qkv, all_width, keys, values, out,
                    scratch);
        }
      }
      product<T>(shares, 4 * l + 1, attended, (const T*)y.o, n, {x, m.hidden, y.o_bias, m.hidden, ADD}, wide);
#pragma omp for
      for (int64_t t = 0; t < n; t++)
        rms_norm(x + t * m.hidden, y.norm_mid, m.epsilon, normed, t);
      product<T>(shares, 4 * l + 2, normed, (const T*)y.gate_up, n,
                 {inner.at, inner.height, nullptr, m.inner, GATE}, wide);
      product<T>(shares, 4 * l + 3, inner, (const T*)y.down, n, {x, m.hidden, nullptr, m.hidden, ADD}, wide);
    }
#pragma omp for
    for (int i = 0; i < s.pooled; i++)
      rms_norm(x + (int64_t)read.pooled[i] * m.hidden, m.norm, m.epsilon, m.hidden, s.states + (int64_t)i * m.hidden);
    normed = normed.of(s.samples);
#pragma omp for
    for (int i = 0; i < s.samples; i++)
      rms_norm(x + (int64_t)read.sampled[i] * m.hidden, m.norm, m.epsilon, normed, i);
    product<T>(shares, 4 * m.layers, normed, (const T*)m.head, s.samples,
               {s.logits, m.vocabulary, nullptr, m.vocabulary, STORE}, wide);
  }
}
