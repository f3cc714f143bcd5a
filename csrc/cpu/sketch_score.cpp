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

constexpr int64_t kPagesPerItem = 64;
constexpr int32_t kQueries = 8;  // of a group, at a time

// What a sketch stands for, decoded once for all queries of a group.
struct Decoded {
  int32_t tokens;                  // S, up to whole vectors
  std::vector<float> base;         // [width]
  std::vector<float> detail;       // [N, tokens]
  std::vector<int32_t> channels;   // [N]

  Decoded(const SketchLayout& l, int32_t width)
      : tokens((l.page_size + kLanes - 1) / kLanes * kLanes), base(width),
        detail(static_cast<size_t>(l.num_channels) * tokens), channels(l.num_channels) {}
};

void decode_base(const SketchLayout& l, const uint8_t* sketch, Decoded& out) {
  typedef int8_t Signed __attribute__((vector_size(kLanes)));
  constexpr Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const uint8_t* codes = sketch + l.block_scales();
  int32_t d = 0;
  for (; d + kLanes <= l.dim; d += kLanes, codes += 2) {
    Signed x;
    std::memcpy(&x, sketch + d, sizeof(x));
    const Floats scale = lane < kBlock ? splat(scale_of(codes[0])) : splat(scale_of(codes[1]));
    store(out.base.data() + d, __builtin_convertvector(x, Floats) * scale);
  }
  for (; d < l.dim; ++d) {
    out.base[d] = static_cast<int8_t>(sketch[d]) * scale_of(sketch[l.block_scales() + d / kBlock]);
  }
}

void decode_detail(const SketchLayout& l, const uint8_t* sketch, Decoded& out) {
  constexpr Words shift = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  int32_t place = 0;
  for (int32_t byte = 0; byte < l.blocks(); byte += 8) {
    uint64_t bits = 0;
    std::memcpy(&bits, sketch + l.mask() + byte, 8);
    if (l.blocks() - byte < 8) bits &= (uint64_t{1} << (l.blocks() - byte) * 8) - 1;
    // A mask that nobody wrote may have more bits than there are places.
    for (; bits && place < l.num_channels; bits &= bits - 1) {
      out.channels[place++] = byte * 8 + __builtin_ctzll(bits);
    }
  }
  const int32_t row = l.code_bytes();
  for (place = 0; place < l.num_channels; ++place) {
    const float scale = scale_of(sketch[l.channel_scales() + place]);
    const uint8_t* packed = sketch + l.dim + place * row;
    float* to = out.detail.data() + static_cast<size_t>(place) * out.tokens;
    for (int32_t t = 0; t < out.tokens; t += kLanes) {
      uint32_t word = 0;
      if (row - t / 4 >= 4) {
        std::memcpy(&word, packed + t / 4, 4);
      } else {
        for (int32_t i = t / 4; i < row; ++i) word |= uint32_t{packed[i]} << (i - t / 4) * 8;
      }
      const Words codes = (Words{} + word) >> shift & 3u;
      store(to + t, (__builtin_convertvector(bit_cast<Ints>(codes), Floats) - 1.5f) * scale);
    }
  }
}

HISPARSE_INLINE float largest(Floats x) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  struct Two8 { Eight a, b; };
  struct Two4 { Four a, b; };
  const auto [a, b] = bit_cast<Two8>(x);
  const auto [c, d] = bit_cast<Two4>(a > b ? a : b);
  const Four e = c > d ? c : d;
  return std::max(std::max(e[0], e[2]), std::max(e[1], e[3]));
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

// G queries of one group on one page. Each one's score is tops + log(totals); logits [G, tokens]
// is room.
template <int G>
void score_queries(const SketchScoreParams& p, const float* q, const Decoded& page, float* logits,
                   float* tops, float* totals) {
  Floats sums[G] = {};
  for (int32_t d = 0; d < p.width; d += kLanes) {
    const Floats x = Float32::load(page.base.data() + d);
    for (int g = 0; g < G; ++g) sums[g] += Float32::load(q + g * p.width + d) * x;
  }
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int32_t size = p.layout.page_size, tokens = page.tokens;
  Floats highest[G];
  for (int g = 0; g < G; ++g) highest[g] = splat(-INFINITY);
  for (int32_t t = 0; t < tokens; t += kLanes) {
    Floats part[G] = {};
    for (int32_t place = 0; place < p.layout.num_channels; ++place) {
      const Floats x = Float32::load(page.detail.data() + static_cast<size_t>(place) * tokens + t);
      const float* own = q + page.channels[place];
      for (int g = 0; g < G; ++g) part[g] += x * own[g * p.width];
    }
    for (int g = 0; g < G; ++g) {
      part[g] = lane + t < size ? part[g] : splat(-INFINITY);
      highest[g] = maximum(highest[g], part[g]);
      store(logits + g * tokens + t, part[g]);
    }
  }
  for (int g = 0; g < G; ++g) {
    const float top = largest(highest[g]);
    Floats weights = {};
    for (int32_t t = 0; t < tokens; t += kLanes) {
      weights += exp_of_nonpositive(Float32::load(logits + g * tokens + t) - top);
    }
    tops[g * kPagesPerItem] = sum(sums[g]) + top;
    totals[g * kPagesPerItem] = sum(weights);
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

// One page, all heads: tops and totals [Hq, kPagesPerItem].
void score_page(const SketchScoreParams& p, const float* q, const uint8_t* sketch,
                const uint8_t* ahead, Decoded& page, float* logits, float* tops, float* totals) {
  const int32_t group = p.q_heads / p.kv_heads, bytes = p.layout.num_bytes();
  for (int32_t head = 0; head < p.kv_heads; ++head, sketch += bytes, ahead += bytes) {
    for (int32_t line = 0; line < bytes; line += 64) __builtin_prefetch(ahead + line);
    decode_base(p.layout, sketch, page);
    decode_detail(p.layout, sketch, page);
    for (int32_t done = 0; done < group; done += kQueries) {
      const int32_t count = std::min(kQueries, group - done);
      score_some(count, p, q, page, logits, tops, totals);
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
  Decoded decoded(p.layout, p.width);
  // Page by page, rows of scores would share the few lines of one set of the cache.
  std::vector<float> logits(static_cast<size_t>(kQueries) * decoded.tokens);
  const size_t room = static_cast<size_t>(p.q_heads) * kPagesPerItem;
  std::vector<float> tops(room), totals(room, 1.0f);
  const float* query = p.query + b * p.q_heads * p.width;
  for (int64_t page = first; page < present; ++page) {
    const int64_t next = host_pages[std::min(page + 1, present - 1)];
    score_page(p, query, p.sketches[host_pages[page]], p.sketches[next], decoded, logits.data(),
               tops.data() + (page - first), totals.data() + (page - first));
  }
  for (size_t i = 0; i < room; i += kLanes) {
    const Floats log_total = log_of(Float32::load(totals.data() + i));
    store(tops.data() + i, Float32::load(tops.data() + i) + log_total);
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
  const double work = static_cast<double>(p.batch * p.num_columns) * p.q_heads * 20;
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
