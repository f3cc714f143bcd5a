// key_score: the maximum or the log-sum-exp of q.k over each page's tokens, with keys read in place
// from the host pool.
#include "dots.h"
#include "logit_cap.h"
#include "parallel.h"
#include "simd.h"
#include "tensors.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

namespace hisparse {
namespace {

struct HostKeys {
  const char* data;  // [pages, heads, page_size, dim]; strides in elements
  int64_t page_stride, head_stride, token_stride;
  int64_t num_pages;
  int32_t heads, page_size, dim;
};

HostKeys host_keys_of(TensorView keys) {
  HostKeys found;
  found.data = data_of<const char>(keys, "keys");
  found.page_stride = keys.stride(0);
  found.head_stride = keys.stride(1);
  found.token_stride = keys.stride(2);
  found.num_pages = keys.size(0);
  found.heads = static_cast<int32_t>(keys.size(1));
  found.page_size = static_cast<int32_t>(keys.size(2));
  found.dim = static_cast<int32_t>(keys.size(3));
  return found;
}

// Reports a page outside the pool.
void check_in_pool(bool in_pool, const HostKeys& keys) {
  if (!in_pool) {
    TVM_FFI_THROW(ValueError) << "host_page_table: a page is outside [0, " << keys.num_pages
                              << "), the pages of the keys";
  }
}

struct KeyScoreParams {
  const float* query;              // [B, Hq, D]
  HostKeys keys;
  Rows<const int32_t> host_pages;  // [B, P]
  const int32_t* num_pages;        // [B]
  float* scores;                   // [B, Hq, P]
  int64_t batch, width;
  int32_t q_heads;
  bool sums;                       // log-sum-exp, else maximum
  float logit_cap;                 // 0: none
};

constexpr int64_t kPagesPerItem = 64;
constexpr int64_t kTokensAhead = 16;

// Reduces the logits [tokens, G] of a page to [G].
template <int G>
void reduce(const KeyScoreParams& p, float* logits, float* scores) {
  if (p.logit_cap > 0) cap_logits(logits, int64_t{G} * p.keys.page_size, p.logit_cap);
  if (p.sums) {
    float totals[G];
    exponentiate<G>(logits, p.keys.page_size, scores, totals);
    for (int g = 0; g < G; ++g) scores[g] += std::log(totals[g]);
    return;
  }
  std::copy_n(logits, G, scores);
  for (int32_t token = 1; token < p.keys.page_size; ++token) {
    for (int g = 0; g < G; ++g) scores[g] = std::max(scores[g], logits[token * G + g]);
  }
}

// One run of pages for the query heads of one KV head; false if a page is not in the pool.
template <typename T>
bool score_run(const KeyScoreParams& p, int64_t b, int64_t kv_head, int64_t first) {
  using Raw = typename T::Raw;
  const int64_t last = std::min(first + kPagesPerItem, p.width);
  const int64_t present = std::clamp<int64_t>(p.num_pages[b], first, last);
  const int64_t group = p.q_heads / p.keys.heads, row = b * p.q_heads + kv_head * group;
  const int64_t room = (p.keys.page_size + kLanes - 1) / kLanes * kLanes;
  const Raw* keys = reinterpret_cast<const Raw*>(p.keys.data) + kv_head * p.keys.head_stride;
  float* scores = p.scores + row * p.width;
  for (int64_t g = 0; g < group; ++g) {
    std::fill(scores + g * p.width + first, scores + g * p.width + last, -INFINITY);
  }
  for (int64_t page = first; page < present; ++page) {
    if (p.host_pages[b][page] < 0 || p.host_pages[b][page] >= p.keys.num_pages) return false;
  }
  const auto keys_of = [&](int64_t page) {
    return keys + p.host_pages[b][std::min(page, present - 1)] * p.keys.page_stride;
  };
  const int64_t pages_ahead = std::max<int64_t>(1, kTokensAhead / p.keys.page_size);
  thread_local std::vector<float> logits;
  logits.resize(group * room);
  std::vector<float> found(group);
  for (int64_t page = first; page < present; ++page) {
    page_dots<T>(p.query + row * p.keys.dim, static_cast<int32_t>(group), keys_of(page),
                 keys_of(page + pages_ahead), p.keys.token_stride, p.keys.page_size, p.keys.dim,
                 logits.data(), room);
    for_blocks(static_cast<int32_t>(group), [&](auto queries, int32_t g) {
      reduce<decltype(queries)::value>(p, logits.data() + g * room, &found[g]);
    });
    for (int64_t g = 0; g < group; ++g) scores[g * p.width + page] = found[g];
  }
  return true;
}

template <typename T>
bool run(const KeyScoreParams& p) {
  const int64_t runs = (p.width + kPagesPerItem - 1) / kPagesPerItem;
  const int64_t items = p.batch * p.keys.heads * runs;
  const double work =
      static_cast<double>(p.batch * p.width) * p.keys.page_size * p.q_heads * p.keys.dim / 20;
  std::atomic<bool> in_range{true};
  parallel_for(items, num_threads(items, work), [&](int64_t item) {
    const int64_t b = item / runs / p.keys.heads, kv_head = item / runs % p.keys.heads;
    if (!score_run<T>(p, b, kv_head, item % runs * kPagesPerItem)) in_range = false;
  });
  return in_range;
}

void key_score(Arguments& in) {
  const TensorView query = in.tensor(), keys = in.tensor(), host_page_table = in.tensor(),
                   num_pages = in.tensor();
  const TensorView scores = in.tensor();
  const auto sums = in.number<bool>();
  const auto logit_cap = in.number<double>();
  KeyScoreParams p;
  p.query = data_of<const float>(query, "query");
  p.keys = host_keys_of(keys);
  p.host_pages = rows_of<const int32_t>(host_page_table, "host_page_table");
  p.num_pages = data_of<const int32_t>(num_pages, "num_pages");
  p.scores = data_of<float>(scores, "scores");
  p.batch = query.size(0);
  p.width = scores.size(2);
  p.q_heads = static_cast<int32_t>(query.size(1));
  p.sums = sums;
  p.logit_cap = static_cast<float>(logit_cap);
  check_in_pool(with_element_type(keys, "keys", [&](auto type) { return run<decltype(type)>(p); }),
                p.keys);
}

HISPARSE_EXPORT_KERNEL(key_score)

}  // namespace
}  // namespace hisparse
