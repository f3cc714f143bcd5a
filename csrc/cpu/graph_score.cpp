// graph_score: DIPR's search in a graph over a request's keys. It scores as key_score does, but
// only the tokens that the search reaches.
#include "dots.h"
#include "host_keys.h"
#include "parallel.h"
#include "simd.h"
#include "tensors.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <queue>
#include <utility>
#include <vector>

namespace hisparse {
namespace {

struct GraphScoreParams {
  const float* query;              // [B, Hq, D]
  HostKeys keys;
  Rows<const int32_t> host_pages;  // [B, P]
  const int32_t* num_pages;        // [B]
  const int64_t* links;            // [B]: address of [Hkv, tokens, links per token] int32
  const int64_t* tokens;           // [B], tokens that are in the graph
  const float* best;               // [B, Hq]: q.k that is known already
  float* scores;                   // [B, Hq, P]
  int64_t batch, width;
  int32_t q_heads, links_per_token, entry_stride, threshold;
  float within;
};

constexpr int32_t kMostLinks = 256;

// The search of one query head.
template <typename T>
class Search {
 public:
  Search(const GraphScoreParams& p, int64_t b, int64_t head)
      : p_(p),
        query_(p.query + (b * p.q_heads + head) * p.keys.dim),
        keys_(reinterpret_cast<const Raw*>(p.keys.data) +
              head / (p.q_heads / p.keys.heads) * p.keys.head_stride),
        host_pages_(p.host_pages[b]),
        scores_(p.scores + (b * p.q_heads + head) * p.width),
        links_(reinterpret_cast<const int32_t*>(p.links[b]) +
               head / (p.q_heads / p.keys.heads) * p.tokens[b] * p.links_per_token),
        tokens_(static_cast<int32_t>(
            std::min<int64_t>(p.tokens[b], int64_t{p.num_pages[b]} * p.keys.page_size))),
        best_(p.best[b * p.q_heads + head]) {}

  // False if a page is not in the pool.
  bool run() {
    begin();
    for (int32_t token = 0; token < tokens_ && sound_; token += p_.entry_stride) visit(token);
    for (int32_t explored = 0; sound_ && !frontier_.empty(); ++explored) {
      const auto [product, negated] = frontier_.top();
      frontier_.pop();
      // Explores all candidates up to the threshold, then critical ones only.
      if (explored >= p_.threshold && product < best_ - p_.within) break;
      explore(-negated);
    }
    return sound_;
  }

 private:
  using Raw = typename T::Raw;

  // Marks seen tokens with the number of this search, so that marks need no clearing.
  void begin() {
    if (seen().size() < static_cast<size_t>(tokens_)) seen().resize(tokens_, 0);
    if (++number() == 0) {
      std::fill(seen().begin(), seen().end(), 0);
      number() = 1;
    }
  }

  const Raw* key(int32_t token) {
    const int32_t host_page = host_pages_[token / p_.keys.page_size];
    if (host_page < 0 || host_page >= p_.keys.num_pages) {
      sound_ = false;
      return nullptr;
    }
    return keys_ + host_page * p_.keys.page_stride + token % p_.keys.page_size * p_.keys.token_stride;
  }

  void explore(int32_t token) {
    const int32_t* links = links_ + static_cast<int64_t>(token) * p_.links_per_token;
    int32_t fresh[kMostLinks];
    int32_t count = 0;
    for (int32_t i = 0; i < p_.links_per_token; ++i) {
      const int32_t next = links[i];
      if (next < 0 || next >= tokens_ || seen()[next] == number()) continue;
      // Keys lie scattered, so all of a token's neighbours are prefetched before the first is read.
      if (const Raw* ahead = key(next)) __builtin_prefetch(ahead);
      fresh[count++] = next;
    }
    for (int32_t i = 0; i < count && sound_; ++i) visit(fresh[i]);
  }

  void visit(int32_t token) {
    if (seen()[token] == number()) return;
    seen()[token] = number();
    const Raw* k = key(token);
    if (k == nullptr) return;
    float product;
    dots_of<T, 1, 1>(query_, &k, 0, p_.keys.dim, &product);
    float& score = scores_[token / p_.keys.page_size];
    score = std::max(score, product);
    best_ = std::max(best_, product);
    // Of equal products the earlier token comes first.
    frontier_.emplace(product, -token);
  }

  static std::vector<uint32_t>& seen() {
    thread_local std::vector<uint32_t> numbers;
    return numbers;
  }
  static uint32_t& number() {
    thread_local uint32_t current = 0;
    return current;
  }

  const GraphScoreParams& p_;
  const float* query_;
  const Raw* keys_;
  const int32_t* host_pages_;
  float* scores_;
  const int32_t* links_;
  int32_t tokens_;
  float best_;
  bool sound_ = true;
  std::priority_queue<std::pair<float, int32_t>> frontier_;
};

template <typename T>
bool run(const GraphScoreParams& p) {
  const int64_t items = p.batch * p.q_heads;
  // A search rarely sees fewer than a thousand tokens, each a cache miss.
  const double work_ns = 1e5 * static_cast<double>(items);
  std::atomic<bool> sound{true};
  parallel_for(items, num_threads(items, work_ns), [&](int64_t item) {
    std::fill_n(p.scores + item * p.width, p.width, -INFINITY);
    const int64_t b = item / p.q_heads;
    if (p.tokens[b] > 0 && !Search<T>(p, b, item % p.q_heads).run()) sound = false;
  });
  return sound;
}

void graph_score(Arguments& in) {
  const TensorView query = in.tensor(), keys = in.tensor(), host_page_table = in.tensor(),
                   num_pages = in.tensor(), links = in.tensor(), tokens = in.tensor(),
                   best = in.tensor(), scores = in.tensor();
  const auto links_per_token = in.number<int64_t>(), entry_stride = in.number<int64_t>(),
             threshold = in.number<int64_t>();
  const auto within = in.number<double>();
  GraphScoreParams p;
  p.query = data_of<const float>(query, "query");
  p.keys = host_keys_of(keys);
  p.host_pages = rows_of<const int32_t>(host_page_table, "host_page_table");
  p.num_pages = data_of<const int32_t>(num_pages, "num_pages");
  p.links = data_of<const int64_t>(links, "links");
  p.tokens = data_of<const int64_t>(tokens, "tokens");
  p.best = data_of<const float>(best, "best");
  p.scores = data_of<float>(scores, "scores");
  p.batch = query.size(0);
  p.width = scores.size(2);
  p.q_heads = static_cast<int32_t>(query.size(1));
  p.links_per_token = static_cast<int32_t>(links_per_token);
  p.entry_stride = static_cast<int32_t>(entry_stride);
  p.threshold = static_cast<int32_t>(threshold);
  p.within = static_cast<float>(within);
  if (p.links_per_token > kMostLinks) {
    TVM_FFI_THROW(ValueError) << "links: got " << p.links_per_token << " per token, expected at "
                              << "most " << kMostLinks;
  }
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.num_pages[b] < 0 || p.num_pages[b] > p.width) {
      TVM_FFI_THROW(ValueError) << "num_pages: got " << p.num_pages[b] << ", expected 0 to "
                                << p.width;
    }
  }
  check_in_pool(with_element_type(keys, "keys", [&](auto type) { return run<decltype(type)>(p); }),
                p.keys);
}

HISPARSE_EXPORT_KERNEL(graph_score)

}  // namespace
}  // namespace hisparse
