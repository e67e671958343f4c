// One whole step of a Llama-shaped model.
//
// Structures here and in `native.py` must be the same.
#pragma once

#include "attend.h"
#include "matrix.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

extern "C" {

struct Layer {
  Matrix qkv, o, gate_up, down;  // gate_up: panels that both share
  const float *norm_in, *norm_mid;
  const float *qkv_bias, *o_bias, *query_norm, *key_norm;  // or null
  void *keys, *values;
};

struct Model {
  int32_t layers, hidden, heads, kv_heads, width, inner, vocabulary, block_tokens, threads;
  int32_t short_cache;  // keys and values are bfloat16, else float32
  int32_t short_sums;   // products may be of bfloat16 and of integers, else of float32 only
  float epsilon, scale;
  const Layer* layer;
  Matrix head, embedding;  // embedding: the head again where they are tied
  const float *norm, *cosines, *sines;  // cosines, sines: [positions, width / 2]
};

struct Step {
  int32_t tokens, chunks, samples, pooled;
  const int32_t *ids, *positions;
  const int64_t* slots;  // block * block_tokens + offset
  const Chunk* chunk;
  const int32_t *tables, *sampled, *pooled_rows;
  float* logits;    // [samples, vocabulary]
  float* states;    // [pooled, hidden] what the head reads, of pooled_rows
  void* workspace;  // hw_workspace bytes
};
}

static float rms_scale(const float* x, float epsilon, int n) { return 1.0f / std::sqrt(dot(x, x, n) / n + epsilon); }

static void rms_norm(const float* x, const float* weight, float epsilon, int n, float* to) {
  const float scale = rms_scale(x, epsilon, n);
  int i = 0;
  for (; i + W <= n; i += W) store(to + i, load(weight + i) * (load(x + i) * scale));
  for (; i < n; i++) to[i] = weight[i] * (x[i] * scale);
}

template <class A>
static void rms_norm(const float* x, const float* weight, float epsilon, const Tiles<A>& to, int64_t row) {
  const float scale = rms_scale(x, epsilon, to.columns);
  int i = 0;
  for (; i + W <= to.columns; i += W) store(to.place(row, i), load(weight + i) * (load(x + i) * scale));
  for (; i < to.columns; i++) narrow(weight[i] * (x[i] * scale), to.place(row, i));
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

// Of a step's activations, all in one workspace.
template <class A>
struct Places {
  float* x;         // [tokens, hidden]
  Tiles<A> normed;  // [tokens, hidden]
  A* qkv;           // [tokens, q_width + 2 * kv_width]
  Tiles<A> attended, inner;
  int64_t bytes;

  Places(const Model& m, int64_t tokens, void* workspace) : bytes(0) {  // null: only counts
    const int q_width = m.heads * m.width, kv_width = m.kv_heads * m.width;
    auto take = [&](int64_t n) {  // each begins a cache line
      char* at = workspace ? (char*)workspace + bytes : nullptr;
      bytes += (n + LINE - 1) / LINE * LINE;
      return at;
    };
    auto tiles = [&](int columns) {
      return Tiles<A>{(A*)take(Tiles<A>::elements(tokens, columns) * (int64_t)sizeof(A)), columns, 1}.of(tokens);
    };
    x = (float*)take(tokens * m.hidden * (int64_t)sizeof(float));
    normed = tiles(m.hidden);
    qkv = (A*)take(tokens * (q_width + 2 * kv_width) * (int64_t)sizeof(A));
    attended = tiles(q_width);
    inner = tiles(m.inner);
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

template <class A>
struct Placed {  // rows that are written somewhere else
  const Tiles<A>& to;
  const int32_t* place;

  void put(int64_t row, int column, const float* from, int n) const { to.put(place[row], column, from, n); }
};

// A: of activations. C: of keys and values. Every stage is called by every thread of a team and ends in a barrier.
template <class A, class C>
class Forward {
 public:
  Forward(const Model& m, const Step& s)
      : m_(m), s_(s), q_width_(m.heads * m.width), kv_width_(m.kv_heads * m.width),
        all_width_(q_width_ + 2 * kv_width_), group_(m.heads / m.kv_heads),
        cache_{m.kv_heads, m.block_tokens, m.width, m.width}, places_(m, s.tokens, s.workspace), read_(s),
        items_(items_of(s.chunk, s.chunks, m.kv_heads, group_, m.threads)),
        last_items_(items_of(read_.chunks.data(), (int)read_.chunks.size(), m.kv_heads, group_, m.threads)),
        team_(m.threads), wide_rows_(sizeof(A) < sizeof(float) ? (size_t)all_width_ * m.threads : 0),
        shares_(4 * m.layers + 1, m.threads) {
    make_room(team_, items_, s.chunk, group_, cache_);
    make_room(team_, last_items_, read_.chunks.data(), group_, cache_);
    for (int l = 0; l < m.layers; l++)
      for (const Matrix* matrix : {&m.layer[l].qkv, &m.layer[l].o, &m.layer[l].gate_up, &m.layer[l].down})
        bench_.make_room(*matrix, m.threads);
    bench_.make_room(m.head, m.threads);
  }

  void run() {
#pragma omp parallel num_threads(m_.threads)
    {
      Tiles<A> normed = places_.normed, attended = places_.attended, inner = places_.inner;
      int64_t rows = s_.tokens;
      normed.clear_rest(rows);
      attended.clear_rest(rows);
      inner.clear_rest(rows);
      embed();
      for (int l = 0; l < m_.layers; l++) {
        const Layer& layer = m_.layer[l];
        norm(layer.norm_in, rows, normed);
        multiply(shares_, 4 * l, normed, layer.qkv, rows, rows_of(places_.qkv, all_width_, layer.qkv_bias, STORE),
                 bench_, m_.short_sums);
        rotate_and_keep(layer);
        if (l < m_.layers - 1) {
          attend_items(layer, items_, s_.chunk, attended);
        } else {
          rows = (int64_t)read_.rows.size();
          normed = normed.of(rows), attended = attended.of(rows), inner = inner.of(rows);
          attended.clear_rest(rows);  // tiles of another height lie elsewhere
          inner.clear_rest(rows);
          normed.clear_rest(rows);
          move_up();
          attend_items(layer, last_items_, read_.chunks.data(), Placed<A>{attended, read_.place.data()});
        }
        multiply(shares_, 4 * l + 1, attended, layer.o, rows, rows_of(places_.x, m_.hidden, layer.o_bias, ADD), bench_,
                 m_.short_sums);
        norm(layer.norm_mid, rows, normed);
        multiply(shares_, 4 * l + 2, normed, layer.gate_up, rows,
                 Out<A>{nullptr, 0, nullptr, m_.inner, GATE, inner}, bench_, m_.short_sums);
        multiply(shares_, 4 * l + 3, inner, layer.down, rows, rows_of(places_.x, m_.hidden, nullptr, ADD), bench_,
                 m_.short_sums);
      }
      give_states();
      give_logits(normed);
      tiles_release();
    }
  }

 private:
  static Out<A> rows_of(float* to, int width, const float* bias, Mode mode) {
    return {to, width, bias, width, mode, Tiles<A>{nullptr, 1, 1}};
  }
#if HEADWAY_BF16
  static Out<A> rows_of(bf16* to, int width, const float* bias, Mode mode) {
    return {nullptr, width, bias, width, mode, Tiles<A>{nullptr, 1, 1}, to};
  }
#endif

  void embed() {
#pragma omp for
    for (int64_t t = 0; t < s_.tokens; t++) matrix_row(m_.embedding, s_.ids[t], places_.x + t * m_.hidden);
  }

  void norm(const float* weight, int64_t rows, const Tiles<A>& to) {
#pragma omp for
    for (int64_t t = 0; t < rows; t++) rms_norm(places_.x + t * m_.hidden, weight, m_.epsilon, to, t);
  }

  // Queries and keys take their positions; keys and values go to their slots.
  void rotate_and_keep(const Layer& layer) {
    const int half = m_.width / 2;
#pragma omp for
    for (int64_t t = 0; t < s_.tokens; t++) {
      A* const stored = places_.qkv + t * all_width_;
      float* const row = wide_row(stored);
      const int64_t position = s_.positions[t];
      for (int h = 0; h < m_.heads + m_.kv_heads; h++) {
        float* head = row + h * m_.width;
        const float* weight = h < m_.heads ? layer.query_norm : layer.key_norm;
        if (weight) rms_norm(head, weight, m_.epsilon, m_.width, head);
        rotate(head, m_.cosines + position * half, m_.sines + position * half, half);
      }
      write_token<C>(row + q_width_, row + q_width_ + kv_width_, (C*)layer.keys, (C*)layer.values, s_.slots[t],
                     cache_);
      if constexpr (sizeof(A) < sizeof(float)) put_row(row, q_width_, stored);
    }
  }

  // The row of queries, keys and values in float32: itself, or a copy of the thread's own.
  float* wide_row(float* stored) { return stored; }
#if HEADWAY_BF16
  float* wide_row(bf16* stored) {
    float* row = wide_rows_.data() + (size_t)all_width_ * omp_get_thread_num();
    put_row(stored, all_width_, row);
    return row;
  }
#endif

  template <class To>
  void attend_items(const Layer& layer, const std::vector<Item>& items, const Chunk* chunks, const To& to) {
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < items.size(); i++) {
      const Chunk& chunk = chunks[items[i].chunk];
      attend<C>(items[i], chunk, s_.tables + chunk.table, cache_, group_, m_.scale, places_.qkv, all_width_,
                (const C*)layer.keys, (const C*)layer.values, to, team_[omp_get_thread_num()]);
    }
  }

  // From now on `x` has the rows that are read only.
  void move_up() {
#pragma omp single
    for (size_t t = 0; t < read_.rows.size(); t++)  // in order, so that no row is overwritten before it is read
      if (read_.rows[t] != (int32_t)t)
        std::copy_n(places_.x + read_.rows[t] * (int64_t)m_.hidden, m_.hidden, places_.x + t * m_.hidden);
  }

  void give_states() {
#pragma omp for
    for (int i = 0; i < s_.pooled; i++)
      rms_norm(places_.x + (int64_t)read_.pooled[i] * m_.hidden, m_.norm, m_.epsilon, m_.hidden,
               s_.states + (int64_t)i * m_.hidden);
  }

  void give_logits(Tiles<A> normed) {
    normed = normed.of(s_.samples);
    normed.clear_rest(s_.samples);
#pragma omp for
    for (int i = 0; i < s_.samples; i++)
      rms_norm(places_.x + (int64_t)read_.sampled[i] * m_.hidden, m_.norm, m_.epsilon, normed, i);
    multiply(shares_, 4 * m_.layers, normed, m_.head, s_.samples, rows_of(s_.logits, m_.vocabulary, nullptr, STORE),
             bench_, m_.short_sums);
  }

  const Model& m_;
  const Step& s_;
  const int q_width_, kv_width_, all_width_, group_;
  const Cache cache_;
  const Places<A> places_;
  const Read read_;
  const std::vector<Item> items_, last_items_;
  std::vector<Scratch> team_;     // a thread's each
  std::vector<float> wide_rows_;  // likewise
  Shares shares_;
  Workbench bench_;
};

#if HEADWAY_BF16
// A file may have some of its matrices in groups and others plain.
static bool all_in_groups(const Model& m) {
  for (int l = 0; l < m.layers; l++)
    for (const Matrix* matrix : {&m.layer[l].qkv, &m.layer[l].o, &m.layer[l].gate_up, &m.layer[l].down})
      if (!in_groups(*matrix)) return false;
  return in_groups(m.head);
}
#endif

// Whether a step's activations are bfloat16: where products are, but for few rows with quantized weights alone, which
// are multiplied as integers.
static bool short_activations(const Model& m, int64_t tokens) {
#if HEADWAY_BF16
  return m.short_sums && (tokens > FEW_ROWS || !all_in_groups(m));
#else
  (void)m, (void)tokens;
  return false;
#endif
}

static int64_t workspace_bytes(const Model& m, int64_t tokens) {
  const int64_t floats = Places<float>(m, tokens, nullptr).bytes;
#if HEADWAY_BF16
  return std::max(floats, Places<bf16>(m, tokens, nullptr).bytes);
#else
  return floats;
#endif
}

static void run(const Model& m, const Step& s) {
#if HEADWAY_BF16
  if (short_activations(m, s.tokens)) {
    Forward<bf16, bf16>(m, s).run();
    return;
  }
#endif
  if (m.short_cache) Forward<float, bf16>(m, s).run();
  else Forward<float, float>(m, s).run();
}
