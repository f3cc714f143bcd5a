// sketch_score: log-sum-exp of a page's logits, straight from the sketches by host page.
//
// A token's logit is q.base plus, for each detailed channel, q * scale * (code - 1.5). The products
// with codes are summed in integers, of coefficients q * scale rounded to 16 bits.
#include "parallel.h"
#include "simd.h"
#include "sketch.h"
#include "sketch_decode.h"
#include "sketch_dot.h"
#include "sketch_queries.h"
#include "tensors.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

namespace hisparse {
namespace {

struct SketchScoreParams {
  const float* query;              // [B, Hq, D]
  Rows<const uint8_t> sketches;    // [host pages, Hkv, bytes]
  Rows<const int32_t> host_pages;  // [B, P]
  const int32_t* num_pages;        // [B]
  float* scores;                   // [B, Hq, P]
  int64_t batch, num_columns, num_host_pages;
  int32_t q_heads, kv_heads;
  SketchLayout layout;
};

constexpr int64_t kPagesPerItem = 64;
// Exponents of weights stay within these bounds, and a total with one at a bound is not used.
constexpr float kLeast = -126, kMost = 120;
constexpr float kLog2E = 1.44269504f;

// Lanes of four vectors, summed: lane g of the result is the sum of x[g].
HISPARSE_INLINE Vec<float, 4> reduce_four(const Floats* x) {
  Ints low, left;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i / 4 * 4 + i % 4 / 2 + i % 2 * kLanes;
    left[i] = i / 4 * 4 + i % 2 + i % 4 / 2 * kLanes;
  }
  const auto ab = __builtin_shuffle(x[0], x[1], low) + __builtin_shuffle(x[0], x[1], low + 2);
  const auto cd = __builtin_shuffle(x[2], x[3], low) + __builtin_shuffle(x[2], x[3], low + 2);
  return join_fours<kLanes>(__builtin_shuffle(ab, cd, left) + __builtin_shuffle(ab, cd, left + 2));
}

// Within the bounds above. GCC makes two instructions of each comparison.
HISPARSE_INLINE Floats cut(Floats x) {
#if defined(__AVX512F__)
  const __m512 high = _mm512_max_ps(bit_cast<__m512>(x), _mm512_set1_ps(kLeast));
  return bit_cast<Floats>(_mm512_min_ps(high, _mm512_set1_ps(kMost)));
#elif defined(__AVX2__)
  const __m256 high = _mm256_max_ps(bit_cast<__m256>(x), _mm256_set1_ps(kLeast));
  return bit_cast<Floats>(_mm256_min_ps(high, _mm256_set1_ps(kMost)));
#else
  x = x > kLeast ? x : splat(kLeast);
  return x < kMost ? x : splat(kMost);
#endif
}

// 2^x, relative error about 4e-6; x is cut to the bounds above.
HISPARSE_INLINE Floats power_of_two(Floats x) {
  x = cut(x);
  // Adding this constant leaves no bits for a fraction, which rounds to the nearest integer.
  const Floats magic = splat(12582912.0f);
  const Floats shifted = x + magic;
  const Floats f = x - (shifted - magic);
  Floats poly = splat(0.00967606f);
  poly = poly * f + 0.05582274f;
  poly = poly * f + 0.24022307f;
  poly = poly * f + 0.69313675f;
  poly = poly * f + 1.0f;
  return bit_cast<Floats>(bit_cast<Ints>(poly) + (bit_cast<Ints>(shifted) << 23));
}

// The natural logarithm of positive numbers that are not subnormal, to about 1e-6.
HISPARSE_INLINE Floats log_of(Floats x) {
  // x = 2^n * m with m in [2/3, 4/3), and log m by its odd series in (m - 1) / (m + 1).
  const Ints bits = bit_cast<Ints>(x) - 0x3f2aaaab;
  const Ints n = bits >> 23;
  const Floats m = bit_cast<Floats>((bits & 0x007fffff) + 0x3f2aaaab);
  const Floats z = (m - 1.0f) / (m + 1.0f), square = z * z;
  Floats poly = splat(2.0f / 9);
  poly = poly * square + 2.0f / 7;
  poly = poly * square + 2.0f / 5;
  poly = poly * square + 2.0f / 3;
  poly = poly * square + 2.0f;
  return __builtin_convertvector(n, Floats) * 0.693147181f + poly * z;
}

// The steps below take G queries, from `done` on, of each head in a tile.

template <int G>
HISPARSE_NOINLINE void choose_queries(const Queries& queries, Tile& tile, int32_t done) {
  const int32_t width = tile.width, stride = tile.stride, count = tile.count;
  const int32_t blocks = tile.layout.blocks(), mask = tile.layout.mask();
  const int16_t* const shorts = queries.shorts.data();
  int16_t* chosen = tile.chosen.data();
  for (int32_t i = 0; i < count; ++i, chosen += kQueries * stride) {
    const int16_t* own = shorts + (tile.queries[i] + done) * width;
    choose<G>(tile.sketches[i] + mask, blocks, own, width, chosen, stride);
  }
}

// Coefficients of the detailed channels, and tops: the scores of the base values, less 1.5 times
// the coefficients' sum, because codes stand for levels around 0.
template <int G>
HISPARSE_NOINLINE void make_coefficients(const Queries& queries, Tile& tile, int32_t done) {
  const Sixteen split = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
  const int32_t places = tile.places, stride = tile.stride, width = tile.width;
  const int32_t count = tile.count;
  const int16_t *chosen = tile.chosen.data(), *scales = tile.scales.data();
  const float *const floats = queries.floats.data(), *base = tile.base.data();
  uint8_t* out = tile.coefficients.data();
  for (int32_t i = 0; i < count; ++i) {
    const int64_t first = tile.queries[i] + done;
    const auto own = load_vector<Vec<float, kQueries>>(queries.units.data() + first);
    const auto units = own * tile.unit[i];
    std::memcpy(tile.units[i], &units, sizeof(units));
    // Two sums for each query, or each product waits for the one before.
    Floats even[kQueries] = {}, odd[G];
    for (int g = 0; g < G; ++g) {
      Ints total = {};
      for (int32_t place = 0; place < places; place += kShorts) {
        const auto x = load_vector<Shorts>(chosen + g * stride + place);
        const Shorts c = multiply_fractions(x, load_vector<Shorts>(scales + place));
        const Bytes bytes = shuffle_sixteens(bit_cast<Bytes>(c), split);
        std::memcpy(out + 2 * (g * places + place), &bytes, sizeof(bytes));
        total += add_pairs(c);
      }
      even[g] = __builtin_convertvector(total, Floats) * (-1.5f * units[g]);
      odd[g] = Floats{};
    }
    const float* q = floats + first * width;
    for (int32_t d = 0; d < width; d += 2 * kLanes) {
      const Floats x = Float32::load(base + d), y = Float32::load(base + d + kLanes);
      for (int g = 0; g < G; ++g) {
        even[g] += Float32::load(q + g * width + d) * x;
        odd[g] += Float32::load(q + g * width + d + kLanes) * y;
      }
    }
    for (int g = 0; g < G; ++g) even[g] += odd[g];
    const auto top = reduce_four(even);
    std::memcpy(tile.tops[i] + done, &top, G * sizeof(float));
    chosen += kQueries * stride;
    scales += places;
    base += width;
    out += kQueries * 2 * places;
  }
}

// Sums of products of coefficients and codes.
template <int G>
HISPARSE_NOINLINE void add_codes(Tile& tile) {
  const int32_t quads = tile.quads, stride = 2 * tile.places, registers = tile.registers;
  const int32_t count = tile.count;
  const Bytes* codes = tile.codes.data();
  const uint8_t* coefficients = tile.coefficients.data();
  Ints* out = tile.sums.data();
  for (int32_t i = 0; i < count; ++i, coefficients += kQueries * stride) {
    for (int32_t r = 0; r < registers; ++r, codes += quads, out += kQueries) {
      Ints sums[G];
      for (int g = 0; g < G; ++g) sums[g] = Ints{};
      for (int32_t quad = 0; quad < quads;) {
        CodeSums low[G], high[G];
        for (int g = 0; g < G; ++g) low[g] = high[g] = CodeSums{};
        const int32_t last = std::min(quads, quad + kMostQuads);
        for (; quad < last; ++quad) {
          const Bytes some = codes[quad];
          for (int g = 0; g < G; ++g) {
            const uint8_t* c = coefficients + g * stride + 8 * quad;
            low[g] = add_low(low[g], some, repeat_four(c));
            high[g] = add_high(high[g], some, repeat_four(c + 4));
          }
        }
        for (int g = 0; g < G; ++g) sums[g] += join_sums(low[g], high[g]);
      }
      for (int g = 0; g < G; ++g) out[g] = sums[g];
    }
  }
}

// Totals: sums of the tokens' weights, as far as tokens differ.
template <int G>
HISPARSE_NOINLINE void add_weights(Tile& tile, int32_t done) {
  const int32_t count = tile.count, page_size = tile.layout.page_size;
  const Ints* sums = tile.sums.data();
  for (int32_t i = 0; i < count; ++i) {
    Floats weights[kQueries] = {};
    const float* units = tile.units[i];
    for (int32_t t = 0; t < page_size; t += kTokens) {
      for (int v = 0; v < kVectors; ++v, sums += kQueries) {
        for (int g = 0; g < G; ++g) {
          const Floats logit = __builtin_convertvector(sums[g], Floats) * (units[g] * kLog2E);
          Floats weight = power_of_two(logit);
          if (page_size - t < kTokens) weight = token_of(v) < page_size - t ? weight : Floats{};
          weights[g] += weight;
        }
      }
    }
    const auto total = reduce_four(weights);
    std::memcpy(tile.totals[i] + done, &total, G * sizeof(float));
  }
}

// A score is its top + log(total).
template <int G>
void score_queries(const Queries& queries, Tile& tile, int32_t done) {
  choose_queries<G>(queries, tile, done);
  make_coefficients<G>(queries, tile, done);
  add_codes<G>(tile);
  add_weights<G>(tile, done);
}

// The last few queries of a group, at most kQueries.
template <int G = kQueries>
void score_some(int32_t left, const Queries& queries, Tile& tile, int32_t done) {
  if constexpr (G > 0) {
    if (left == G) return score_queries<G>(queries, tile, done);
    score_some<G - 1>(left, queries, tile, done);
  }
}

void score_tile(const Queries& queries, Tile& tile, int32_t group) {
  decode_base(tile);
  decode_scales(tile);
  decode_codes(tile);
  for (int32_t done = 0; done < group; done += kQueries) {
    score_some(std::min(kQueries, group - done), queries, tile, done);
  }
  tile.count = 0;
}

// The same for one query, whatever its logits: in no place an exponential can overflow.
float score_any(const SketchLayout& l, const float* q, const uint8_t* sketch) {
  std::vector<float> logits(l.page_size);
  float base = 0;
  for (int32_t d = 0; d < l.dim; ++d) {
    base += q[d] * static_cast<int8_t>(sketch[d]) * scale_of(sketch[l.block_scales() + d / kBlock]);
  }
  const int32_t row = l.code_bytes();
  for (int32_t d = 0, place = 0; d < l.dim && place < l.num_channels; ++d) {
    if (!(sketch[l.mask() + d / 8] >> d % 8 & 1)) continue;
    const uint8_t* codes = sketch + l.dim + place * row;
    const float x = q[d] * scale_of(sketch[l.channel_scales() + place++]);
    for (int32_t t = 0; t < l.page_size; ++t) {
      logits[t] += x * ((codes[t / 4] >> t % 4 * 2 & 3) - 1.5f);
    }
  }
  const float top = *std::max_element(logits.begin(), logits.end());
  float total = 0;
  for (const float logit : logits) total += std::exp(logit - top);
  return base + top + std::log(total);
}

// Replaces the scores of a run of pages whose totals are of no use.
void score_cut(const SketchScoreParams& p, const Queries& queries, int64_t b, int64_t first,
               int64_t last, const float* totals) {
  const int32_t stride = round_up(p.q_heads, kQueries), group = p.q_heads / p.kv_heads;
  for (int32_t h = 0; h < p.q_heads; ++h) {
    const int64_t row = b * p.q_heads + h;
    for (int64_t page = first; page < last; ++page) {
      const float total = totals[(page - first) * stride + h];
      if (total > 0x1p-90f && total < 0x1p119f) continue;
      const uint8_t* sketch = p.sketches[p.host_pages[b][page]] + h / group * p.layout.num_bytes();
      const float* q = queries.floats.data() + row * queries.width;
      p.scores[row * p.num_columns + page] = score_any(p.layout, q, sketch);
    }
  }
}

// Scores a run of pages; false if one of them is not among the host pages.
bool score_run(const SketchScoreParams& p, const Queries& queries, int64_t b, int64_t first) {
  const int64_t last = std::min(first + kPagesPerItem, p.num_columns);
  const int64_t present = std::clamp<int64_t>(p.num_pages[b], first, last);
  const int32_t* host_pages = p.host_pages[b];
  for (int64_t page = first; page < present; ++page) {
    if (host_pages[page] < 0 || host_pages[page] >= p.num_host_pages) return false;
  }
  const int32_t stride = round_up(p.q_heads, kQueries), bytes = p.layout.num_bytes();
  const int32_t group = p.q_heads / p.kv_heads;
  const int64_t count = stride * (present - first);
  std::vector<float> tops(count + kLanes), totals(count + kLanes, 1.0f);
  Tile tile(p.layout);
  for (int64_t page = first; page < present; ++page) {
    const uint8_t* sketch = p.sketches[host_pages[page]];
    const uint8_t* ahead = p.sketches[host_pages[std::min(page + 1, present - 1)]];
    for (int32_t line = 0; line < bytes * p.kv_heads; line += 64) __builtin_prefetch(ahead + line);
    for (int32_t head = 0; head < p.kv_heads; ++head) {
      const int64_t place = (page - first) * stride + head * group;
      tile.sketches[tile.count] = sketch + head * bytes;
      tile.queries[tile.count] = b * p.q_heads + head * group;
      tile.tops[tile.count] = tops.data() + place;
      tile.totals[tile.count] = totals.data() + place;
      if (++tile.count == kTile) score_tile(queries, tile, group);
    }
  }
  score_tile(queries, tile, group);
  Ints lost = {};  // -1 where a weight was cut
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats total = Float32::load(totals.data() + i);
    lost |= (total < splat(0x1p-90f)) | (total > splat(0x1p119f));
    store(tops.data() + i, Float32::load(tops.data() + i) + log_of(total));
  }
  for (int32_t h = 0; h < p.q_heads; ++h) {
    float* out = p.scores + (b * p.q_heads + h) * p.num_columns;
    const float* from = tops.data() + h;
    for (int64_t page = first; page < present; ++page, from += stride) out[page] = *from;
    std::fill(out + present, out + last, -INFINITY);
  }
  bool any = false;
  for (int lane = 0; lane < kLanes; ++lane) any |= lost[lane] != 0;
  if (any) score_cut(p, queries, b, first, present, totals.data());
  return true;
}

void sketch_score(TensorView query, TensorView sketches, TensorView host_page_table,
                  TensorView num_pages, TensorView scores, int64_t dim, int64_t page_size,
                  int64_t num_channels) {
  SketchScoreParams p;
  p.query = vector_of<const float>(query, "query");
  p.sketches = {static_cast<const uint8_t*>(sketches.data_ptr()), sketches.stride(0)};
  p.host_pages = rows_of<const int32_t>(host_page_table, "host_page_table");
  p.num_pages = vector_of<const int32_t>(num_pages, "num_pages");
  p.scores = vector_of<float>(scores, "scores");
  p.batch = query.size(0);
  p.num_columns = scores.size(2);
  p.num_host_pages = sketches.size(0);
  p.q_heads = static_cast<int32_t>(query.size(1));
  p.kv_heads = static_cast<int32_t>(sketches.size(1));
  p.layout = {static_cast<int32_t>(dim), static_cast<int32_t>(page_size),
              static_cast<int32_t>(num_channels)};
  require_sketches(sketches);
  const Queries queries(p.query, p.batch * p.q_heads, p.layout.dim);
  const int64_t runs = (p.num_columns + kPagesPerItem - 1) / kPagesPerItem;
  const double work = static_cast<double>(p.batch * p.num_columns) * p.q_heads * 25;
  std::atomic<bool> in_range{true};
  parallel_for(p.batch * runs, num_threads(p.batch * runs, work), [&](int64_t item) {
    if (!score_run(p, queries, item / runs, item % runs * kPagesPerItem)) in_range = false;
  });
  if (!in_range) {
    TVM_FFI_THROW(ValueError) << "host_page_table: a page is outside [0, " << p.num_host_pages
                              << "), the sketches' pages";
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sketch_score, sketch_score);

}  // namespace
}  // namespace hisparse
