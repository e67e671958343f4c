// Attention of many queries by AMX tiles: keys and values in bfloat16, scores and sums in float32.
//
// Queries lie side by side: scores[t][q] = keys[t][d] x queries[d][q], and out[v][q] += values[t][v]' x weights[t][q],
// so that keys are read as they lie in the cache, nothing is summed across lanes, and only values are turned. The
// context is taken in stretches of TURNED_TOKENS with a running maximum and sum (the online softmax of
// FlashAttention, Dao et al. 2022). Powers are of two: `factor` has what scores are multiplied with before.
#pragma once

#include "attention.h"
#include "product_bf16.h"

#if HEADWAY_AMX

// Whether tiles fit: whole tiles of tokens in a block, whole pairs of tiles along keys and values.
static inline bool fits_tiles(const Cache& c) {
  return c.block_tokens % 16 == 0 && c.key_width % 32 == 0 && c.value_width % 32 == 0;
}

// 2^x within one part in 10^4, which is less than bfloat16 tells apart; not below 2^-126.
static inline __m512 power_of_two(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // in this order, NaN stays
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(0.05549943f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24015361f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69314718f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}

static inline __m512i pair_up(__m512i even, __m512i odd, __m512i order) {
  return _mm512_permutex2var_epi16(even, order, odd);
}

// The pairs of columns 0..15 (`half` 0) or 16..31 (1) of two rows of 32.
static inline __m512i order_of_pairs(int half) {
  alignas(LINE) uint16_t order[32];
  for (int i = 0; i < 16; i++) {
    order[2 * i] = (uint16_t)(16 * half + i);
    order[2 * i + 1] = (uint16_t)(32 + 16 * half + i);
  }
  return _mm512_load_si512(order);
}

// Dwords rows[i][j] to rows[j][i].
static inline void turn(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// turned[v][TURNED_TOKENS] of tokens first .. first + tokens; zeros up to `padded`, whatever lies in the cache there.
static void turn_values(const Context<bf16>& x, int first, int tokens, int padded, bf16* turned) {
  const int width = x.c.value_width;
  const __m512i low = order_of_pairs(0), high = order_of_pairs(1);
  for (int t = 0; t < padded; t += 32) {
    const bf16* rows[32];
    for (int i = 0; i < 32; i++) {
      const int at = first + t + i;
      rows[i] = t + i < tokens ? x.values_of(at) + (int64_t)(at % x.c.block_tokens) * width : nullptr;
    }
    for (int v = 0; v < width; v += 32) {
      __m512i left[16], right[16];
      for (int i = 0; i < 16; i++) {
        const bf16 *even = rows[2 * i], *odd = rows[2 * i + 1];
        const __m512i a = even ? _mm512_loadu_si512(even + v) : _mm512_setzero_si512();
        const __m512i b = odd ? _mm512_loadu_si512(odd + v) : _mm512_setzero_si512();
        left[i] = pair_up(a, b, low);
        right[i] = pair_up(a, b, high);
      }
      turn(left);
      turn(right);
      for (int i = 0; i < 16; i++) {
        _mm512_storeu_si512(turned + (int64_t)(v + i) * TURNED_TOKENS + t, left[i]);
        _mm512_storeu_si512(turned + (int64_t)(v + 16 + i) * TURNED_TOKENS + t, right[i]);
      }
    }
  }
}

// scores[t][q] of `padded` tokens (a multiple of 32) from `first` on. What lies behind `tokens` may be anything.
static void score_tiles(const Context<bf16>& x, const bf16* queries, int lanes, int first, int tokens, int padded,
                        float* scores) {
  const int width = x.c.key_width, block = x.c.block_tokens;
  for (int t = 0; t < padded; t += 32) {
    const bf16* keys[2];
    for (int i = 0; i < 2; i++) {
      const int at = first + std::min(t + 16 * i, (tokens - 1) / 16 * 16);  // a block that is there
      keys[i] = x.keys_of(at) + (int64_t)(at % block) * width;
    }
    for (int q = 0; q < lanes; q += 32) {
      tile_zero<0>();
      tile_zero<1>();
      tile_zero<2>();
      tile_zero<3>();
      for (int d = 0; d < width; d += 32) {
        const bf16* column = queries + ((int64_t)d / 2 * lanes + q) * 2;
        tile_load<4>(keys[0] + d, width * 2);
        tile_load<6>(column, lanes * 4);
        tile_product<0, 4, 6>();
        tile_load<7>(column + 32, lanes * 4);
        tile_product<1, 4, 7>();
        tile_load<5>(keys[1] + d, width * 2);
        tile_product<2, 5, 6>();
        tile_product<3, 5, 7>();
      }
      float* to = scores + (int64_t)t * lanes + q;
      tile_store<0>(to, lanes * 4);
      tile_store<1>(to + 16, lanes * 4);
      tile_store<2>(to + 16 * lanes, lanes * 4);
      tile_store<3>(to + 16 * lanes + 16, lanes * 4);
    }
  }
}

// As `soften`: scores become weights[t / 2][q][2] in bfloat16. Query q sees the first seen + q / group tokens.
static void soften_to_pairs(float* scores, int tokens, int padded, int lanes, int seen, int group, float factor,
                            Scratch& s) {
  for (int t = std::max(0, std::min(seen, tokens)); t < padded; t++) {
    const int hidden = t >= tokens ? lanes : std::min(lanes, (t - seen + 1) * group);
    std::fill_n(scores + (int64_t)t * lanes, hidden, -INFINITY);
  }
  const __m512 times = _mm512_set1_ps(factor);
  for (int lane = 0; lane < lanes; lane += 16) {
    const __m512 before = _mm512_loadu_ps(&s.top[lane]);
    __m512 top = before, other = before;
    for (int t = 0; t < padded; t += 2) {
      top = _mm512_max_ps(_mm512_loadu_ps(scores + (int64_t)t * lanes + lane), top);
      other = _mm512_max_ps(_mm512_loadu_ps(scores + (int64_t)(t + 1) * lanes + lane), other);
    }
    top = _mm512_max_ps(top, other);
    const __m512 shrink = power_of_two(_mm512_mul_ps(_mm512_sub_ps(before, top), times));
    const __m512 least = _mm512_mul_ps(top, times);
    __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(&s.sum[lane]), shrink), odd_sum = _mm512_setzero_ps();
    for (int t = 0; t < padded; t += 2) {
      const float* at = scores + (int64_t)t * lanes + lane;
      const __m512 even = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(at), times, least));
      const __m512 odd = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(at + lanes), times, least));
      sum = _mm512_add_ps(sum, even);
      odd_sum = _mm512_add_ps(odd_sum, odd);
      const __m512i both = interleaved((__m512i)_mm512_cvtne2ps_pbh(odd, even));
      _mm512_storeu_si512(&s.weights[((size_t)t / 2 * lanes + lane) * 2], both);
    }
    _mm512_storeu_ps(&s.top[lane], top);
    _mm512_storeu_ps(&s.sum[lane], _mm512_add_ps(sum, odd_sum));
    _mm512_storeu_ps(&s.shrink[lane], shrink);
  }
}

// out[v][q] = out[v][q] * shrink[q] + turned[v][t] x weights[t][q].
static void weigh_tiles(const Cache& c, int lanes, int padded, bool fresh, Scratch& s) {
  for (int v = 0; v < c.value_width; v += 32)
    for (int q = 0; q < lanes; q += 32) {
      float* out = &s.out[(size_t)v * lanes + q];
      if (fresh) {
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
      } else {
        const __m512 left = _mm512_loadu_ps(&s.shrink[q]), right = _mm512_loadu_ps(&s.shrink[q + 16]);
        for (int i = 0; i < 32; i++) {
          float* row = out + (int64_t)i * lanes;
          _mm512_storeu_ps(row, _mm512_mul_ps(_mm512_loadu_ps(row), left));
          _mm512_storeu_ps(row + 16, _mm512_mul_ps(_mm512_loadu_ps(row + 16), right));
        }
        tile_load<0>(out, lanes * 4);
        tile_load<1>(out + 16, lanes * 4);
        tile_load<2>(out + 16 * lanes, lanes * 4);
        tile_load<3>(out + 16 * lanes + 16, lanes * 4);
      }
      for (int t = 0; t < padded; t += 32) {
        const bf16 *values = &s.turned[(size_t)v * TURNED_TOKENS + t], *weights = &s.weights[((size_t)t / 2 * lanes + q) * 2];
        tile_load<4>(values, TURNED_TOKENS * 2);
        tile_load<6>(weights, lanes * 4);
        tile_product<0, 4, 6>();
        tile_load<7>(weights + 32, lanes * 4);
        tile_product<1, 4, 7>();
        tile_load<5>(values + 16 * TURNED_TOKENS, TURNED_TOKENS * 2);
        tile_product<2, 5, 6>();
        tile_product<3, 5, 7>();
      }
      tile_store<0>(out, lanes * 4);
      tile_store<1>(out + 16, lanes * 4);
      tile_store<2>(out + 16 * lanes, lanes * 4);
      tile_store<3>(out + 16 * lanes + 16, lanes * 4);
    }
}

// 32 numbers as bfloat16.
static inline __m512i narrow_32(const bf16* from) { return _mm512_loadu_si512(from); }
static inline __m512i narrow_32(const float* from) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
}

// The item's queries to pairs[d / 2][q][2]; lanes that are left over are 0.
template <class Q>
static void take_pairs(const Item& item, const Q* query, int64_t stride, int group, int width, int lanes, Scratch& s) {
  const int queries = item.rows * group;
  for (int first = 0; first < lanes; first += 16)
    for (int d = 0; d < width; d += 32) {
      __m512i block[16];
      for (int i = 0; i < 16; i++) {
        const int q = first + i;
        block[i] = q < queries ? narrow_32(query + q / group * stride +
                                           ((int64_t)item.head * group + q % group) * width + d)
                               : _mm512_setzero_si512();
      }
      turn(block);
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(&s.pairs[((int64_t)(d / 2 + i) * lanes + first) * 2], block[i]);
    }
}

// out[v][q] / sum[q] to scores[q][v].
static void divide_and_turn(int lanes, int width, Scratch& s) {
  for (int q = 0; q < lanes; q += 16) {
    const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_loadu_ps(&s.sum[q]));
    for (int v = 0; v < width; v += 16) {
      __m512i block[16];
      for (int i = 0; i < 16; i++)
        block[i] = (__m512i)_mm512_mul_ps(_mm512_loadu_ps(&s.out[(size_t)(v + i) * lanes + q]), share);
      turn(block);
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(&s.scores[(size_t)(q + i) * width + v], block[i]);
    }
  }
}

// One item's results [queries][value_width], in s.scores. `query`: of the item's first row, all heads.
template <class Q>
static void attend_by_tiles(const Context<bf16>& x, const Item& item, const Q* query, int64_t stride, int group,
                            float scale, int context, int seen, Scratch& s) {
  const int lanes = lanes_of(item.rows * group);
  const float factor = scale * 1.44269504088896341f;  // log2(e)
  take_pairs(item, query, stride, group, x.c.key_width, lanes, s);
  std::fill_n(s.top.begin(), lanes, -INFINITY);
  std::fill_n(s.sum.begin(), lanes, 0.0f);
  tiles_configure(16);
  for (int first = 0; first < context; first += TURNED_TOKENS) {
    const int tokens = std::min(TURNED_TOKENS, context - first), padded = (tokens + 31) / 32 * 32;
    score_tiles(x, s.pairs.data(), lanes, first, tokens, padded, s.scores.data());
    soften_to_pairs(s.scores.data(), tokens, padded, lanes, seen - first, group, factor, s);
    turn_values(x, first, tokens, padded, s.turned.data());
    weigh_tiles(x.c, lanes, padded, first == 0, s);
  }
  divide_and_turn(lanes, x.c.value_width, s);
}

#endif  // HEADWAY_AMX
