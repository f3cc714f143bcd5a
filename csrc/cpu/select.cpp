// select: sinks, recent pages and the best of the others, in ascending order.
#include "parallel.h"
#include "simd.h"
#include "tensors.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

namespace hisparse {
namespace {

struct SelectParams {
  const float* scores;       // [B, heads, P]
  const int32_t* num_pages;  // [B]
  int32_t* pages;            // [B, H, K]
  int32_t* lengths;          // [B, H]
  int64_t batch, heads, width;
  int32_t out_heads, max_pages, num_sinks, num_recents;
};

// One score per page for the `group` heads that share a selection: a single head's as they are,
// else the sum of the heads' softmax over the pages.
void combine(const SelectParams& p, int64_t b, int64_t head, int32_t count, float* out) {
  const int64_t group = p.heads / p.out_heads;
  const float* scores = p.scores + (b * p.heads + head * group) * p.width;
  if (group <= 1) {
    // Fewer heads score than select: the heads of a group share their scores.
    const int64_t source = group == 1 ? head : head * p.heads / p.out_heads;
    std::copy_n(p.scores + (b * p.heads + source) * p.width, count, out);
    return;
  }
  const int32_t whole = (count + kLanes - 1) / kLanes * kLanes;
  thread_local std::vector<float> weights;
  if (weights.size() < static_cast<size_t>(whole)) weights.resize(whole);
  std::fill_n(out, count, 0.0f);
  for (int64_t g = 0; g < group; ++g, scores += p.width) {
    float total = 0;
    std::copy_n(scores, count, weights.data());
    exponentiate(weights.data(), count, &total);
    const float scale = 1.0f / total;
    for (int32_t i = 0; i < count; ++i) out[i] += weights[i] * scale;
  }
}

// The `count` best pages from `first` to `last - 1`, in ascending order; of equal ones the first.
void best_pages(const std::vector<float>& scores, int32_t first, int32_t last, int32_t count,
                std::vector<float>& ranked, int32_t* pages) {
  if (count == 0) return;
  ranked.assign(scores.begin() + first, scores.begin() + last);
  std::nth_element(ranked.begin(), ranked.begin() + (count - 1), ranked.end(),
                   std::greater<float>());
  const float least = ranked[count - 1];
  int32_t ties = count;
  for (int32_t i = first; i < last; ++i) ties -= scores[i] > least;
  for (int32_t i = first; i < last; ++i) {
    const bool tie = scores[i] == least;
    if (scores[i] > least || (tie && ties > 0)) *pages++ = i;
    ties -= tie;
  }
}

void select_row(const SelectParams& p, int64_t b, int64_t head) {
  thread_local std::vector<float> combined, ranked;
  const int32_t count = p.num_pages[b];
  const int32_t length = std::min(count, p.max_pages);
  int32_t* pages = p.pages + (b * p.out_heads + head) * p.max_pages;
  p.lengths[b * p.out_heads + head] = length;
  std::fill_n(pages + length, p.max_pages - length, -1);
  if (count <= p.max_pages) {
    for (int32_t i = 0; i < count; ++i) pages[i] = i;
    return;
  }
  combined.resize(static_cast<size_t>(count));
  combine(p, b, head, count, combined.data());
  const int32_t sinks = std::min(p.num_sinks, length);
  const int32_t recents = std::min(p.num_recents, length - sinks);
  const int32_t best = length - sinks - recents;
  for (int32_t i = 0; i < sinks; ++i) pages[i] = i;
  best_pages(combined, sinks, count - recents, best, ranked, pages + sinks);
  for (int32_t i = 0; i < recents; ++i) pages[sinks + best + i] = count - recents + i;
}

void run(const SelectParams& p) {
  const int64_t rows = p.batch * p.out_heads;
  const double work_ns = 2.0 * static_cast<double>(p.batch * p.heads * p.width);
  parallel_for(rows, num_threads(rows, work_ns),
               [&](int64_t r) { select_row(p, r / p.out_heads, r % p.out_heads); });
}

void select(TensorView scores, TensorView num_pages, TensorView pages, TensorView lengths,
            int64_t num_sinks, int64_t num_recents) {
  SelectParams p;
  p.scores = vector_of<const float>(scores, "scores");
  p.num_pages = vector_of<const int32_t>(num_pages, "num_pages");
  p.pages = vector_of<int32_t>(pages, "pages");
  p.lengths = vector_of<int32_t>(lengths, "lengths");
  p.batch = scores.size(0);
  p.heads = scores.size(1);
  p.width = scores.size(2);
  p.out_heads = static_cast<int32_t>(pages.size(1));
  p.max_pages = static_cast<int32_t>(pages.size(2));
  p.num_sinks = static_cast<int32_t>(num_sinks);
  p.num_recents = static_cast<int32_t>(num_recents);
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.num_pages[b] < 0 || p.num_pages[b] > p.width) {
      TVM_FFI_THROW(ValueError) << "num_pages: got " << p.num_pages[b] << ", expected 0 to "
                                << p.width;
    }
  }
  run(p);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(select, select);

}  // namespace
}  // namespace hisparse
