// page_score: Quest's bound on q.k of every page, straight from the summaries by host page.
#include "parallel.h"
#include "tensors.h"

#include <algorithm>
#include <atomic>
#include <cmath>

namespace hisparse {
namespace {

struct PageScoreParams {
  const float* query;               // [B, Hq, D]
  const float* summaries;           // [host pages, Hkv, 2D]: maxima, then minima
  Rows<const int32_t> host_pages;   // [B, P]
  const int32_t* num_pages;         // [B]
  float* scores;                    // [B, Hq, P]
  int64_t batch, width, num_host_pages;
  int32_t q_heads, kv_heads, dim;
};

constexpr int32_t kLanes = 16;

// sum_d max(q_d * high_d, q_d * low_d); independent lanes, so that it vectorises.
inline float bound(const float* q, const float* high, const float* low, int32_t dim) {
  float lanes[kLanes] = {};
  int32_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    for (int32_t i = 0; i < kLanes; ++i) {
      const float a = q[d + i] * high[d + i], b = q[d + i] * low[d + i];
      lanes[i] += a > b ? a : b;
    }
  }
  float sum = 0;
  for (; d < dim; ++d) sum += std::max(q[d] * high[d], q[d] * low[d]);
  for (float lane : lanes) sum += lane;
  return sum;
}

void score_page(const PageScoreParams& p, int64_t b, int64_t page, int32_t host_page) {
  const int32_t group = p.q_heads / p.kv_heads;
  const float* summary = p.summaries + static_cast<int64_t>(host_page) * p.kv_heads * 2 * p.dim;
  for (int32_t h = 0; h < p.q_heads; ++h) {
    const float* high = summary + static_cast<int64_t>(h / group) * 2 * p.dim;
    const float* q = p.query + (b * p.q_heads + h) * p.dim;
    p.scores[(b * p.q_heads + h) * p.width + page] = bound(q, high, high + p.dim, p.dim);
  }
}

constexpr int64_t kPagesPerItem = 64;

// Scores a run of pages; false if one of them is not among the host pages.
bool score_run(const PageScoreParams& p, int64_t b, int64_t first) {
  bool in_range = true;
  const int64_t last = std::min(first + kPagesPerItem, p.width);
  for (int64_t page = first; page < last; ++page) {
    if (page >= p.num_pages[b]) {
      for (int32_t h = 0; h < p.q_heads; ++h) {
        p.scores[(b * p.q_heads + h) * p.width + page] = -INFINITY;
      }
      continue;
    }
    const int32_t host_page = p.host_pages[b][page];
    const bool valid = host_page >= 0 && host_page < p.num_host_pages;
    if (valid) score_page(p, b, page, host_page);
    in_range = in_range && valid;
  }
  return in_range;
}

bool run(const PageScoreParams& p) {
  const int64_t runs = (p.width + kPagesPerItem - 1) / kPagesPerItem;
  const double work = static_cast<double>(p.batch * p.width) * p.q_heads * p.dim;
  std::atomic<bool> in_range{true};
  parallel_for(p.batch * runs, num_threads(p.batch * runs, work / 16), [&](int64_t item) {
    if (!score_run(p, item / runs, item % runs * kPagesPerItem)) in_range = false;
  });
  return in_range;
}

void page_score(TensorView query, TensorView summaries, TensorView host_page_table,
                TensorView num_pages, TensorView scores) {
  PageScoreParams p;
  p.query = vector_of<const float>(query, "query");
  p.summaries = vector_of<const float>(summaries, "summaries");
  p.host_pages = rows_of<const int32_t>(host_page_table, "host_page_table");
  p.num_pages = vector_of<const int32_t>(num_pages, "num_pages");
  p.scores = vector_of<float>(scores, "scores");
  p.batch = query.size(0);
  p.width = scores.size(2);
  p.num_host_pages = summaries.size(0);
  p.q_heads = static_cast<int32_t>(query.size(1));
  p.kv_heads = static_cast<int32_t>(summaries.size(1));
  p.dim = static_cast<int32_t>(query.size(2));
  if (!run(p)) {
    TVM_FFI_THROW(ValueError) << "host_page_table: a page is outside [0, " << p.num_host_pages
                              << "), the summaries' pages";
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(page_score, page_score);

}  // namespace
}  // namespace hisparse
