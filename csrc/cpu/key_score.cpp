// key_score: the maximum or the log-sum-exp of q.k over each page's tokens, with keys read as they
// are stored in the host pool.
#include "dots.h"
#include "latents.h"
#include "logit_cap.h"
#include "parallel.h"
#include "simd.h"
#include "tensors.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <type_traits>
#include <vector>

namespace hisparse {
namespace {

// [pages, heads, page_size, width], the last dimension dense; strides in elements.
template <typename Raw>
struct HostRows {
  const Raw* data;
  int64_t page, head, token;

  const Raw* at(int64_t page_id, int64_t head_id) const {
    return data + page_id * page + head_id * head;
  }
};

template <typename Raw>
HostRows<Raw> host_rows_of(const TensorView& rows, const char* name) {
  return {data_of<const Raw>(rows, name), rows.stride(0), rows.stride(1), rows.stride(2)};
}

struct HostKeys {
  HostRows<char> rows;             // of any type
  HostRows<uint8_t> scales;        // E8M0, a key's first; or no data
  LatentRow latent;                // the bytes of a row, if keys are LatentBytes
  int64_t num_pages;
  int32_t heads, page_size, dim;

  template <typename T>
  HostRows<typename T::Raw> of_type() const {
    return {reinterpret_cast<const typename T::Raw*>(rows.data), rows.page, rows.head, rows.token};
  }
};

// Keys that are latents in eight bits.
struct LatentBytes {
  using Raw = uint8_t;
};

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

// Products of queries [group, dim] with a page's keys, while a later page is brought into the cache.
// Those of a block of G queries, g to g + G - 1, are [tokens, G] at out + g * room.
template <typename T>
void page_logits(const HostKeys& keys, const float* q, int32_t group, int64_t head, int64_t page,
                 int64_t ahead, float* out, int64_t room) {
  const auto rows = keys.of_type<T>();
  if constexpr (std::is_same_v<T, LatentBytes>) {
    thread_local std::vector<float> decoded;
    decoded.resize(int64_t{keys.page_size} * keys.dim);
    for (int32_t t = 0; t < keys.page_size; ++t) {
      decode_row(rows.at(page, head) + t * rows.token, keys.latent, &decoded[t * keys.dim]);
    }
    page_dots<Float32>(q, group, decoded.data(), decoded.data(), keys.dim, keys.page_size,
                       keys.dim, out, room);
  } else {
    page_dots<T>(q, group, rows.at(page, head), rows.at(ahead, head), rows.token, keys.page_size,
                 keys.dim, out, room);
  }
  if (keys.scales.data == nullptr) return;
  const uint8_t* exponent = keys.scales.at(page, head);
  for (int32_t t = 0; t < keys.page_size; ++t, exponent += keys.scales.token) {
    const float scale = bit_cast<float>(static_cast<uint32_t>(*exponent) << 23);
    for_blocks(group, [&](auto queries, int32_t g) {
      constexpr int G = decltype(queries)::value;
      for (int j = 0; j < G; ++j) out[g * room + t * G + j] *= scale;
    });
  }
}

// One run of pages for the query heads of one KV head; false if a page is not in the pool.
template <typename T>
bool score_run(const KeyScoreParams& p, int64_t b, int64_t kv_head, int64_t first) {
  const int64_t last = std::min(first + kPagesPerItem, p.width);
  const int64_t present = std::clamp<int64_t>(p.num_pages[b], first, last);
  const int64_t group = p.q_heads / p.keys.heads, row = b * p.q_heads + kv_head * group;
  const int64_t room = (p.keys.page_size + kLanes - 1) / kLanes * kLanes;
  float* scores = p.scores + row * p.width;
  for (int64_t g = 0; g < group; ++g) {
    std::fill(scores + g * p.width + first, scores + g * p.width + last, -INFINITY);
  }
  for (int64_t page = first; page < present; ++page) {
    if (p.host_pages[b][page] < 0 || p.host_pages[b][page] >= p.keys.num_pages) return false;
  }
  const int64_t pages_ahead = std::max<int64_t>(1, kTokensAhead / p.keys.page_size);
  thread_local std::vector<float> logits;
  logits.resize(group * room);
  std::vector<float> found(group);
  for (int64_t page = first; page < present; ++page) {
    page_logits<T>(p.keys, p.query + row * p.keys.dim, static_cast<int32_t>(group), kv_head,
                   p.host_pages[b][page],
                   p.host_pages[b][std::min(page + pages_ahead, present - 1)], logits.data(), room);
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
  const TensorView query = in.tensor(), keys = in.tensor();
  const std::optional<TensorView> scales = in.optional();
  const TensorView host_page_table = in.tensor(), num_pages = in.tensor();
  const TensorView scores = in.tensor();
  const auto sums = in.number<bool>();
  const auto logit_cap = in.number<double>();
  const auto rank = in.number<int64_t>(), tile = in.number<int64_t>(),
             scales_at = in.number<int64_t>(), rope_at = in.number<int64_t>();
  KeyScoreParams p;
  p.query = data_of<const float>(query, "query");
  p.keys = {host_rows_of<char>(keys, "keys.k"),
            scales ? host_rows_of<uint8_t>(*scales, "keys.scales") : HostRows<uint8_t>{},
            {static_cast<int32_t>(rank), static_cast<int32_t>(tile),
             static_cast<int32_t>(scales_at), static_cast<int32_t>(rope_at),
             static_cast<int32_t>(query.size(2) - rank)},
            keys.size(0),
            static_cast<int32_t>(keys.size(1)),
            static_cast<int32_t>(keys.size(2)),
            static_cast<int32_t>(query.size(2))};
  p.host_pages = rows_of<const int32_t>(host_page_table, "host_page_table");
  p.num_pages = data_of<const int32_t>(num_pages, "num_pages");
  p.scores = data_of<float>(scores, "scores");
  p.batch = query.size(0);
  p.width = scores.size(2);
  p.q_heads = static_cast<int32_t>(query.size(1));
  p.sums = sums;
  p.logit_cap = static_cast<float>(logit_cap);
  const auto take = [&](auto type) { return run<decltype(type)>(p); };
  if (!(rank > 0 ? take(LatentBytes()) : with_page_type(keys, "keys.k", take))) {
    require_host_pages(p.host_pages, p.num_pages, p.batch, p.width, p.keys.num_pages);
  }
}

HISPARSE_EXPORT_KERNEL(key_score)

}  // namespace
}  // namespace hisparse
