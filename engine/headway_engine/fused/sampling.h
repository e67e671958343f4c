// Logits to tokens, a row at a time and each row by one thread, so that no row depends on its neighbours.
//
// Tokens rank by value, then by token id. Nothing is sorted but a few dozen of them: the row is counted into
// buckets of falling probability, with the mass of each, and a rank or a mass is then looked for inside the one
// bucket where it is reached. Sums are in double precision. Knows nothing of where logits come from.
#pragma once

#include "vectors.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

constexpr int BUCKETS = 256;
constexpr int MASSLESS = BUCKETS - 1;  // the bucket of what cannot be drawn
constexpr float REACH = 16.0f;         // buckets are equal parts of so many nats at most; the last has the rest
constexpr float NOTHING = -87.0f;      // e^x is taken as zero below: exp_ ends there
constexpr int COPIES = 4;              // of the counts, since adding to one and the same place again waits
constexpr int FEW = 64;                // tokens that are sorted
constexpr int RUN = 64;                // tokens that are looked through or summed at a time

extern "C" {

struct Wish {  // how a row is drawn
  double uniform, top_p, min_p;
  float warmth;   // one over the temperature; 0: the likeliest token
  int32_t top_k;  // 0: no cut
};
}

typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint64_t Words __attribute__((vector_size(16)));
typedef double Count __attribute__((vector_size(16)));  // mass, tokens

struct Place {  // a token and how far down it is
  int32_t token;
  int64_t rank;  // from 1
  double mass;   // of it and all above
};

struct Until {  // where a walk down the ranks ends: at the first token with more than `mass`, or at `rank`
  double mass;
  int64_t rank;
  bool met(double m, int64_t r) const { return m > mass || r >= rank; }
};

struct Bench {  // where one thread works
  uint64_t* listed;
  float* mass;
  uint8_t* bucket;
};

static int64_t padded(int64_t n) { return (n + RUN - 1) / RUN * RUN; }

static int64_t bench_bytes(int64_t vocabulary) { return padded(vocabulary) * (8 + 4 + 1); }

static Bench bench_at(void* memory, int64_t vocabulary) {
  char* at = (char*)memory;
  int64_t n = padded(vocabulary);
  return {(uint64_t*)at, (float*)(at + 8 * n), (uint8_t*)(at + 12 * n)};
}

struct Range {
  float low, high;  // both are NaN where any value is
};

static Range range_of(const float* x, int n) {
  vf low[2] = {all(INFINITY), all(INFINITY)}, high[2] = {all(-INFINITY), all(-INFINITY)};
  vi odd = vi{};
  int i = 0;
  for (; i + 2 * W <= n; i += 2 * W)
    for (int j = 0; j < 2; j++) {
      vf v = load(x + i + j * W);
      low[j] = v < low[j] ? v : low[j];
      high[j] = v > high[j] ? v : high[j];
      odd |= v != v;
    }
  Range found = {INFINITY, -INFINITY};
  bool none = false;
  for (int lane = 0; lane < W; lane++) {
    found.low = std::min({found.low, low[0][lane], low[1][lane]});
    found.high = std::max({found.high, high[0][lane], high[1][lane]});
    none |= odd[lane] != 0;
  }
  for (; i < n; i++) {
    found.low = std::min(found.low, x[i]);
    found.high = std::max(found.high, x[i]);
    none |= x[i] != x[i];
  }
  return none ? Range{NAN, NAN} : found;
}

static int first_of(const float* x, int n, float value) {
  for (int start = 0; start < n; start += RUN) {
    int end = std::min(n, start + RUN);
    bool any = false;
    for (int i = start; i < end; i++) any |= x[i] == value;
    if (any) return (int)(std::find(x + start, x + end, value) - x);
  }
  return 0;
}

// Masses of all tokens, the likeliest having 1, and their buckets; both padded with nothing.
static void weigh_row(const float* x, int n, Range range, float warmth, const Bench& b) {
  const float reach = std::min(REACH, (range.high - range.low) * warmth);
  const vf scale = all(reach > 0 ? (0.5f - MASSLESS) / reach : 0.0f);
  const vf last = all(MASSLESS - 1), least = all(NOTHING), top = all(range.high);
  float* const masses = b.mass;
  uint8_t* const buckets = b.bucket;
  for (int start = 0; start < n; start += RUN) {
    const float* from = x + start;
    float rest[RUN];
    if (start + RUN > n) {
      std::fill(std::copy(from, x + n, rest), rest + RUN, -INFINITY);
      from = rest;
    }
    int32_t numbers[RUN];
    for (int i = 0; i < RUN; i += W) {
      vf below = (load(from + i) - top) * warmth;
      vf mass = below < least ? vf{} : exp_(below);
      vf part = below * scale;
      part = part < last ? part : last;
      vi number = __builtin_convertvector(part, vi);
      store(masses + start + i, mass);
      *(vi*)(numbers + i) = mass > 0 ? number : vi{} + MASSLESS;
    }
    for (int i = 0; i < RUN; i++) buckets[start + i] = (uint8_t)numbers[i];
  }
  if (reach == 0)  // all alike: only their ids tell them apart
    for (int i = 0; i < n; i++) buckets[i] = (uint8_t)((int64_t)i * MASSLESS / n);
}

// Sums up n tokens: `where(i)` is the bucket of the i-th and `mass(i)` what it weighs.
template <class Where, class Mass>
static void count(int n, Count* counts, Where where, Mass mass) {
  Count copies[COPIES][BUCKETS] = {};
  int i = 0;
  for (; i + COPIES <= n; i += COPIES)
    for (int j = 0; j < COPIES; j++) copies[j][where(i + j)] += Count{mass(i + j), 1.0};
  for (; i < n; i++) copies[0][where(i)] += Count{mass(i), 1.0};
  for (int k = 0; k < BUCKETS; k++) counts[k] = (copies[0][k] + copies[1][k]) + (copies[2][k] + copies[3][k]);
}

// An integer that falls with the rank: the value turned over, then the token id.
static inline uint64_t in_order(float value, int32_t token) {
  uint32_t u;
  value += 0.0f;  // one zero only
  memcpy(&u, &value, 4);
  u = u & 0x80000000u ? u : ~u & 0x7fffffffu;
  return (uint64_t)u << 32 | (uint32_t)token;
}

// Tokens of one bucket, in order of their ids.
static int list_bucket(const float* x, const Bench& b, int n, int wanted) {
  const Bytes same = Bytes{} + (uint8_t)wanted;
  int found = 0;
  for (int start = 0; start < n; start += RUN) {
    Words hits[RUN / 16], any = {};
    for (int k = 0; k < RUN / 16; k++) any |= hits[k] = (Words)(*(const Bytes*)(b.bucket + start + 16 * k) == same);
    if (!(any[0] | any[1])) continue;
    for (int k = 0; k < RUN / 8; k++) {
      if (!hits[k / 2][k % 2]) continue;
      for (int i = start + 8 * k; i < start + 8 * k + 8; i++)
        if (b.bucket[i] == wanted) b.listed[found++] = in_order(x[i], i);
    }
  }
  return found;
}

// The bucket, of `n`, in which the walk ends, or the last that has any token; `at` moves to where it begins.
static int bucket_of(const Count* counts, int n, const Until& until, Place& at) {
  int last = 0;
  Place before = at;
  for (int k = 0; k < n; k++) {
    if (counts[k][1] == 0) continue;
    before = at;
    last = k;
    at.mass += counts[k][0];
    at.rank += (int64_t)counts[k][1];
    if (until.met(at.mass, at.rank)) break;
  }
  at = before;
  return last;
}

// The token at which the walk ends: the last one with any mass if it never does.
static Place walk(const float* x, int n, const Bench& b, const Count* counts, const Until& until) {
  Place at = {0, 0, 0.0};
  int listed = list_bucket(x, b, n, bucket_of(counts, MASSLESS, until, at));
  uint64_t* const list = b.listed;
  while (listed > FEW) {  // what is listed is all different, so every round has fewer
    uint64_t first = list[0], last = first;
    for (int i = 0; i < listed; i++) first = std::min(first, list[i]), last = std::max(last, list[i]);
    int shift = 0;
    while ((last - first) >> shift >= (uint64_t)BUCKETS) shift++;
    Count parts[BUCKETS];
    count(
        listed, parts, [&](int i) { return (list[i] - first) >> shift; },
        [&](int i) { return b.mass[(uint32_t)list[i]]; });
    const uint64_t wanted = (uint64_t)bucket_of(parts, BUCKETS, until, at);
    int kept = 0;
    for (int i = 0; i < listed; i++)
      if ((list[i] - first) >> shift == wanted) list[kept++] = list[i];
    listed = kept;
  }
  std::sort(list, list + listed);
  for (int i = 0; i < listed; i++) {
    at.token = (int32_t)(uint32_t)list[i];
    at.rank++;
    at.mass += b.mass[at.token];
    if (until.met(at.mass, at.rank)) break;
  }
  return at;
}

static int64_t tokens_above(const float* x, int n, float top, float warmth, float floor) {
  int32_t found = 0;
  for (int i = 0; i < n; i++) found += (x[i] - top) * warmth >= floor;
  return found;
}

// Temperature is in the masses. top_k first, then top_p of the mass it left; min_p of the likeliest token's mass.
static int draw_cut(const float* x, int n, Range range, const Wish& w, const Bench& b) {
  Count counts[BUCKETS];
  weigh_row(x, n, range, w.warmth, b);
  count((int)padded(n), counts, [&](int i) { return b.bucket[i]; }, [&](int i) { return b.mass[i]; });
  Until cut = {INFINITY, w.top_k > 0 ? w.top_k : INT64_MAX};
  if (w.top_p < 1.0) {
    double left = 0.0;
    if (w.top_k > 0 && w.top_k < n) left = walk(x, n, b, counts, cut).mass;
    else for (int k = 0; k < MASSLESS; k++) left += counts[k][0];
    cut.mass = std::nextafter(w.top_p * left, -INFINITY);  // the token that reaches the share is the last one kept
  }
  if (w.min_p > 0.0)
    cut.rank = std::min(cut.rank, tokens_above(x, n, range.high, w.warmth, (float)std::log(w.min_p)));
  const Place kept = walk(x, n, b, counts, cut);
  return walk(x, n, b, counts, {w.uniform * kept.mass, kept.rank}).token;
}

static double sum_run(const float* x) {
  double lanes[8] = {};
  for (int i = 0; i < RUN; i += 8)
    for (int j = 0; j < 8; j++) lanes[j] += x[i + j];
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

// Without any cut the order of token ids does, and nothing needs to be ranked.
static int draw_whole(const float* x, int n, Range range, const Wish& w, const Bench& b) {
  weigh_row(x, n, range, w.warmth, b);
  double* const sums = (double*)b.listed;
  double total = 0.0;
  const int runs = (int)(padded(n) / RUN);
  for (int r = 0; r < runs; r++) total += sums[r] = sum_run(b.mass + r * RUN);
  // Rounding may leave the target a hair past a sum: then it is the last token with any mass.
  const double target = w.uniform * total;
  double walked = 0.0, before = 0.0;
  int run = 0, token = 0;
  for (int r = 0; r < runs && walked <= target; r++) {
    if (sums[r] == 0) continue;
    run = r;
    before = walked;
    walked += sums[r];
  }
  for (int i = run * RUN; i < (run + 1) * RUN && before <= target; i++) {
    if (b.mass[i] > 0) token = i;
    before += b.mass[i];
  }
  return token;
}

static int sample_row(const float* x, int n, const Wish& w, const Bench& b) {
  const Range range = range_of(x, n);
  if (w.warmth == 0 || !std::isfinite(range.high)) return first_of(x, n, range.high);
  const bool whole = w.top_k == 0 && w.top_p >= 1.0 && w.min_p <= 0.0;
  return whole ? draw_whole(x, n, range, w, b) : draw_cut(x, n, range, w, b);
}

static void sample_rows(const float* logits, int rows, int vocabulary, const Wish* wishes, int32_t* tokens, void* memory,
                        int threads) {
#pragma omp parallel num_threads(std::min(threads, rows))
  {
    const Bench bench = bench_at((char*)memory + omp_get_thread_num() * bench_bytes(vocabulary), vocabulary);
#pragma omp for schedule(dynamic, 1)
    for (int r = 0; r < rows; r++)
      tokens[r] = sample_row(logits + (int64_t)r * vocabulary, vocabulary, wishes[r], bench);
  }
}

static void highest_of_rows(const float* logits, int rows, int vocabulary, float* highest, int threads) {
#pragma omp parallel for num_threads(std::min(threads, rows))
  for (int r = 0; r < rows; r++) highest[r] = range_of(logits + (int64_t)r * vocabulary, vocabulary).high;
}
