// page_score: Quest's bound on q.k of every page, straight from the summaries by host page.
#include "dots.h"
#include "parallel.h"
#include "simd.h"
#include "tensors.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

namespace hisparse {

// Without the factor of 2^120: half of it is in the queries, half in the scales.
struct UnscaledFloat8 : Float8 {
  static HISPARSE_INLINE float one(Raw x) { return one_unscaled(x); }
  static HISPARSE_INLINE Floats load(const Raw* p) { return load_unscaled(p); }
};

template <>
struct Parts<UnscaledFloat8> {
  static constexpr int kCount = 4, kStep = 4;
  static constexpr int first(int v) { return v / 2 + v % 2 * 2; }
  template <int V>
  static HISPARSE_INLINE Floats part(const uint8_t* p) {
    using Shorts = Vec<int16_t, 2 * kLanes>;
    // Each second byte as bfloat16; the shift to the right repeats the sign, which the mask drops.
    Shorts bytes = load_vector<Shorts>(p);
    if constexpr (V < 2) bytes <<= 8;
    const Shorts kept = Shorts{} + static_cast<int16_t>(0x87f0);
    const Words pairs = bit_cast<Words>(bytes >> 4 & kept);
    return bit_cast<Floats>(V % 2 == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
};

namespace {

struct PageScoreParams {
  const float* query;              // [B, Hq, 2D]: positive part of q, then its negative part;
                                   // elements part by part (dots.h)
  const char* summaries;           // [host pages, ranges, Hkv, 2D]: maxima, then minima
  const float* scales;             // [host pages, ranges, Hkv], or null
  Rows<const int32_t> host_pages;  // [B, P]
  const int32_t* num_pages;        // [B]
  float* scores;                   // [B, Hq, P]
  int64_t batch, width, num_host_pages;
  int32_t q_heads, kv_heads, group, ranges, twice_dim;
};

constexpr int64_t kPagesPerItem = 64;
constexpr size_t kRangesPerBlock = 16;

template <typename T>
constexpr float kRootOfScale = 1.0f;
template <>
constexpr float kRootOfScale<UnscaledFloat8> = 0x1p60f;

// The ranges of a run of pages, in the order of pages.
template <typename T>
struct Ranges {
  // [Hkv, 2D] of each; then the last one again, kRangesPerBlock times, to be prefetched.
  std::vector<const typename T::Raw*> summaries;
  std::vector<const float*> scales;  // [Hkv] of each
  std::vector<int32_t> pages;        // the page of each, counted from the first
};

// R ranges from `i` on, one head: raises the pages' scores [kPagesPerItem, Hq] to their bounds.
template <typename T, int R>
HISPARSE_INLINE void score_ranges(const PageScoreParams& p, const float* q, const Ranges<T>& all,
                                  size_t i, int32_t head, float* scores) {
  const int32_t width = p.twice_dim;
  // The largest q.k that a range allows is q+ . maxima + q- . minima: one product of width 2D.
  for_blocks(p.group, [&](auto queries, int32_t g) {
    constexpr int G = decltype(queries)::value;
    using Bounds = Vec<float, G>;
    const int32_t first = head * p.group + g;
    const auto* ranges = &all.summaries[i];
    float bounds[R * G];
    dots_of<T, G, R>(q + first * width, ranges, ranges + (g == 0 ? kRangesPerBlock : 0),
                     head * width, width, bounds);
    for (int r = 0; r < R; ++r) {
      const float own = p.scales == nullptr ? 1.0f : all.scales[i + r][head];
      float* score = scores + all.pages[i + r] * p.q_heads + first;
      const Bounds bound = load_vector<Bounds>(bounds + r * G) * (own * kRootOfScale<T>);
      store(score, maximum(load_vector<Bounds>(score), bound));
    }
  });
}

// Finds the ranges of pages `first` to `last` - 1; false if one of them is not a host page.
template <typename T>
bool find_ranges(const PageScoreParams& p, const int32_t* host_pages, int64_t first, int64_t last,
                 Ranges<T>& all) {
  const int64_t row_items = static_cast<int64_t>(p.kv_heads) * p.twice_dim;
  const auto* summaries = reinterpret_cast<const typename T::Raw*>(p.summaries);
  for (int64_t page = first; page < last; ++page) {
    if (host_pages[page] < 0 || host_pages[page] >= p.num_host_pages) return false;
    for (int64_t r = 0; r < p.ranges; ++r) {
      const int64_t row = int64_t{host_pages[page]} * p.ranges + r;
      all.summaries.push_back(summaries + row * row_items);
      all.scales.push_back(p.scales + row * p.kv_heads);
      all.pages.push_back(static_cast<int32_t>(page - first));
    }
  }
  if (last > first) all.summaries.resize(all.pages.size() + kRangesPerBlock, all.summaries.back());
  return true;
}

// Scores a run of pages; false if one of them is not among the host pages.
template <typename T>
bool score_run(const PageScoreParams& p, int64_t b, int64_t first) {
  const int64_t last = std::min(first + kPagesPerItem, p.width);
  const int64_t present = std::clamp<int64_t>(p.num_pages[b], first, last);
  if (present == first) return true;
  Ranges<T> all;
  if (!find_ranges(p, p.host_pages[b], first, present, all)) return false;
  // Rows of scores may be a power of two apart. Written page by page, they would compete for one
  // set of the cache.
  std::vector<float> scores(p.q_heads * kPagesPerItem, -INFINITY);
  const float* query = p.query + b * p.q_heads * p.twice_dim;
  // A head's queries stay in the first cache for a block of ranges.
  for (size_t start = 0; start < all.pages.size(); start += kRangesPerBlock) {
    const size_t end = std::min(start + kRangesPerBlock, all.pages.size());
    for (int32_t head = 0; head < p.kv_heads; ++head) {
      size_t i = start;
      for (; i + kVectors <= end; i += kVectors) {
        score_ranges<T, kVectors>(p, query, all, i, head, scores.data());
      }
      for (; i < end; ++i) score_ranges<T, 1>(p, query, all, i, head, scores.data());
    }
  }
  for (int32_t h = 0; h < p.q_heads; ++h) {
    float* out = p.scores + (b * p.q_heads + h) * p.width;
    for (int64_t page = first; page < present; ++page) {
      out[page] = scores[(page - first) * p.q_heads + h];
    }
  }
  return true;
}

template <typename T>
bool run(const PageScoreParams& p) {
  const int64_t runs = (p.width + kPagesPerItem - 1) / kPagesPerItem;
  const double work =
      static_cast<double>(p.batch * p.width) * p.ranges * p.q_heads * p.twice_dim;
  std::atomic<bool> in_range{true};
  parallel_for(p.batch * runs, num_threads(p.batch * runs, work / 40), [&](int64_t item) {
    if (!score_run<T>(p, item / runs, item % runs * kPagesPerItem)) in_range = false;
  });
  return in_range;
}

// [B, Hq, D] -> [B, Hq, 2D], times `factor`
std::vector<float> split_signs(const float* query, int64_t count, int32_t dim, float factor) {
  std::vector<float> split(static_cast<size_t>(count) * 2 * dim);
  for (int64_t i = 0; i < count; ++i) {
    for (int32_t d = 0; d < dim; ++d) {
      const float x = query[i * dim + d] * factor;
      split[i * 2 * dim + d] = std::max(x, 0.0f);
      split[i * 2 * dim + dim + d] = std::min(x, 0.0f);
    }
  }
  return split;
}

void page_score(Arguments& in) {
  PageScoreParams p;
  const TensorView query = in.tensor(), summaries = in.tensor();
  p.host_pages = rows_of<const int32_t>(in.tensor(), "host_page_table");
  p.num_pages = in.data<const int32_t>("num_pages");
  p.scales = in.data_or_null<const float>("scales");
  const TensorView scores = in.tensor();
  const auto scale = static_cast<float>(in.number<double>());
  const int32_t dim = static_cast<int32_t>(query.size(2));
  p.summaries = data_of<const char>(summaries, "summaries");
  p.scores = data_of<float>(scores, "scores");
  p.batch = query.size(0);
  p.width = scores.size(2);
  p.num_host_pages = summaries.size(0);
  p.q_heads = static_cast<int32_t>(query.size(1));
  p.ranges = static_cast<int32_t>(summaries.size(1));
  p.kv_heads = static_cast<int32_t>(summaries.size(2));
  p.group = p.q_heads / p.kv_heads;
  p.twice_dim = 2 * dim;
  const bool in_range = with_element_type(summaries, "summaries", [&](auto type) {
    using Given = decltype(type);
    using T = std::conditional_t<std::is_same_v<Given, Float8>, UnscaledFloat8, Given>;
    const int64_t count = p.batch * p.q_heads;
    const std::vector<float> split =
        split_signs(AsFloats(query, "query").data(), count, dim, scale * kRootOfScale<T>);
    std::vector<float> in_parts(split.size());
    split_in_parts<Parts<T>>(split.data(), count, p.twice_dim, 1, in_parts.data());
    p.query = in_parts.data();
    return run<T>(p);
  });
  if (!in_range) {
    require_host_pages(p.host_pages, p.num_pages, p.batch, p.width, p.num_host_pages);
  }
}

HISPARSE_EXPORT_KERNEL(page_score)

}  // namespace
}  // namespace hisparse
