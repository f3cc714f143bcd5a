// select: sinks, recent pages and the best of the others, in ascending order.
#include "parallel.h"
#include "tensors.h"

#include <algorithm>
#include <cmath>
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
  std::fill_n(out, count, 0.0f);
  std::vector<float> weight(static_cast<size_t>(count));
  for (int64_t g = 0; g < group; ++g, scores += p.width) {
    float highest = -INFINITY, sum = 0;
    for (int32_t i = 0; i < count; ++i) highest = std::max(highest, scores[i]);
    for (int32_t i = 0; i < count; ++i) {
      weight[i] = std::exp(scores[i] - highest);
      sum += weight[i];
    }
    const float scale = 1.0f / sum;
    for (int32_t i = 0; i < count; ++i) out[i] += weight[i] * scale;
  }
}

void select_row(const SelectParams& p, int64_t b, int64_t head, std::vector<float>& combined,
                std::vector<int32_t>& ranked) {
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
  ranked.resize(static_cast<size_t>(count - sinks - recents));
  for (size_t i = 0; i < ranked.size(); ++i) ranked[i] = sinks + static_cast<int32_t>(i);
  const auto higher = [&](int32_t x, int32_t y) {
    return combined[x] != combined[y] ? combined[x] > combined[y] : x < y;
  };
  std::nth_element(ranked.begin(), ranked.begin() + best, ranked.end(), higher);
  std::sort(ranked.begin(), ranked.begin() + best);
  for (int32_t i = 0; i < sinks; ++i) pages[i] = i;
  std::copy_n(ranked.begin(), best, pages + sinks);
  for (int32_t i = 0; i < recents; ++i) pages[sinks + best + i] = count - recents + i;
}

void run(const SelectParams& p) {
  const int64_t rows = p.batch * p.out_heads;
  const double work_ns = 4.0 * static_cast<double>(p.batch * p.heads * p.width);
  parallel_for(rows, num_threads(rows, work_ns), [&](int64_t r) {
    thread_local std::vector<float> combined;
    thread_local std::vector<int32_t> ranked;
    select_row(p, r / p.out_heads, r % p.out_heads, combined, ranked);
  });
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
