// select: the forced pages and the best of the others, in ascending order.
#include "parallel.h"
#include "simd.h"
#include "tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
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
  int64_t* invalid_scores;   // [1], or null: selections with a score that is NaN or +inf
  int64_t batch, heads, width;
  int32_t out_heads, max_pages;
  float within;              // negative: the rule does not use it
  bool drop_last;            // the last page is ranked, but left out of the selection

  bool varies() const { return within >= 0; }
};

constexpr float kLargest = std::numeric_limits<float>::max();

// NaN as -inf, and inf as the largest number, so that a difference of scores is no NaN.
float finite(float score) { return score == score ? std::min(score, kLargest) : -INFINITY; }

Floats finite(Floats score) {
  const Floats limited = score < kLargest ? score : splat(kLargest);
  return score == score ? limited : splat(-INFINITY);
}

int32_t whole_vectors(int32_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Copies a head's scores, `finite`, and pads them to whole vectors with -inf. Returns whether one of
// them was NaN or +inf; `best` becomes the largest, if it is larger.
bool copy_finite(const float* scores, int32_t count, float* out, float& best) {
  Ints invalid = {};
  Floats highest = splat(-INFINITY);
  int32_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats score = Float32::load(scores + i), own = finite(score);
    invalid |= ~(score <= kLargest);
    highest = maximum(highest, own);
    store(out + i, own);
  }
  bool found = signs(invalid) != 0;
  for (int lane = 0; lane < kLanes; ++lane) best = std::max(best, highest[lane]);
  for (; i < count; ++i) {
    found |= !(scores[i] <= kLargest);
    out[i] = finite(scores[i]);
    best = std::max(best, out[i]);
  }
  std::fill(out + count, out + whole_vectors(count), -INFINITY);
  return found;
}

// Adds one head's vote to `out`: the pages' shares of its softmax or, with `within`, the distance
// of each page to the head's best score. `out` is padded to whole vectors. Returns whether a score
// was NaN or +inf.
bool vote(const SelectParams& p, const float* scores, float rest, int32_t count, float* out) {
  const int32_t whole = whole_vectors(count);
  thread_local std::vector<float> weights;
  if (weights.size() < static_cast<size_t>(whole)) weights.resize(whole);
  float* own = weights.data();
  float best = rest;
  const bool invalid = copy_finite(scores, count, own, best);
  if (p.within >= 0) {
    if (best == -INFINITY) return invalid;
    for (int32_t i = 0; i < whole; i += kLanes) {
      store(out + i, maximum(Float32::load(out + i), Float32::load(own + i) - best));
    }
    return invalid;
  }
  float top, total;
  exponentiate(own, count, &top, &total);
  if (top == -INFINITY) return invalid;
  const float highest = std::max(top, rest);
  const float here = std::exp(top - highest);
  const float scale = here / (total * here + std::exp(rest - highest));
  for (int32_t i = 0; i < whole; i += kLanes) {
    store(out + i, Float32::load(out + i) + Float32::load(own + i) * scale);
  }
  return invalid;
}

// One score per page for the heads that share a selection: a single head's scores if only ranks
// matter, else the sum of the heads' votes. `out` is padded to whole vectors. Returns whether a score
// was NaN or +inf.
bool combine(const SelectParams& p, int64_t b, int64_t head, int32_t count, float* out) {
  const int64_t group = std::max<int64_t>(1, p.heads / p.out_heads);
  // Fewer heads score than select: the heads of a group share their scores.
  const int64_t first = b * p.heads + head * p.heads / p.out_heads;
  if (group == 1 && !p.varies()) {
    float best = -INFINITY;
    return copy_finite(p.scores + first * p.width, count, out, best);
  }
  std::fill_n(out, whole_vectors(count), p.within >= 0 ? -INFINITY : 0.0f);
  bool invalid = false;
  for (int64_t source = first; source < first + group; ++source) {
    const float rest = p.rest == nullptr ? -INFINITY : p.rest[source];
    invalid |= !(rest <= kLargest);
    invalid |= vote(p, p.scores + source * p.width, finite(rest), count, out);
  }
  return invalid;
}

// Gives forced pages an infinite score. Returns how many there are.
int32_t mark_forced(const bool* forced, int32_t count, float* scores) {
  int32_t marked = 0;
  for (int32_t first = 0; first < count; first += 8) {
    // As a rule no page of eight is forced.
    const int32_t size = std::min(count - first, 8);
    uint64_t any = 0;
    std::memcpy(&any, forced + first, static_cast<size_t>(size));
    for (int32_t i = first; any != 0 && i < first + size; ++i) {
      if (!forced[i]) continue;
      scores[i] = INFINITY;
      ++marked;
    }
  }
  return marked;
}

// How many pages the rule asks for in addition to the forced ones, at most `most`.
int32_t asked_for(const SelectParams& p, const float* scores, int32_t count, int32_t most) {
  if (!p.varies()) return most;
  const auto near = [&](float score) { return score >= -p.within && score < INFINITY; };
  return std::min(most, static_cast<int32_t>(std::count_if(scores, scores + count, near)));
}

// How many of the ranks, whole vectors of them, are at least `least`.
int32_t count_from(const int32_t* ranks, int32_t whole, int32_t least) {
  Ints found = {};
  const Ints bound = Ints{} + least;
  // A comparison gives -1 where it holds.
  for (int32_t i = 0; i < whole; i += kLanes) found -= load_vector<Ints>(ranks + i) >= bound;
  int32_t count = 0;
  for (int lane = 0; lane < kLanes; ++lane) count += found[lane];
  return count;
}

// The `wanted` best pages, in ascending order; of equal ones the first. The scores, no NaN,
// have room for whole vectors.
void best_pages(float* scores, int32_t count, int32_t wanted, int32_t* pages) {
  if (wanted == 0) return;
  const int32_t whole = whole_vectors(count);
  std::fill(scores + count, scores + whole, -INFINITY);
  thread_local std::vector<int32_t> rank_list;
  if (rank_list.size() < static_cast<size_t>(whole)) rank_list.resize(whole);
  int32_t* ranks = rank_list.data();
  Ints lowest = Ints{} + std::numeric_limits<int32_t>::max(), highest = -lowest;
  for (int32_t i = 0; i < whole; i += kLanes) {
    // The sum makes -0 a 0. Negative floats have integers in the opposite order.
    const Ints bits = bit_cast<Ints>(Float32::load(scores + i) + 0.0f);
    const Ints rank = bits ^ (bits >> 31 & 0x7fffffff);
    std::memcpy(ranks + i, &rank, sizeof(rank));
    lowest = rank < lowest ? rank : lowest;
    highest = rank > highest ? rank : highest;
  }
  // `reached` ranks, at least as many as wanted, are `low` or more; `above`, fewer, are `high` or
  // more. The search ends early if no rank that is left out equals one that is chosen.
  int64_t low = lowest[0], high = highest[0];
  for (int lane = 1; lane < kLanes; ++lane) {
    low = std::min<int64_t>(low, lowest[lane]);
    high = std::max<int64_t>(high, highest[lane]);
  }
  ++high;
  int32_t reached = whole, above = 0;
  while (reached != wanted && high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const int32_t found = count_from(ranks, whole, static_cast<int32_t>(middle));
    if (found >= wanted) {
      low = middle;
      reached = found;
    } else {
      high = middle;
      above = found;
    }
  }
  int32_t ties = reached == wanted ? wanted : wanted - above;
  const int32_t least = static_cast<int32_t>(low);
  for (int32_t first = 0; first < whole; first += kLanes) {
    uint32_t left = signs(load_vector<Ints>(ranks + first) >= least);
    for (; left != 0; left &= left - 1) {
      const int32_t i = first + __builtin_ctz(left);
      if (ranks[i] == least && ties-- <= 0) continue;
      *pages++ = i;
    }
  }
}

void select_row(const SelectParams& p, int64_t b, int64_t head) {
  thread_local std::vector<float> combined;
  const int32_t count = p.num_pages[b];
  int32_t length = std::min(count, p.max_pages);
  int32_t* pages = p.pages + (b * p.out_heads + head) * p.max_pages;
  if (count > 0 && (p.varies() || count > length)) {
    const size_t whole = static_cast<size_t>(whole_vectors(count));
    if (combined.size() < whole) combined.resize(whole);
    float* scores = combined.data();
    if (combine(p, b, head, count, scores) && p.invalid_scores != nullptr) {
      __atomic_fetch_add(p.invalid_scores, 1, __ATOMIC_RELAXED);
    }
    for (size_t i = 0; i < whole; i += kLanes) {
      store(scores + i, maximum(Float32::load(scores + i), splat(-kLargest)));
    }
    // Infinity marks a forced page.
    int32_t forced = 0;
    if (p.forced != nullptr) forced = mark_forced(p.forced + b * p.width, count, scores);
    forced = std::min(forced, length);
    length = forced + asked_for(p, scores, count, length - forced);
    best_pages(scores, count, length, pages);
  } else {
    for (int32_t i = 0; i < count; ++i) pages[i] = i;
  }
  if (p.drop_last && length > 0 && pages[length - 1] == count - 1) --length;
  std::fill_n(pages + length, p.max_pages - length, -1);
  p.lengths[b * p.out_heads + head] = length;
}

void run(const SelectParams& p) {
  const int64_t rows = p.batch * p.out_heads;
  const double work_ns = 2.0 * static_cast<double>(p.batch * p.heads * p.width);
  parallel_for(rows, num_threads(rows, work_ns),
               [&](int64_t r) { select_row(p, r / p.out_heads, r % p.out_heads); });
}

void select(Arguments& in) {
  SelectParams p;
  const TensorView scores = in.tensor();
  p.num_pages = in.data<const int32_t>("num_pages");
  p.forced = in.data_or_null<const bool>("forced");
  p.rest = in.data_or_null<const float>("rest");
  p.invalid_scores = in.data_or_null<int64_t>("invalid_scores");
  const TensorView pages = in.tensor();
  p.lengths = in.data<int32_t>("lengths");
  p.within = static_cast<float>(in.number<double>());
  p.drop_last = in.number<bool>();
  p.scores = data_of<const float>(scores, "scores");
  p.pages = data_of<int32_t>(pages, "pages");
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

HISPARSE_EXPORT_KERNEL(select)

}  // namespace
}  // namespace hisparse
