// select: the forced pages and the best of the others, in ascending order.
#include "parallel.h"
#include "simd.h"
#include "tensors.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace hisparse {
namespace {

struct SelectParams {
  const float* scores;       // [B, heads, P]
  const bool* forced;        // [B, P], or null
  const float* rest;         // [B, heads], or null
  const int32_t* num_pages;  // [B]
  int32_t* pages;            // [B, H, K]
  int32_t* lengths;          // [B, H]
  int64_t batch, heads, width;
  int32_t out_heads, max_pages;
  float mass, within;        // negative: the rule does not use it

  bool varies() const { return mass >= 0 || within >= 0; }
};

constexpr float kLargest = std::numeric_limits<float>::max();

// NaN as -inf, and inf as the largest number, so that a difference of scores is no NaN.
float finite(float score) { return score == score ? std::min(score, kLargest) : -INFINITY; }

// Adds one head's vote to `out`: the pages' shares of its softmax or, with `within`, the distance
// of each page to the head's best score.
void vote(const SelectParams& p, const float* scores, float rest, int32_t count, float* out) {
  if (p.within >= 0) {
    float best = rest;
    for (int32_t i = 0; i < count; ++i) best = std::max(best, finite(scores[i]));
    if (best == -INFINITY) return;
    for (int32_t i = 0; i < count; ++i) out[i] = std::max(out[i], finite(scores[i]) - best);
    return;
  }
  const int32_t whole = (count + kLanes - 1) / kLanes * kLanes;
  thread_local std::vector<float> weights;
  if (weights.size() < static_cast<size_t>(whole)) weights.resize(whole);
  float total = 0;
  std::transform(scores, scores + count, weights.data(), finite);
  float top;
  exponentiate(weights.data(), count, &top, &total);
  if (top == -INFINITY) return;
  const float highest = std::max(top, rest);
  const float here = std::exp(top - highest);
  const float scale = here / (total * here + std::exp(rest - highest));
  for (int32_t i = 0; i < count; ++i) out[i] += weights[i] * scale;
}

// One score per page for the heads that share a selection: a single head's scores if only ranks
// matter, else the sum of the heads' votes.
void combine(const SelectParams& p, int64_t b, int64_t head, int32_t count, float* out) {
  const int64_t group = std::max<int64_t>(1, p.heads / p.out_heads);
  // Fewer heads score than select: the heads of a group share their scores.
  const int64_t first = b * p.heads + head * p.heads / p.out_heads;
  if (group == 1 && !p.varies()) {
    std::copy_n(p.scores + first * p.width, count, out);
    return;
  }
  std::fill_n(out, count, p.within >= 0 ? -INFINITY : 0.0f);
  for (int64_t source = first; source < first + group; ++source) {
    const float rest = p.rest == nullptr ? -INFINITY : finite(p.rest[source]);
    vote(p, p.scores + source * p.width, rest, count, out);
  }
}

// How many pages besides the forced ones the rule asks for, at most `most`.
int32_t asked_for(const SelectParams& p, const std::vector<float>& scores, int32_t most,
                  std::vector<float>& ranked) {
  if (!p.varies()) return most;
  ranked.clear();
  for (const float score : scores) {
    if (score < INFINITY) ranked.push_back(score);
  }
  if (p.within >= 0) {
    const auto near = [&](float score) { return score >= -p.within; };
    return std::min(most, static_cast<int32_t>(std::count_if(ranked.begin(), ranked.end(), near)));
  }
  double left_out = 0;
  for (const float share : ranked) left_out += share;
  const double spare = (1.0 - p.mass) * std::max<int64_t>(1, p.heads / p.out_heads);
  std::partial_sort(ranked.begin(), ranked.begin() + most, ranked.end(), std::greater<float>());
  int32_t needed = 0;
  while (needed < most && left_out > spare) left_out -= ranked[needed++];
  return needed;
}

// The `count` best pages, in ascending order; of equal ones the first.
void best_pages(const std::vector<float>& scores, int32_t count, std::vector<float>& ranked,
                int32_t* pages) {
  if (count == 0) return;
  ranked.assign(scores.begin(), scores.end());
  std::nth_element(ranked.begin(), ranked.begin() + (count - 1), ranked.end(),
                   std::greater<float>());
  const float least = ranked[count - 1];
  int32_t ties = count;
  for (const float score : scores) ties -= score > least;
  const int32_t total = static_cast<int32_t>(scores.size());
  for (int32_t i = 0; i < total; ++i) {
    const bool tie = scores[i] == least;
    if (scores[i] > least || (tie && ties > 0)) *pages++ = i;
    ties -= tie;
  }
}

void select_row(const SelectParams& p, int64_t b, int64_t head) {
  thread_local std::vector<float> combined, ranked;
  const int32_t count = p.num_pages[b];
  int32_t length = std::min(count, p.max_pages);
  int32_t* pages = p.pages + (b * p.out_heads + head) * p.max_pages;
  if (p.varies() || count > length) {
    combined.resize(static_cast<size_t>(count));
    combine(p, b, head, count, combined.data());
    for (float& score : combined) score = std::max(finite(score), -kLargest);
    // Infinity marks a forced page.
    int32_t forced = 0;
    for (int32_t i = 0; p.forced != nullptr && i < count; ++i) {
      if (!p.forced[b * p.width + i]) continue;
      combined[i] = INFINITY;
      ++forced;
    }
    forced = std::min(forced, length);
    length = forced + asked_for(p, combined, length - forced, ranked);
    best_pages(combined, length, ranked, pages);
  } else {
    for (int32_t i = 0; i < count; ++i) pages[i] = i;
  }
  std::fill_n(pages + length, p.max_pages - length, -1);
  p.lengths[b * p.out_heads + head] = length;
}

void run(const SelectParams& p) {
  const int64_t rows = p.batch * p.out_heads;
  const double work_ns = 2.0 * static_cast<double>(p.batch * p.heads * p.width);
  parallel_for(rows, num_threads(rows, work_ns),
               [&](int64_t r) { select_row(p, r / p.out_heads, r % p.out_heads); });
}

void select(TensorView scores, TensorView num_pages, TensorView forced, TensorView rest,
            TensorView pages, TensorView lengths, double mass, double within) {
  SelectParams p;
  p.scores = vector_of<const float>(scores, "scores");
  p.forced = forced.size(0) == 0 ? nullptr : vector_of<const bool>(forced, "forced");
  p.rest = rest.size(0) == 0 ? nullptr : vector_of<const float>(rest, "rest");
  p.mass = static_cast<float>(mass);
  p.within = static_cast<float>(within);
  p.num_pages = vector_of<const int32_t>(num_pages, "num_pages");
  p.pages = vector_of<int32_t>(pages, "pages");
  p.lengths = vector_of<int32_t>(lengths, "lengths");
  p.batch = scores.size(0);
  p.heads = scores.size(1);
  p.width = scores.size(2);
  p.out_heads = static_cast<int32_t>(pages.size(1));
  p.max_pages = static_cast<int32_t>(pages.size(2));
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
