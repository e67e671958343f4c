// CPU kernels: paged attention, and one whole step of a Llama-shaped model in one call.
//
// Plain C entry points, no torch headers: a build takes seconds. The file is compiled once per instruction set
// (-mavx512..., -mavx2 -mfma, or the baseline) and the loader picks at run time; the code speaks of vectors of
// W floats through the compiler's vector extension. Threads are OpenMP's, shared with torch.
//
// Activations are float32. Weights, keys and values are float32 or bfloat16 (widened while they are read).
// Weights lie in panels of NR output columns: panel[k][NR]. Gate and up projections share panels, W columns each.

#include <omp.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__AVX512F__)
constexpr int W = 16, MR = 12;
#elif defined(__AVX2__)
constexpr int W = 8, MR = 6;
#else
constexpr int W = 4, MR = 4;
#endif
constexpr int NR = 2 * W;
constexpr int AHEAD = 24;              // how many rows of a panel are fetched before their turn
constexpr int ROW_BLOCK = 512;         // rows that share one pass over the weights
constexpr int SCORE_FLOATS = 1 << 16;  // scores one attention item may hold, per thread

typedef float vf __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef uint16_t bf16;

static inline vf load(const float* p) { return *(const vf*)p; }
static inline vf load(const bf16* p) { return (vf)(__builtin_convertvector(*(const vh*)p, vu) << 16); }
static inline void store(float* p, vf v) { *(vf*)p = v; }
static inline vf all(float x) { return x - vf{}; }  // not plus: -0 + 0 is +0, so that could not be folded

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline void narrow(float x, float* to) { *to = x; }
static inline void narrow(float x, bf16* to) {  // to nearest, ties to even; NaN stays NaN
  uint32_t u;
  memcpy(&u, &x, 4);
  *to = x != x ? 0x7fc0 : (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// e^x to about one unit in the last place: Cephes' polynomial after splitting off the power of two.
static inline vf exp_(vf x) {
  vf low = all(-87.3f), high = all(88.3f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  vf scaled = x * 1.44269504088896341f;
  vi n = __builtin_convertvector(scaled + (scaled < 0 ? all(-0.5f) : all(0.5f)), vi);
  vf nf = __builtin_convertvector(n, vf);
  vf r = x - nf * 0.693359375f + nf * 2.12194440e-4f;
  vf p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (vf)((n + 127) << 23);
}

// ---- matrix products ---------------------------------------------------------------------------------

enum Mode { STORE, ADD, GATE };

struct Out {
  float* to;
  int64_t stride;
  const float* bias;
  int columns;
  Mode mode;
};

template <int M>
static inline void finish(const vf (&acc)[M][2], const Out& o, int row, int panel) {
  if (o.mode == GATE) {
    int first = panel * W, n = std::min(W, o.columns - first);
    for (int m = 0; m < M; m++) {
      vf y = acc[m][0] / (1.0f + exp_(-acc[m][0])) * acc[m][1];
      float* to = o.to + (row + m) * o.stride + first;
      if (n == W) store(to, y);
      else for (int i = 0; i < n; i++) to[i] = y[i];
    }
    return;
  }
  int first = panel * NR, n = std::min(NR, o.columns - first);
  for (int m = 0; m < M; m++) {
    float* to = o.to + (row + m) * o.stride + first;
    for (int half = 0; half < 2; half++) {
      int at = half * W, left = std::min(W, n - at);
      if (left <= 0) break;
      vf y = acc[m][half];
      if (left == W) {
        if (o.bias) y += load(o.bias + first + at);
        if (o.mode == ADD) y += load(to + at);
        store(to + at, y);
      } else {
        for (int i = 0; i < left; i++) {
          float x = y[i] + (o.bias ? o.bias[first + at + i] : 0.0f);
          to[at + i] = o.mode == ADD ? to[at + i] + x : x;
        }
      }
    }
  }
}

template <int M, class T>
static void tile(const float* a, int64_t lda, const T* panel, int k, const Out& o, int row, int number) {
  vf acc[M][2];
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = vf{};
  const float* base = a + row * lda;
  for (int i = 0; i < k; i++) {
    vf b0 = load(panel + (int64_t)i * NR), b1 = load(panel + (int64_t)i * NR + W);
    __builtin_prefetch(panel + (int64_t)(i + AHEAD) * NR);
    __builtin_prefetch(panel + (int64_t)(i + AHEAD) * NR + W);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      vf x = all(base[m * lda + i]);
      acc[m][0] += x * b0;
      acc[m][1] += x * b1;
    }
  }
  finish<M>(acc, o, row, number);
}

template <int M, class T>
static inline void rows_left(int m, const float* a, int64_t lda, const T* panel, int k, const Out& o, int row,
                             int number) {
  if constexpr (M > 0) {
    if (m == M) tile<M, T>(a, lda, panel, k, o, row, number);
    else rows_left<M - 1, T>(m, a, lda, panel, k, o, row, number);
  }
}

// out[rows, columns] (mode)= a[rows, k] x panels. Called by every thread of a team; ends in a barrier.
template <class T>
static void product(const float* a, int64_t lda, const T* weights, int rows, int k, const Out& o) {
  int width = o.mode == GATE ? W : NR, panels = (o.columns + width - 1) / width;
  for (int block = 0; block < rows; block += ROW_BLOCK) {
    int end = std::min(rows, block + ROW_BLOCK);
#pragma omp for schedule(dynamic, 2)
    for (int p = 0; p < panels; p++) {
      const T* panel = weights + (int64_t)p * k * NR;
      int row = block;
      for (; row + MR <= end; row += MR) tile<MR, T>(a, lda, panel, k, o, row, p);
      if (row < end) rows_left<MR - 1, T>(end - row, a, lda, panel, k, o, row, p);
    }
  }
}

// ---- attention ---------------------------------------------------------------------------------------

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

static inline float sum_of(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 x = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

static inline float dot(const float* a, const float* b, int n) {
  vf s0 = vf{}, s1 = vf{};
  int i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    s0 += load(a + i) * load(b + i);
    s1 += load(a + i + W) * load(b + i + W);
  }
  for (; i + W <= n; i += W) s0 += load(a + i) * load(b + i);
  float s = sum_of(s0 + s1);
  for (; i < n; i++) s += a[i] * b[i];
  return s;
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

// ---- a Llama-shaped model ------------------------------------------------------------------------------

extern "C" {

struct Layer {
  const void *qkv, *o, *gate_up, *down;  // panels
  const float *norm_in, *norm_mid;
  const float *qkv_bias, *o_bias, *query_norm, *key_norm;  // or null
  void *keys, *values;
};

struct Model {
  int32_t layers, hidden, heads, kv_heads, width, inner, vocabulary, block_tokens, is_bf16, threads;
  float epsilon, scale;
  const Layer* layer;
  const void* head;       // panels
  const void* embedding;  // [vocabulary, hidden]; null: read from the head's panels (tied)
  const float *norm, *cosines, *sines;  // cosines, sines: [positions, width / 2]
};

struct Step {
  int32_t tokens, chunks, samples;
  const int32_t *ids, *positions;
  const int64_t* slots;  // block * block_tokens + offset
  const Chunk* chunk;
  const int32_t *tables, *sampled;
  float* logits;     // [samples, vocabulary]
  float* workspace;  // hw_workspace floats
};
}

static void rms_norm(const float* x, const float* weight, float epsilon, int n, float* to) {
  float mean = dot(x, x, n) / n;
  float scale = 1.0f / std::sqrt(mean + epsilon);
  int i = 0;
  for (; i + W <= n; i += W) store(to + i, load(weight + i) * (load(x + i) * scale));
  for (; i < n; i++) to[i] = weight[i] * (x[i] * scale);
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

template <class T>
static void run(const Model& m, const Step& s) {
  const int q_width = m.heads * m.width, kv_width = m.kv_heads * m.width, all_width = q_width + 2 * kv_width;
  const int64_t n = s.tokens;
  float* x = s.workspace;
  float* normed = x + n * m.hidden;
  float* qkv = normed + n * m.hidden;
  float* attended = qkv + n * all_width;
  float* inner = attended + n * q_width;
  const Cache cache = {m.kv_heads, m.block_tokens, m.width, m.width};
  const int group = m.heads / m.kv_heads;
  const std::vector<Item> items = items_of(s.chunk, s.chunks, m.kv_heads, group);
  std::vector<Scratch> team = scratch_of(m.threads, items, s.chunk, group, cache);
#pragma omp parallel num_threads(m.threads)
  {
    Scratch& scratch = team[omp_get_thread_num()];
#pragma omp for
    for (int64_t t = 0; t < n; t++) embed<T>(m, s.ids[t], x + t * m.hidden);
    for (int l = 0; l < m.layers; l++) {
      const Layer& y = m.layer[l];
      T *keys = (T*)y.keys, *values = (T*)y.values;
#pragma omp for
      for (int64_t t = 0; t < n; t++)
        rms_norm(x + t * m.hidden, y.norm_in, m.epsilon, m.hidden, normed + t * m.hidden);
      product<T>(normed, m.hidden, (const T*)y.qkv, n, m.hidden, {qkv, all_width, y.qkv_bias, all_width, STORE});
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
        write_token<T>(row + q_width, row + q_width + kv_width, keys, values, s.slots[t], cache);
      }
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < items.size(); i++) {
        const Chunk& chunk = s.chunk[items[i].chunk];
        attend<T>(items[i], chunk, s.tables + chunk.table, cache, group, m.scale, qkv, all_width, keys, values,
                  attended, q_width, scratch);
      }
      product<T>(attended, q_width, (const T*)y.o, n, q_width, {x, m.hidden, y.o_bias, m.hidden, ADD});
#pragma omp for
      for (int64_t t = 0; t < n; t++)
        rms_norm(x + t * m.hidden, y.norm_mid, m.epsilon, m.hidden, normed + t * m.hidden);
      product<T>(normed, m.hidden, (const T*)y.gate_up, n, m.hidden, {inner, m.inner, nullptr, m.inner, GATE});
      product<T>(inner, m.inner, (const T*)y.down, n, m.inner, {x, m.hidden, nullptr, m.hidden, ADD});
    }
#pragma omp for
    for (int i = 0; i < s.samples; i++)
      rms_norm(x + (int64_t)s.sampled[i] * m.hidden, m.norm, m.epsilon, m.hidden, normed + (int64_t)i * m.hidden);
    product<T>(normed, m.hidden, (const T*)m.head, s.samples, m.hidden,
               {s.logits, m.vocabulary, nullptr, m.vocabulary, STORE});
  }
}

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

template <class T>
static void pack(const T* from, int n, int k, T* to, int first, int width) {
  int panels = (n + width - 1) / width;
#pragma omp parallel for
  for (int p = 0; p < panels; p++)
    for (int i = 0; i < k; i++)
      for (int j = 0; j < width; j++) {
        int column = p * width + j;
        to[((int64_t)p * k + i) * NR + first + j] = column < n ? from[(int64_t)column * k + i] : T(0);
      }
}

extern "C" {

int32_t hw_panel_columns() { return NR; }

int64_t hw_workspace(const Model* m, int64_t tokens) {
  return tokens * (2 * m->hidden + (2 * m->heads + 2 * m->kv_heads) * m->width + m->inner);
}

// Panels of a row-major [n, k] matrix; `to` holds ceil(n / NR) * k * NR elements.
void hw_pack(const void* from, int32_t n, int32_t k, void* to, int32_t is_bf16) {
  if (is_bf16) pack((const bf16*)from, n, k, (bf16*)to, 0, NR);
  else pack((const float*)from, n, k, (float*)to, 0, NR);
}

// Shared panels of gate and up, both [n, k]; `to` holds ceil(n / (NR / 2)) * k * NR elements.
void hw_pack_gate_up(const void* gate, const void* up, int32_t n, int32_t k, void* to, int32_t is_bf16) {
  if (is_bf16) {
    pack((const bf16*)gate, n, k, (bf16*)to, 0, W);
    pack((const bf16*)up, n, k, (bf16*)to, W, W);
  } else {
    pack((const float*)gate, n, k, (float*)to, 0, W);
    pack((const float*)up, n, k, (float*)to, W, W);
  }
}

// 0, or 1 when memory ran out before anything was computed.
int32_t hw_run(const Model* m, const Step* s) {
  try {
    if (m->is_bf16) run<bf16>(*m, *s);
    else run<float>(*m, *s);
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
}
