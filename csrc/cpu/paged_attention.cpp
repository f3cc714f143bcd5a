// paged_attention: one query token per row over the row's pages, or the last of their tokens.
//
// A task is one KV head of one row, and a split of its pages where rows and heads are fewer than
// threads. It goes over the keys once, for all queries that share them, then over the values.
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

// Pages of one layer, keys or values: [N, Hs, S, D], the last dimension contiguous.
struct Pages {
  const char* data;
  int64_t page, head, token;  // strides in bytes
  int32_t width;              // D

  template <typename T>
  const typename T::Raw* at(int64_t page_id, int64_t head_id, int64_t offset) const {
    return reinterpret_cast<const typename T::Raw*>(data + page_id * page + head_id * head +
                                                    offset * token);
  }
};

struct AttentionParams {
  const float* query;              // [R, Q, Dk]
  Pages keys, values;
  Pages scales;                    // [N, Hs, S, 2] of keys and values, or no data
  Rows<const int32_t> page_table;  // [R, P]
  const int32_t* seq_lens;         // [R]
  float* out;                      // [R, Q, Dv]
  float* lse;                      // [R, Q]
  int64_t num_rows, num_pages, splits, pages_per_split;
  int64_t window;   // the last tokens of a row that are attended; 0: all
  float scale;      // of the logits
  float logit_cap;  // 0: none
  int32_t queries, heads, page_size, table_width;
  int32_t stored_heads;  // Hs, heads of a page
  int32_t row_heads;     // rows of a request, each of which attends one of these; 1: all of them

  int32_t group() const { return queries / heads; }
  // And one more of zeros, where four take less time than two and one.
  int32_t padded_group() const { return group() + (kLanes == 16 && group() % 4 == 3); }
  // The head of the pages that head `head` of a row attends.
  int64_t stored_head(int64_t row, int64_t head) const {
    return row_heads == 1 ? head : row % row_heads * stored_heads / row_heads;
  }
};

// Tokens of one split: enough work to be worth waking a thread.
constexpr int64_t kSplitTokens = 1024;
// Tokens whose values are multiplied while sums stay in registers; they fit the first cache.
constexpr int64_t kTokensPerBlock = 32;
// Pages lie scattered, so the processor does not foresee them: tokens are prefetched this early. A
// block's first columns need all of its tokens, so more than a block.
constexpr int64_t kTokensAhead = kTokensPerBlock + 8;

// Splits of a row, the last of which has up to half as many pages again: a budget and its tail page
// are one. It depends on nothing but the row, so its sums do not either.
int64_t num_splits(const AttentionParams& p, int64_t pages) {
  return std::max<int64_t>(1, (pages + p.pages_per_split / 2) / p.pages_per_split);
}

// The tokens of one task: pages `first` to `last - 1` of a row. The last page may be partly full, and
// of the first one tokens before `oldest` are left out.
struct Span {
  const int32_t* pages;
  int64_t first, last, oldest, tokens;

  int32_t begin(const AttentionParams& p, int64_t i) const {
    return static_cast<int32_t>(std::max<int64_t>(0, oldest - i * p.page_size));
  }
  int32_t end(const AttentionParams& p, int64_t i) const {
    return static_cast<int32_t>(std::min<int64_t>(p.page_size, tokens - i * p.page_size));
  }
};

// How elements of type T are read, and what the numbers read are to be multiplied by.
#ifdef __AVX2__
template <typename T>
using Read = std::conditional_t<std::is_same_v<T, Float8>, Float8AsHalf, T>;
template <typename T>
constexpr float kFactor = std::is_same_v<T, Float8AsHalf> ? Float8AsHalf::kFactor : 1;
#else
template <typename T>
using Read = T;
template <typename T>
constexpr float kFactor = 1;
#endif

// Logits, then weights, of a span: those of a block of G queries, g to g + G - 1, are [tokens, G] at
// numbers + g * stride.
struct Weights {
  float* numbers;
  int64_t stride;
};

struct Byte { using Raw = uint8_t; };

// Multiplies the numbers of every token by the scale of its key (0) or value (1): a power of two as
// E8M0, the exponent of a float.
void apply_scales(const AttentionParams& p, const Span& span, int64_t head, int value,
                  const Weights& w) {
  if (p.scales.data == nullptr) return;
  for_blocks(p.padded_group(), [&](auto queries, int32_t g) {
    constexpr int G = decltype(queries)::value;
    float* numbers = w.numbers + g * w.stride;
    for (int64_t i = span.first; i < span.last; ++i) {
      const int32_t begin = span.begin(p, i), end = span.end(p, i);
      const uint8_t* exponent = p.scales.at<Byte>(span.pages[i], head, begin) + value;
      for (int32_t t = begin; t < end; ++t, numbers += G, exponent += p.scales.token) {
        const float scale = bit_cast<float>(static_cast<uint32_t>(*exponent) << 23);
        const auto scaled = load_vector<Vec<float, G>>(numbers) * scale;
        std::memcpy(numbers, &scaled, sizeof(scaled));
      }
    }
  });
}

// Writes pointers to the keys or the values of a span's tokens, at most the first `most`, up to a page
// that does not exist. Returns how many.
template <typename T>
int64_t find_tokens(const AttentionParams& p, const Pages& pages, const Span& span, int64_t head,
                    int64_t most, const typename T::Raw** tokens) {
  const int64_t stride = pages.token / static_cast<int64_t>(sizeof(typename T::Raw));
  int64_t found = 0;
  for (int64_t i = span.first; i < span.last; ++i) {
    if (span.pages[i] < 0 || span.pages[i] >= p.num_pages) break;
    const int32_t begin = span.begin(p, i);
    const int64_t count = std::min<int64_t>(span.end(p, i) - begin, most - found);
    const typename T::Raw* token = pages.at<T>(span.pages[i], head, begin);
    for (int64_t t = 0; t < count; ++t) tokens[found + t] = token + t * stride;
    found += count;
  }
  return found;
}

// out [padded group, Dv], part by part, = weights . values
template <typename T>
void add_values(const AttentionParams& p, const typename T::Raw* const* values, int64_t count,
                const Weights& w, float* out) {
  const int32_t width = p.values.width;
  std::fill_n(out, p.padded_group() * width, 0.0f);
  for (int64_t first = 0; first < count; first += kTokensPerBlock) {
    const auto tokens = static_cast<int32_t>(std::min(kTokensPerBlock, count - first));
    for_blocks(p.padded_group(), [&](auto queries, int32_t g) {
      constexpr int G = decltype(queries)::value;
      add_tokens<T, G>(w.numbers + g * w.stride + first * G, values + first,
                       g == 0 ? kTokensAhead : 0, tokens, width, out + g * width);
    });
  }
}

// Memory that a thread keeps from task to task.
template <typename T>
struct Room {
  Buffer<float> weights, query, sums;
  std::vector<float> tops, totals;
  std::vector<const typename T::Raw*> keys, values;
  int64_t task = 0;  // the last one
};

// A task: a split of a head of a row. Items are [row, split, head].
struct Task {
  int64_t row, split, head, stored_head;
  Span span;

  Task(const AttentionParams& p, int64_t item)
      : row(item / p.heads / p.splits), split(item / p.heads % p.splits), head(item % p.heads),
        stored_head(p.stored_head(row, head)),
        span{p.page_table[row], split * p.pages_per_split, 0, 0, p.seq_lens[row]} {
    if (p.window > 0) span.oldest = std::max<int64_t>(0, span.tokens - p.window);
    const int64_t pages = (span.tokens + p.page_size - 1) / p.page_size;
    const int64_t last_split = num_splits(p, pages) - 1;
    span.last = split < last_split ? span.first + p.pages_per_split
                : split > last_split ? 0 : pages;
    span.first = std::max(span.first, span.oldest / p.page_size);
  }
};

// One task: out [group, Dv], lse [group]. False if a page id is not a page. The first keys of the
// next task are brought into the cache.
template <typename T>
HISPARSE_NOINLINE bool attend(const AttentionParams& p, const Task& task, const Task& next,
                              float* out, float* lse, Room<T>& room) {
  const Span& span = task.span;
  for (int64_t i = span.first; i < span.last; ++i) {
    if (span.pages[i] < 0 || span.pages[i] >= p.num_pages) return false;
    if (p.scales.data != nullptr) prefetch(p.scales.at<Byte>(span.pages[i], task.stored_head, 0));
  }
  const int32_t group = p.group(), dim = p.keys.width, width = p.values.width;
  if (span.first >= span.last) {
    std::fill_n(out, group * width, 0.0f);
    std::fill_n(lse, group, -INFINITY);
    return true;
  }
  const int64_t head = task.stored_head, all = (span.last - span.first) * p.page_size;
  room.keys.resize(all + kTokensAhead);
  room.values.resize(all + kTokensAhead);
  const auto keys = room.keys.data(), values = room.values.data();
  const int64_t count = find_tokens<T>(p, p.keys, span, head, all, keys);
  find_tokens<T>(p, p.values, span, head, all, values);
  // The first values come after the last keys, and then the first keys of the next task.
  std::fill_n(keys + count, kTokensAhead, values[count - 1]);
  std::copy_n(values, std::min(count, kTokensAhead), keys + count);
  std::fill_n(values + count, kTokensAhead, values[count - 1]);
  find_tokens<T>(p, p.keys, next.span, next.stored_head, kTokensAhead, values + count);
  const int64_t stride = (count + kLanes - 1) / kLanes * kLanes;
  const int32_t padded = p.padded_group();
  room.weights.resize(padded * stride);
  room.query.resize(padded * dim);
  room.sums.resize(padded * width);
  room.tops.resize(padded);
  room.totals.resize(padded);
  const Weights w{room.weights.data(), stride};
  const float* q = p.query + (task.row * p.queries + task.head * group) * dim;
  split_in_parts<Parts<T>>(q, group, dim, p.scale * kFactor<T>, room.query.data());
  std::fill_n(room.query.data() + group * dim, (padded - group) * dim, 0.0f);
  group_dots<T>(room.query.data(), padded, keys, kTokensAhead, count, dim, w.numbers,
                stride);
  apply_scales(p, span, head, 0, w);
  for_blocks(padded, [&](auto queries, int32_t g) {
    constexpr int G = decltype(queries)::value;
    float* logits = w.numbers + g * stride;
    if (p.logit_cap > 0) cap_logits(logits, count * G, p.logit_cap);
    exponentiate<G>(logits, count, &room.tops[g], &room.totals[g]);
  });
  apply_scales(p, span, head, 1, w);
  add_values<T>(p, values, count, w, room.sums.data());
  for (int32_t g = 0; g < group; ++g) {
    const float* sums = room.sums.data() + g * width;
    join_parts<Parts<T>>(sums, width, kFactor<T> / room.totals[g], out + g * width);
    lse[g] = room.tops[g] + std::log(room.totals[g]);
  }
  return true;
}

// Merges the splits of one query: partial [splits, Dv], lse [splits], both with a stride.
void merge_splits(const float* partial, const float* lses, int64_t splits, int64_t stride,
                  int32_t width, float* out, float* lse) {
  float highest = -INFINITY, total = 0;
  for (int64_t s = 0; s < splits; ++s) highest = std::max(highest, lses[s * stride]);
  std::fill_n(out, width, 0.0f);
  *lse = highest;
  if (highest == -INFINITY) return;
  for (int64_t s = 0; s < splits; ++s) total += std::exp(lses[s * stride] - highest);
  for (int64_t s = 0; s < splits; ++s) {
    const float weight = std::exp(lses[s * stride] - highest) / total;
    for (int32_t d = 0; d < width; ++d) out[d] += weight * partial[s * stride * width + d];
  }
  *lse += std::log(total);
}

template <typename T>
bool run(const AttentionParams& p) {
  const int64_t tasks = p.num_rows * p.splits * p.heads, group = p.group();
  const bool whole = p.splits == 1;
  std::vector<float> partial(whole ? 0 : tasks * group * p.values.width);
  std::vector<float> lses(whole ? 0 : tasks * group);
  float* out = whole ? p.out : partial.data();
  float* lse = whole ? p.lse : lses.data();
  std::atomic<bool> in_range{true};
  double tokens = 0;
  for (int64_t row = 0; row < p.num_rows; ++row) {
    tokens += p.window > 0 ? std::min<int64_t>(p.window, p.seq_lens[row]) : p.seq_lens[row];
  }
  // Pages come from memory, at about 16 bytes a nanosecond, or products take longer.
  const double numbers = tokens * p.heads * (p.keys.width + p.values.width);
  const double work = numbers * std::max<double>(sizeof(typename T::Raw) / 16.0, group / 40.0);
  parallel_for(tasks, num_threads(tasks, work), [&](int64_t item) {
    // The output is [R, splits, Q, Dv].
    thread_local Room<T> room;
    // Threads take tasks in order, or in the opposite order (parallel.h).
    const int64_t after = item < room.task ? item - 1 : item + 1;
    room.task = item;
    const Task task(p, item), next(p, std::clamp<int64_t>(after, 0, tasks - 1));
    if (!attend<T>(p, task, next, out + item * group * p.values.width, lse + item * group, room)) {
      in_range = false;
    }
  });
  if (!in_range) return false;
  for (int64_t i = 0; !whole && i < p.num_rows * p.queries; ++i) {
    const int64_t first = i / p.queries * p.splits * p.queries + i % p.queries;
    merge_splits(out + first * p.values.width, lse + first, p.splits, p.queries, p.values.width,
                 p.out + i * p.values.width, p.lse + i);
  }
  return true;
}

Pages pages_of(const TensorView& t, const char* name) {
  require_unit_stride(t, name);
  const int64_t bytes = t.dtype().bits / 8;
  return {static_cast<const char*>(t.data_ptr()), t.stride(0) * bytes, t.stride(1) * bytes,
          t.stride(2) * bytes, static_cast<int32_t>(t.size(3))};
}

void require_lengths(const AttentionParams& p) {
  const int64_t most = static_cast<int64_t>(p.table_width) * p.page_size;
  for (int64_t row = 0; row < p.num_rows; ++row) {
    if (p.seq_lens[row] < 0 || p.seq_lens[row] > most) {
      TVM_FFI_THROW(ValueError) << "seq_lens: got " << p.seq_lens[row] << ", expected 0 to " << most
                                << ", the tokens of page_table";
    }
  }
}

// Throws unless the pages of all tokens that are attended exist.
void require_attended(const AttentionParams& p) {
  for (int64_t row = 0; row < p.num_rows; ++row) {
    const int64_t tokens = p.seq_lens[row];
    const int64_t oldest = p.window > 0 ? std::max<int64_t>(0, tokens - p.window) : 0;
    require_pages("page_table", p.page_table, row, oldest / p.page_size,
                  (tokens + p.page_size - 1) / p.page_size, p.num_pages);
  }
}

}  // namespace

void paged_attention(Arguments& in) {
  const TensorView query = in.tensor(), k = in.tensor(), v = in.tensor();
  const std::optional<TensorView> scales = in.optional();
  const TensorView page_table = in.tensor(), seq_lens = in.tensor(), out = in.tensor(),
                   lse = in.tensor();
  const auto scale = in.number<double>(), logit_cap = in.number<double>();
  const auto window = in.number<int64_t>();
  const auto row_heads = in.number<int32_t>();
  AttentionParams p;
  const AsFloats floats(query, "query");
  p.query = floats.data();
  p.keys = pages_of(k, "kv.k");
  p.values = pages_of(v, "kv.v");
  p.scales = scales ? pages_of(*scales, "kv.scales") : Pages{};
  p.page_table = rows_of<const int32_t>(page_table, "page_table");
  p.seq_lens = data_of<const int32_t>(seq_lens, "seq_lens");
  p.out = data_of<float>(out, "out");
  p.lse = data_of<float>(lse, "lse");
  p.scale = static_cast<float>(scale);
  p.logit_cap = static_cast<float>(logit_cap);
  p.window = window;
  p.num_rows = query.size(0);
  p.num_pages = k.size(0);
  p.queries = static_cast<int32_t>(query.size(1));
  p.stored_heads = static_cast<int32_t>(k.size(1));
  p.row_heads = row_heads;
  p.heads = row_heads == 1 ? p.stored_heads : 1;
  p.page_size = static_cast<int32_t>(k.size(2));
  p.table_width = static_cast<int32_t>(page_table.size(1));
  p.pages_per_split = std::max<int64_t>(1, kSplitTokens / p.page_size);
  p.splits = num_splits(p, p.table_width);
  require_lengths(p);
  const bool in_range =
      with_page_type(k, "kv.k", [&](auto type) { return run<Read<decltype(type)>>(p); });
  if (!in_range) require_attended(p);
}

HISPARSE_EXPORT_KERNEL(paged_attention)

}  // namespace hisparse
