// sketch_score: log-sum-exp of a page's logits, straight from the sketches by host page.
#include "parallel.h"
#include "simd.h"
#include "sketch.h"
#include "tensors.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

namespace hisparse {
namespace {

struct SketchScoreParams {
  const float* query;              // [B, Hq, width], zeros from D on
  Rows<const uint8_t> sketches;    // [host pages, Hkv, bytes]
  Rows<const int32_t> host_pages;  // [B, P]
  const int32_t* num_pages;        // [B]
  float* scores;                   // [B, Hq, P]
  int64_t batch, num_columns, num_host_pages;
  int32_t q_heads, kv_heads, width;
  SketchLayout layout;
};

// Separate functions: in a single one the compiler keeps loop counters on the stack.
#define HISPARSE_NOINLINE __attribute__((noinline))

constexpr int64_t kPagesPerItem = 64;
constexpr int32_t kQueries = 8;  // of a group, at a time

constexpr int32_t whole_vectors(int32_t count) { return (count + kWide - 1) / kWide * kWide; }

// Base values of 16 channels from d on, zeros behind the last.
HISPARSE_INLINE WideFloats base_at(const SketchLayout& l, const uint8_t* sketch, int32_t d) {
  const WideInts lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const uint8_t* codes = sketch + l.block_scales() + d / kBlock;
  const int32_t left = l.dim - d;
  Vec<int8_t, kWide> x = {};
  if (left >= kWide) {
    std::memcpy(&x, sketch + d, sizeof(x));
  } else {
    for (int32_t i = 0; i < left; ++i) x[i] = static_cast<int8_t>(sketch[d + i]);
  }
  const float first = scale_of(codes[0]), second = left > kBlock ? scale_of(codes[1]) : 0.0f;
  const auto values = __builtin_convertvector(__builtin_convertvector(x, Vec<int16_t, kWide>),
                                              WideInts);
  return __builtin_convertvector(values, WideFloats) *
         (lane < kBlock ? splat<WideFloats>(first) : splat<WideFloats>(second));
}

// The channels that a mask names, ascending.
HISPARSE_NOINLINE void decode_mask(const SketchLayout& l, const uint8_t* mask, int32_t* channels) {
  int32_t place = 0;
  for (int32_t byte = 0; byte < l.blocks(); byte += 8) {
    uint64_t bits = 0;
    if (l.blocks() - byte >= 8) {
      std::memcpy(&bits, mask + byte, 8);
    } else {
      for (int32_t i = byte; i < l.blocks(); ++i) bits |= uint64_t{mask[i]} << (i - byte) * 8;
    }
    // The mask of an unwritten sketch may have more bits than there are places.
    for (; bits && place < l.num_channels; bits &= bits - 1) {
      channels[place++] = byte * 8 + __builtin_ctzll(bits);
    }
  }
}

// Codes of 16 tokens from `packed` on; the channel has `left` more bytes.
HISPARSE_INLINE uint32_t load_codes(const uint8_t* packed, int32_t left) {
  uint32_t word = 0;
  if (left >= 4) {
    std::memcpy(&word, packed, 4);
  } else {
    for (int32_t i = 0; i < left; ++i) word |= uint32_t{packed[i]} << i * 8;
  }
  return word;
}

// The values of codes: -1.5, -0.5, 0.5 or 1.5.
HISPARSE_INLINE WideFloats levels_of(uint32_t word) {
  const WideWords shift = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  // Looks up the low four bits; the two above a code's own do not count.
  const WideFloats levels = {-1.5f, -0.5f, 0.5f, 1.5f, -1.5f, -0.5f, 0.5f, 1.5f,
                         -1.5f, -0.5f, 0.5f, 1.5f, -1.5f, -0.5f, 0.5f, 1.5f};
  return __builtin_shuffle(levels, bit_cast<WideInts>((word - WideWords{}) >> shift & 15u));
}

HISPARSE_INLINE WideFloats add(WideFloats a, WideFloats b) { return a + b; }

// Reduces eight vectors at once: lane g of the result is x[g]'s lanes joined by `op`. Joining
// halves pairwise takes a third of the time of eight separate reductions.
template <WideFloats (*op)(WideFloats, WideFloats)>
HISPARSE_INLINE WideFloats reduce_eight(const WideFloats* x) {
  const WideInts low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  const WideInts low4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
  const WideInts low2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
  const WideInts even = {0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14};
  const auto join = [](WideFloats a, WideFloats b, WideInts low, int32_t width) {
    return op(__builtin_shuffle(a, b, low), __builtin_shuffle(a, b, low + width));
  };
  const WideFloats ab = join(x[0], x[1], low8, 8), cd = join(x[2], x[3], low8, 8);
  const WideFloats ef = join(x[4], x[5], low8, 8), gh = join(x[6], x[7], low8, 8);
  const WideFloats all = join(join(ab, cd, low4, 4), join(ef, gh, low4, 4), low2, 2);
  return op(__builtin_shuffle(all, even), __builtin_shuffle(all, even + 1));
}

// The natural logarithm of positive numbers that are not subnormal, to about 1e-6.
HISPARSE_INLINE WideFloats log_of(WideFloats x) {
  // x = 2^n * m with m in [2/3, 4/3), and log m by its odd series in (m - 1) / (m + 1).
  const WideInts bits = bit_cast<WideInts>(x) - 0x3f2aaaab;
  const WideInts n = bits >> 23;
  const WideFloats m = bit_cast<WideFloats>((bits & 0x007fffff) + 0x3f2aaaab);
  const WideFloats z = (m - 1.0f) / (m + 1.0f), square = z * z;
  WideFloats poly = splat<WideFloats>(2.0f / 9);
  poly = poly * square + 2.0f / 7;
  poly = poly * square + 2.0f / 5;
  poly = poly * square + 2.0f / 3;
  poly = poly * square + 2.0f;
  return __builtin_convertvector(n, WideFloats) * 0.693147181f + poly * z;
}

// G queries of one group on one page. A query's score is its tops + log(totals); logits
// [G, tokens] is scratch.
template <int G>
HISPARSE_NOINLINE void score_queries(const SketchScoreParams& p, const float* q,
                                     const uint8_t* sketch, const int32_t* channels,
                                     float* logits, float* tops, float* totals) {
  const SketchLayout l = p.layout;
  WideFloats sums[kQueries] = {}, highest[kQueries] = {}, weights[kQueries] = {};
  for (int32_t d = 0; d < p.width; d += kWide) {
    const WideFloats x = base_at(l, sketch, d);
    for (int g = 0; g < G; ++g) sums[g] += load_vector<WideFloats>(q + g * p.width + d) * x;
  }
  const WideInts lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int32_t width = p.width, row = l.code_bytes(), tokens = whole_vectors(l.page_size);
  for (int g = 0; g < G; ++g) highest[g] = splat<WideFloats>(-INFINITY);
  for (int32_t t = 0; t < tokens; t += kWide) {
    WideFloats part[G] = {};
    const uint8_t* packed = sketch + l.dim + t / 4;
    const uint8_t* scales = sketch + l.channel_scales();
    for (int32_t place = 0; place < l.num_channels; ++place, packed += row) {
      const WideFloats x = levels_of(load_codes(packed, row - t / 4)) * scale_of(scales[place]);
      const float* own = q + channels[place];
      for (int g = 0; g < G; ++g) part[g] += x * own[g * width];
    }
    for (int g = 0; g < G; ++g) {
      part[g] = lane + t < l.page_size ? part[g] : splat<WideFloats>(-INFINITY);
      highest[g] = maximum(highest[g], part[g]);
      store(logits + g * tokens + t, part[g]);
    }
  }
  const WideFloats top = reduce_eight<maximum>(highest);
  for (int32_t t = 0; t < tokens; t += kWide) {
    for (int g = 0; g < G; ++g) {
      weights[g] += exp_of_nonpositive(load_vector<WideFloats>(logits + g * tokens + t) - top[g]);
    }
  }
  const WideFloats score = reduce_eight<add>(sums) + top, total = reduce_eight<add>(weights);
  for (int g = 0; g < G; ++g) {
    tops[g * kPagesPerItem] = score[g];
    totals[g * kPagesPerItem] = total[g];
  }
}

// The last few queries of a group, `count` of them, at most kQueries.
template <int G = kQueries, typename... Rest>
void score_some(int32_t count, const Rest&... rest) {
  if constexpr (G > 0) {
    if (count == G) return score_queries<G>(rest...);
    score_some<G - 1>(count, rest...);
  }
}

// One page, all heads: tops and totals [Hq, kPagesPerItem]; channels [N] and logits are scratch.
void score_page(const SketchScoreParams& p, const float* q, const uint8_t* sketch,
                const uint8_t* ahead, int32_t* channels, float* logits, float* tops,
                float* totals) {
  const int32_t group = p.q_heads / p.kv_heads, bytes = p.layout.num_bytes();
  for (int32_t head = 0; head < p.kv_heads; ++head, sketch += bytes, ahead += bytes) {
    for (int32_t line = 0; line < bytes; line += 64) __builtin_prefetch(ahead + line);
    decode_mask(p.layout, sketch + p.layout.mask(), channels);
    for (int32_t done = 0; done < group; done += kQueries) {
      const int32_t count = std::min(kQueries, group - done);
      score_some(count, p, q, sketch, channels, logits, tops, totals);
      q += count * p.width;
      tops += count * kPagesPerItem;
      totals += count * kPagesPerItem;
    }
  }
}

// Scores a run of pages; false if one of them is not among the host pages.
bool score_run(const SketchScoreParams& p, int64_t b, int64_t first) {
  const int64_t last = std::min(first + kPagesPerItem, p.num_columns);
  const int64_t present = std::clamp<int64_t>(p.num_pages[b], first, last);
  const int32_t* host_pages = p.host_pages[b];
  for (int64_t page = first; page < present; ++page) {
    if (host_pages[page] < 0 || host_pages[page] >= p.num_host_pages) return false;
  }
  std::vector<int32_t> channels(p.layout.num_channels);
  // Written page by page, rows of scores would compete for one set of the cache.
  std::vector<float> logits(static_cast<size_t>(kQueries) * whole_vectors(p.layout.page_size));
  const size_t room = static_cast<size_t>(p.q_heads) * kPagesPerItem;
  std::vector<float> tops(room), totals(room, 1.0f);
  const float* query = p.query + b * p.q_heads * p.width;
  for (int64_t page = first; page < present; ++page) {
    const int64_t next = host_pages[std::min(page + 1, present - 1)];
    score_page(p, query, p.sketches[host_pages[page]], p.sketches[next], channels.data(),
               logits.data(), tops.data() + (page - first), totals.data() + (page - first));
  }
  for (size_t i = 0; i < room; i += kWide) {
    const WideFloats log_total = log_of(load_vector<WideFloats>(totals.data() + i));
    store(tops.data() + i, load_vector<WideFloats>(tops.data() + i) + log_total);
  }
  for (int32_t h = 0; h < p.q_heads; ++h) {
    float* out = p.scores + (b * p.q_heads + h) * p.num_columns;
    std::copy_n(tops.data() + h * kPagesPerItem, present - first, out + first);
    std::fill(out + present, out + last, -INFINITY);
  }
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
  p.width = static_cast<int32_t>(query.size(2));
  p.layout = {static_cast<int32_t>(dim), static_cast<int32_t>(page_size),
              static_cast<int32_t>(num_channels)};
  require_sketches(sketches);
  const int64_t runs = (p.num_columns + kPagesPerItem - 1) / kPagesPerItem;
  const double work = static_cast<double>(p.batch * p.num_columns) * p.q_heads * 25;
  std::atomic<bool> in_range{true};
  parallel_for(p.batch * runs, num_threads(p.batch * runs, work), [&](int64_t item) {
    if (!score_run(p, item / runs, item % runs * kPagesPerItem)) in_range = false;
  });
  if (!in_range) {
    TVM_FFI_THROW(ValueError) << "host_page_table: a page is outside [0, " << p.num_host_pages
                              << "), the sketches' pages";
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sketch_score, sketch_score);

}  // namespace
}  // namespace hisparse
