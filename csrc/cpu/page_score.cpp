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
namespace {

struct PageScoreParams {
  const float* query;              // [B, Hq, 2D]: positive part of q, then its negative part
  const char* summaries;           // [host pages, Hkv, 2D]: maxima, then minima
  Rows<const int32_t> host_pages;  // [B, P]
  const int32_t* num_pages;        // [B]
  float* scores;                   // [B, Hq, P]
  int64_t batch, width, num_host_pages;
  int32_t q_heads, kv_heads, twice_dim;
};

constexpr int64_t kPagesPerItem = 64;
constexpr int64_t kPagesAhead = 1;

// One page, all heads: scores [Hq, kPagesPerItem]. Summaries lie scattered, so that of a later page
// is prefetched.
template <typename T>
void score_page(const PageScoreParams& p, const float* q, const typename T::Raw* summary,
                const typename T::Raw* ahead, float* scores) {
  const int32_t group = p.q_heads / p.kv_heads, width = p.twice_dim;
  for (int32_t kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
    // The largest q.k that a page allows is q+ . maxima + q- . minima: one product of width 2D.
    dots<T>(q, group, summary, ahead, width, scores, kPagesPerItem);
    q += group * width, scores += group * kPagesPerItem;
    summary += width, ahead += width;
  }
}

// Scores a run of pages; false if one of them is not among the host pages.
template <typename T>
bool score_run(const PageScoreParams& p, int64_t b, int64_t first) {
  using Raw = typename T::Raw;
  const int64_t page_items = static_cast<int64_t>(p.kv_heads) * p.twice_dim;
  const int64_t last = std::min(first + kPagesPerItem, p.width);
  const int64_t present = std::clamp<int64_t>(p.num_pages[b], first, last);
  const int32_t* host_pages = p.host_pages[b];
  const Raw* summaries = reinterpret_cast<const Raw*>(p.summaries);
  for (int64_t page = first; page < present; ++page) {
    if (host_pages[page] < 0 || host_pages[page] >= p.num_host_pages) return false;
  }
  // Rows of scores may be a power of two apart. Written page by page, they would compete for one
  // set of the cache.
  thread_local std::vector<float> scores;
  scores.resize(p.q_heads * kPagesPerItem);
  const float* query = p.query + b * p.q_heads * p.twice_dim;
  for (int64_t page = first; page < present; ++page) {
    const int64_t next = host_pages[std::min(page + kPagesAhead, present - 1)];
    score_page<T>(p, query, summaries + host_pages[page] * page_items,
                  summaries + next * page_items, scores.data() + (page - first));
  }
  for (int32_t h = 0; h < p.q_heads; ++h) {
    float* out = p.scores + (b * p.q_heads + h) * p.width;
    std::copy_n(scores.data() + h * kPagesPerItem, present - first, out + first);
    std::fill(out + present, out + last, -INFINITY);
  }
  return true;
}

template <typename T>
bool run(const PageScoreParams& p) {
  const int64_t runs = (p.width + kPagesPerItem - 1) / kPagesPerItem;
  const double work = static_cast<double>(p.batch * p.width) * p.q_heads * p.twice_dim;
  std::atomic<bool> in_range{true};
  parallel_for(p.batch * runs, num_threads(p.batch * runs, work / 40), [&](int64_t item) {
    if (!score_run<T>(p, item / runs, item % runs * kPagesPerItem)) in_range = false;
  });
  return in_range;
}

// [B, Hq, D] -> [B, Hq, 2D]
std::vector<float> split_signs(const float* query, int64_t count, int32_t dim) {
  std::vector<float> split(static_cast<size_t>(count) * 2 * dim);
  for (int64_t i = 0; i < count; ++i) {
    for (int32_t d = 0; d < dim; ++d) {
      const float x = query[i * dim + d];
      split[i * 2 * dim + d] = std::max(x, 0.0f);
      split[i * 2 * dim + dim + d] = std::min(x, 0.0f);
    }
  }
  return split;
}

void page_score(TensorView query, TensorView summaries, TensorView host_page_table,
                TensorView num_pages, TensorView scores) {
  const int32_t dim = static_cast<int32_t>(query.size(2));
  const std::vector<float> split = split_signs(vector_of<const float>(query, "query"),
                                               query.size(0) * query.size(1), dim);
  PageScoreParams p;
  p.query = split.data();
  p.summaries = vector_of<const char>(summaries, "summaries");
  p.host_pages = rows_of<const int32_t>(host_page_table, "host_page_table");
  p.num_pages = vector_of<const int32_t>(num_pages, "num_pages");
  p.scores = vector_of<float>(scores, "scores");
  p.batch = query.size(0);
  p.width = scores.size(2);
  p.num_host_pages = summaries.size(0);
  p.q_heads = static_cast<int32_t>(query.size(1));
  p.kv_heads = static_cast<int32_t>(summaries.size(1));
  p.twice_dim = 2 * dim;
  const bool in_range = with_element_type(summaries, "summaries", [&](auto type) {
    return run<decltype(type)>(p);
  });
  if (!in_range) {
    TVM_FFI_THROW(ValueError) << "host_page_table: a page is outside [0, " << p.num_host_pages
                              << "), the summaries' pages";
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(page_score, page_score);

}  // namespace
}  // namespace hisparse
