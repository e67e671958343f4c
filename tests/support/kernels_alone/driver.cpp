// The kernels beside plain loops in double precision: a program for machines that have no Python.
//
// Checks conversions, products of every element type, attention, and the heart of the sampler; prints a line for each
// kind of check, and one for every result that is off. Ends with 1 if any is. PAIRS are left out: no Arm set has them.

#include "attend.h"
#include "linear.h"
#include "sampling.h"

#include <unistd.h>

#ifdef _OPENMP
constexpr int THREADS = 3;
#else
constexpr int THREADS = 1;
#endif

static int bad = 0, checks = 0;

static void say(const char* text) {
  if (write(1, text, strlen(text)) < 0) bad++;
}
static void say(int64_t number) {
  char digits[24], *at = digits + sizeof digits;
  *--at = 0;
  const bool minus = number < 0;
  do *--at = (char)('0' + (minus ? -(number % 10) : number % 10));
  while (number /= 10);
  if (minus) *--at = '-';
  say(at);
}
static void say(double x) {  // as thousand millionths: no library prints numbers everywhere this runs
  if (!(x < 1e9 && x > -1e9)) say("something huge or no number");
  else say((int64_t)(x * 1e9)), say("e-9");
}

// Also false where any of them is no number.
static void expect(bool holds, const char* what, int64_t a, int64_t b, double found, double wanted) {
  checks++;
  if (holds) return;
  if (bad++ > 20) return;
  say("WRONG "), say(what), say(" ["), say(a), say(", "), say(b), say("]: "), say(found), say(" instead of "), say(wanted), say("\n");
}
static void end_of(const char* part) {
  say(part), say(": "), say((int64_t)checks), say(" checks\n");
  checks = 0;
}

static uint64_t seed = 1;
static uint32_t dice() {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(seed >> 33);
}
static float chance() { return (float)dice() / (1u << 30) - 1.0f; }  // -1 to 1

static double power(int n) {
  double x = 1.0;
  for (; n > 0; n--) x *= 2;
  for (; n < 0; n++) x /= 2;
  return x;
}
static double exact_exp(double x) {  // the 1024th power of a short series
  if (x < -700) return 0.0;
  double sum = 1.0, term = 1.0;
  for (int i = 1; i < 12; i++) sum += term *= x / 1024 / i;
  for (int i = 0; i < 10; i++) sum *= sum;
  return sum;
}
static double of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent ? (1024 + fraction) * power(exponent - 25) : fraction * power(-24);
  return bits & 0x8000 ? -size : size;
}
static double of_brain(bf16 bits) {
  const uint32_t u = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &u, 4);
  return x;
}
static bf16 a_brain() {
  const float x = chance();
  uint32_t u;
  memcpy(&u, &x, 4);
  return (bf16)(u >> 16);
}
static double size_of(double x) { return x < 0 ? -x : x; }

static void check_conversions() {
  for (uint32_t first = 0; first < 0x10000; first += W) {
    f16 halves[W];
    bf16 brains[W], back[W];
    float wide[W];
    for (int i = 0; i < W; i++) halves[i] = {(uint16_t)(first + i)}, brains[i] = (bf16)(first + i);
    store(wide, load(halves));
    for (int i = 0; i < W; i++)
      if ((halves[i].bits >> 10 & 31) != 31) {
        expect(wide[i] == of_half(halves[i].bits), "half", first + i, 0, wide[i], of_half(halves[i].bits));
        expect(widen(halves[i]) == wide[i], "one half", first + i, 0, widen(halves[i]), wide[i]);
      }
    const vf x = load(brains);
    store(back, x);
    for (int i = 0; i < W; i++) {
      const bool none = (brains[i] & 0x7fff) > 0x7f80;
      expect(none ? x[i] != x[i] : x[i] == of_brain(brains[i]), "bfloat16", first + i, 0, x[i], of_brain(brains[i]));
      expect(none ? (back[i] & 0x7fff) > 0x7f80 : back[i] == brains[i], "bfloat16 and back", first + i, 0, back[i], brains[i]);
    }
  }
  for (int i = 0; i < 4000; i++) {  // between two of them, the nearer one; of both, the even one
    float x[W], from;
    bf16 found[W], one;
    uint32_t bits = dice() % 0x7f000000 | (i & 1u) << 31;
    if (i % 3 == 0) bits = (bits & 0xffff0000) | 0x8000;
    memcpy(&from, &bits, 4);
    std::fill(x, x + W, from);
    store(found, load(x));
    narrow(from, &one);
    const bf16 low = (bf16)(bits >> 16), rest = (bf16)bits;
    const bf16 wanted = (bf16)(low + (rest > 0x8000 || (rest == 0x8000 && (low & 1))));
    for (int lane = 0; lane < W; lane++) expect(found[lane] == wanted, "rounding", i, lane, found[lane], wanted);
    expect(one == wanted, "rounding of one", i, 0, one, wanted);
  }
  for (float x = -86.0f; x < 87.0f; x += 0.37f) {
    const double wanted = exact_exp(x);
    expect(size_of(exp_(all(x))[W - 1] - wanted) <= 3e-7 * wanted, "e^x", (int64_t)x, 0, exp_(all(x))[W - 1], wanted);
  }
  float numbers[W][W];
  double sums[W] = {};
  for (int i = 0; i < W; i++)
    for (int j = 0; j < W; j++) sums[i] += numbers[i][j] = (float)(dice() % 1000);
  const vf across = sums_across<W>([&](int i) { return load(numbers[i]); });
  for (int i = 0; i < W; i++) {
    expect(across[i] == sums[i], "sums across", i, 0, across[i], sums[i]);
    expect(sum_of(load(numbers[i])) == sums[i], "sum", i, 0, sum_of(load(numbers[i])), sums[i]);
  }
  end_of("conversions");
}

struct Weights2D {  // what is packed, and what it stands for
  std::vector<float> singles;
  std::vector<uint16_t> shorts;
  std::vector<uint8_t> codes;
  std::vector<f16> scales, offsets;
  std::vector<double> exact;
};

static Weights2D weights_of(int32_t element, int n, int k, int group) {
  Weights2D w;
  w.exact.resize((size_t)n * k);
  if (element >= FOUR) {
    const int most = element >= EIGHT ? 256 : 16;
    const bool own = element == FOUR_OFFSET || element == EIGHT_OFFSET;
    for (int i = 0; i < n * (k / group); i++) {  // of either sign, some of them 0 or subnormal
      w.scales.push_back({(uint16_t)(i == 1 ? 0 : (dice() & 0x8000) | (i % 7 ? 0x2400 : 0) | (dice() & 0x3ff))});
      w.offsets.push_back({(uint16_t)((dice() & 0x8000) | 0x2800 | (dice() & 0x7ff))});
    }
    for (int i = 0; i < n * k; i++) {
      w.codes.push_back((uint8_t)(dice() % most));
      const double scale = of_half(w.scales[i / group].bits);
      w.exact[i] = w.codes[i] * scale + (own ? of_half(w.offsets[i / group].bits) : -scale * most / 2);
    }
    if (!own) w.offsets.clear();
  } else
    for (int i = 0; i < n * k; i++) {
      if (element == SINGLE) w.singles.push_back(chance()), w.exact[i] = w.singles[i];
      else if (element == BRAIN) w.shorts.push_back(a_brain()), w.exact[i] = of_brain(w.shorts[i]);
      else w.shorts.push_back((uint16_t)(dice() & 0xbfff)), w.exact[i] = of_half(w.shorts[i]);
    }
  return w;
}

template <class G>
static bool few_as_integers(G, int rows) { return rows <= FEW_ROWS && has_dot<G>(); }

static void check_product(int32_t element, const char* name, int n, int k, int group) {
  const Weights2D w = weights_of(element, n, k, group);
  const int panels = (n + NR - 1) / NR;
  std::vector<char> packed(panels * bytes_of_panel(element, k, group) + 4096);
  const void* from = element >= FOUR ? (const void*)w.codes.data()
                     : element == SINGLE ? (const void*)w.singles.data() : (const void*)w.shorts.data();
  pack_matrix(from, w.scales.data(), w.offsets.data(), n, k, element, group, packed.data(), 0, NR);
  const Matrix m = {packed.data(), n, k, element, group};
  std::vector<float> bias(n);
  for (float& x : bias) x = chance();
  for (int rows : {1, 3, 4, 5, 8, 9, 17, 40})
    for (int is_short = 0; is_short < 2; is_short++) {  // rows and results are bfloat16
      std::vector<float> a((size_t)rows * k);
      std::vector<bf16> narrow_a(a.size()), narrow_out((size_t)rows * n);
      for (size_t i = 0; i < a.size(); i++) {
        narrow_a[i] = a_brain();
        a[i] = is_short ? (float)of_brain(narrow_a[i]) : chance();
      }
      double most = 0.0;
      std::vector<double> wanted((size_t)rows * n);
      for (int r = 0; r < rows; r++)
        for (int c = 0; c < n; c++) {
          double sum = bias[c];
          for (int i = 0; i < k; i++) sum += a[(size_t)r * k + i] * w.exact[(size_t)c * k + i];
          wanted[(size_t)r * n + c] = sum;
          most = std::max(most, size_of(sum));
        }
      std::vector<float> exact_out;
      for (int short_sums = 0; short_sums < 2; short_sums++) {
        std::vector<float> out((size_t)rows * n, NAN);
        PlainRows x = {a.data(), out.data(), rows, 0};
        if (is_short) x = {narrow_a.data(), narrow_out.data(), rows, 1};
        linear(m, x, bias.data(), short_sums, THREADS);
        bool integers = false;
        if (element >= FOUR && short_sums) groups_of(element, [&](auto g) { integers = few_as_integers(g, rows); });
        const double share = is_short ? 5e-3 : integers ? 4e-4 : 3e-6;
        for (int64_t i = 0; i < (int64_t)rows * n; i++) {
          const double found = is_short ? of_brain(narrow_out[i]) : out[i];
          expect(size_of(found - wanted[i]) <= share * most, name, i / n, i % n, found, wanted[i]);
        }
        if (is_short) continue;
        if (!short_sums) exact_out = out;
        else expect(integers == (out != exact_out), "products of integers ran where they should", element, rows, integers, 0);
      }
    }
  const int64_t ids[] = {0, n - 1, n / 2};
  std::vector<float> read((size_t)3 * k);
  gather_rows(m, ids, {nullptr, read.data(), 3, 0}, THREADS);
  for (int r = 0; r < 3; r++)
    for (int i = 0; i < k; i++) {
      const double wanted = w.exact[ids[r] * k + i], found = read[(size_t)r * k + i];
      expect(size_of(found - wanted) <= 1e-6 * (1.0 + size_of(wanted)), "row of a matrix", ids[r], i, found, wanted);
    }
}

static void check_products() {
  const struct { int32_t element; const char* name; } kinds[] = {
      {SINGLE, "float32"}, {BRAIN, "bfloat16"}, {HALF, "half"}, {FOUR, "4 bits"}, {FOUR_OFFSET, "4 bits with offsets"},
      {EIGHT, "8 bits"}, {EIGHT_OFFSET, "8 bits with offsets"}};
  for (const auto& kind : kinds) {
    const bool groups = kind.element >= FOUR;
    check_product(kind.element, kind.name, 70, 96, groups ? 32 : 0);
    check_product(kind.element, kind.name, 33, groups ? 320 : 333, groups ? 16 : 0);
    end_of(kind.name);
  }
}

struct Part {  // of a step: `length` tokens of a sequence, from `start` on
  int start, length;
};

template <class T>
static double a_value(T* to);
template <>
double a_value(float* to) { return *to = chance(); }
template <>
double a_value(bf16* to) { return of_brain(*to = a_brain()); }

template <class T>
static void check_attention(const char* name, int kv_heads, int group, int key_width, int value_width, int block_tokens,
                            const std::vector<Part>& parts) {
  const Cache c = {kv_heads, block_tokens, key_width, value_width};
  const int heads = kv_heads * group;
  int blocks = 0, tokens = 0;
  for (const Part& p : parts) blocks += (p.start + p.length + block_tokens - 1) / block_tokens, tokens += p.length;
  T none;
  narrow(NAN, &none);
  std::vector<T> keys((size_t)blocks * kv_heads * block_tokens * key_width, none);  // nobody may look at the rest
  std::vector<T> values((size_t)blocks * kv_heads * block_tokens * value_width, none);
  std::vector<float> query((size_t)tokens * heads * key_width), key((size_t)tokens * kv_heads * key_width);
  std::vector<float> value((size_t)tokens * kv_heads * value_width), out((size_t)tokens * heads * value_width, NAN);
  std::vector<Chunk> chunks;
  std::vector<int32_t> tables;
  std::vector<int64_t> slots;
  std::vector<std::vector<double>> all_keys, all_values;  // [token][head][width] of each part
  for (float& x : query) x = 3 * chance();
  int row = 0, used = 0;
  for (const Part& p : parts) {
    const int context = p.start + p.length;
    chunks.push_back({row, p.length, p.start, (int32_t)tables.size()});
    const int first = (int)tables.size();
    for (int b = 0; b * block_tokens < context; b++) tables.push_back(blocks - 1 - used++);  // last ones first
    std::vector<double> k, v;
    for (int t = 0; t < context; t++) {
      const int64_t block = tables[first + t / block_tokens], offset = t % block_tokens;
      if (t >= p.start) slots.push_back(block * block_tokens + offset);
      for (int h = 0; h < kv_heads; h++) {
        const int64_t place = (block * kv_heads + h) * block_tokens + offset;
        auto fill = [&](std::vector<double>& exact, std::vector<T>& cache, std::vector<float>& fresh, int width) {
          for (int d = 0; d < width; d++) {
            T x;
            exact.push_back(a_value(&x));
            if (t < p.start) cache[place * width + d] = x;
            else fresh[((size_t)(row + t - p.start) * kv_heads + h) * width + d] = (float)exact.back();
          }
        };
        fill(k, keys, key, key_width);
        fill(v, values, value, value_width);
      }
    }
    all_keys.push_back(k);
    all_values.push_back(v);
    row += p.length;
  }
  const float scale = 0.125f;
  attend_all<T>(c, heads, scale, tokens, (int)parts.size(), chunks.data(), tables.data(), slots.data(), query.data(),
                key.data(), value.data(), keys.data(), values.data(), out.data(), THREADS);
  for (size_t p = 0; p < parts.size(); p++)
    for (int r = 0; r < parts[p].length; r++)
      for (int h = 0; h < heads; h++) {
        const int seen = parts[p].start + r + 1, kv = h / group;
        const int64_t at = (int64_t)(chunks[p].first + r) * heads + h;
        std::vector<double> weights(seen), wanted(value_width);
        double top = -1e300, sum = 0.0;
        for (int t = 0; t < seen; t++) {
          for (int d = 0; d < key_width; d++)
            weights[t] += scale * (double)query[at * key_width + d] * all_keys[p][((size_t)t * kv_heads + kv) * key_width + d];
          top = std::max(top, weights[t]);
        }
        for (double& w : weights) sum += w = exact_exp(w - top);
        for (int t = 0; t < seen; t++)
          for (int d = 0; d < value_width; d++)
            wanted[d] += weights[t] / sum * all_values[p][((size_t)t * kv_heads + kv) * value_width + d];
        for (int d = 0; d < value_width; d++) {
          const double found = out[at * value_width + d];
          expect(size_of(found - wanted[d]) <= 2e-5, name, at, d, found, wanted[d]);
        }
      }
}

template <class T>
static void check_attentions(const char* name) {
  const std::vector<Part> parts = {{37, 1}, {0, 40}, {0, 1}, {70, 3}, {11, 21}};
  for (int width : {16, 32, 48, 64, 128}) check_attention<T>(name, 2, 3, width, width, 16, parts);
  check_attention<T>(name, 1, 1, 64, 64, 16, {{90, 1}, {3, 1}});
  check_attention<T>(name, 3, 9, 64, 32, 64, parts);
  check_attention<T>(name, 2, 2, 21, 13, 5, parts);
  end_of(name);
}

static void check_sampling() {
  const int n = 1000;
  std::vector<float> logits(n);
  for (float& x : logits) x = 8 * chance();
  std::vector<char> memory(bench_bytes(n) + 16);
  const Bench bench = bench_at(memory.data() + (16 - (int64_t)memory.data() % 16) % 16, n);
  const Range range = range_of(logits.data(), n);
  expect(range.high == *std::max_element(logits.begin(), logits.end()), "highest", 0, 0, range.high, 0);
  expect(range.low == *std::min_element(logits.begin(), logits.end()), "lowest", 0, 0, range.low, 0);
  expect(logits[first_of(logits.data(), n, range.high)] == range.high, "likeliest", 0, 0, 0, 0);
  double total = 0.0;
  for (float x : logits) total += exact_exp(x - range.high);
  for (int i = 0; i < 200; i++) {
    const Wish wish = {i / 200.0, 1.0, 0.0, 1.0f, 0};
    const int token = draw_whole(logits.data(), n, range, wish, bench);
    double before = 0.0;
    for (int t = 0; t < token; t++) before += exact_exp(logits[t] - range.high);
    const double target = wish.uniform * total, after = before + exact_exp(logits[token] - range.high);
    expect(before <= target + 1e-6 * total && after >= target - 1e-6 * total, "draw", i, token, before, target);
  }
  logits[n / 2] = NAN;
  expect(std::isnan(range_of(logits.data(), n).high), "what is no number", 0, 0, 0, 0);
  end_of("sampling");
}

int main() {
  check_conversions();
  check_products();
  check_attentions<float>("attention, float32");
  check_attentions<bf16>("attention, bfloat16");
  check_sampling();
  say(bad ? "wrong results: " : "all right: "), say((int64_t)bad), say("\n");
  return bad ? 1 : 0;
}
