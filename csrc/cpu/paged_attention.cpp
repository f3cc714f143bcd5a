// paged_attention: one query token per row over the row's pages.
//
// A task is one KV head of one row, and a split of its pages where rows and heads are fewer than
// threads. It goes over the keys once, for all queries that share them, then over the values.
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

// Pages of one layer, keys or values: [N, Hr, S, D], the last dimension contiguous.
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
  const float* query;              // [R, Q, Dk], times the softmax scale
  Pages keys, values;
  Pages scales;                    // [N, Hr, S, 2] of keys and values, or no data
  Rows<const int32_t> page_table;  // [R, P]
  const int32_t* seq_lens;         // [R]
  float* out;                      // [R, Q, Dv]
  float* lse;                      // [R, Q]
  int64_t num_rows, num_pages, splits, pages_per_split;
  int32_t queries, heads, page_size, table_width;

  int32_t group() const { return queries / heads; }
};

// Tokens of one split: enough work to be worth waking a thread.
constexpr int64_t kSplitTokens = 2048;

// The tokens of one task: pages `first` to `last - 1` of a row; the last page may be partly full.
struct Span {
  const int32_t* pages;
  int64_t first, last, tokens;

  int32_t count(const AttentionParams& p, int64_t i) const {
    return static_cast<int32_t>(std::min<int64_t>(p.page_size, tokens - i * p.page_size));
  }
};

// The power of two that scales a vector: E8M0, the exponent of a float.
HISPARSE_INLINE float scale_of(const AttentionParams& p, int32_t page, int64_t head, int32_t t,
                               int value) {
  struct Byte { using Raw = uint8_t; };
  return bit_cast<float>(static_cast<uint32_t>(p.scales.at<Byte>(page, head, t)[value]) << 23);
}

// Logits, then weights, of a span: those of a block of G queries, g to g + G - 1, are [tokens, G] at
// numbers + g * stride.
struct Weights {
  float* numbers;
  int64_t stride;
};

// Multiplies the numbers of every token by the scale of its key (0) or value (1).
void apply_scales(const AttentionParams& p, const Span& span, int64_t head, int value,
                  const Weights& w) {
  if (p.scales.data == nullptr) return;
  int64_t token = 0;
  for (int64_t i = span.first; i < span.last; ++i) {
    for (int32_t t = 0, count = span.count(p, i); t < count; ++t, ++token) {
      const float scale = scale_of(p, span.pages[i], head, t, value);
      for_blocks(p.group(), [&](auto queries, int32_t g) {
        constexpr int G = decltype(queries)::value;
        for (int j = 0; j < G; ++j) w.numbers[g * w.stride + token * G + j] *= scale;
      });
    }
  }
}

template <typename T>
void score_keys(const AttentionParams& p, const Span& span, int64_t head, const float* q,
                const Weights& logits) {
  int64_t token = 0;
  for (int64_t i = span.first; i < span.last; ++i) {
    const int32_t next = span.pages[std::min(i + 1, span.last - 1)], count = span.count(p, i);
    page_dots<T>(q, p.group(), p.keys.at<T>(span.pages[i], head, 0), p.keys.at<T>(next, head, 0),
                 p.keys.token / static_cast<int64_t>(sizeof(typename T::Raw)), count, p.keys.width,
                 logits.numbers, logits.stride, token);
    token += count;
  }
}

// out [G, width] += weights [tokens, G] times C vectors of columns, from d on, of a page's values.
// Pages lie scattered, so `ahead`, a later one, is prefetched.
template <typename T, int G, int C>
HISPARSE_NOINLINE void add_columns(const float* weights, int32_t tokens,
                                   const typename T::Raw* value, const typename T::Raw* ahead,
                                   int64_t stride, int32_t width, float* out) {
  Floats sums[G][C];
  unroll<G>([&](auto g) HISPARSE_INLINED {
    unroll<C>([&](auto c) HISPARSE_INLINED {
      sums[g][c] = Float32::load(out + g * width + c * kLanes);
    });
  });
  for (int32_t t = 0; t < tokens; ++t, weights += G, value += stride, ahead += stride) {
    prefetch(ahead, C * kLanes * sizeof(typename T::Raw));
    Floats x[C];
    unroll<C>([&](auto c) HISPARSE_INLINED { x[c] = T::load(value + c * kLanes); });
    unroll<G>([&](auto g) HISPARSE_INLINED {
      const Floats weight = splat(weights[g]);
      unroll<C>([&](auto c) HISPARSE_INLINED { sums[g][c] += weight * x[c]; });
    });
  }
  unroll<G>([&](auto g) HISPARSE_INLINED {
    unroll<C>([&](auto c) HISPARSE_INLINED {
      store(out + g * width + c * kLanes, sums[g][c]);
    });
  });
}

// out [group, Dv] = weights . values
template <typename T>
void add_values(const AttentionParams& p, const Span& span, int64_t head, const Weights& w,
                float* out) {
  using Raw = typename T::Raw;
  const int32_t width = p.values.width;
  const int64_t stride = p.values.token / static_cast<int64_t>(sizeof(Raw));
  std::fill_n(out, p.group() * width, 0.0f);
  int64_t token = 0;
  for (int64_t i = span.first; i < span.last; ++i) {
    const int32_t next = span.pages[std::min(i + 1, span.last - 1)], count = span.count(p, i);
    const Raw* value = p.values.at<T>(span.pages[i], head, 0);
    const Raw* ahead = p.values.at<T>(next, head, 0);
    for_blocks(p.group(), [&](auto queries, int32_t g) {
      constexpr int G = decltype(queries)::value, C = kRegisters / 2 / G;
      const float* weights = w.numbers + g * w.stride + token * G;
      float* sums = out + g * width;
      int32_t d = 0;
      for (; d + C * kLanes <= width; d += C * kLanes) {
        add_columns<T, G, C>(weights, count, value + d, ahead + d, stride, width, sums + d);
      }
      for (; d + kLanes <= width; d += kLanes) {
        add_columns<T, G, 1>(weights, count, value + d, ahead + d, stride, width, sums + d);
      }
      for (; d < width; ++d) {
        for (int32_t t = 0; t < count; ++t) {
          const float x = T::one(value[t * stride + d]);
          for (int j = 0; j < G; ++j) sums[j * width + d] += weights[t * G + j] * x;
        }
      }
    });
    token += count;
  }
}

// One split of one head of a row: out [group, Dv], lse [group]. False if a page id is not a page.
template <typename T>
bool attend_split(const AttentionParams& p, int64_t row, int64_t head, int64_t split, float* out,
                  float* lse) {
  thread_local std::vector<float> room;
  const int64_t tokens = p.seq_lens[row];
  Span span{p.page_table[row], split * p.pages_per_split, 0, tokens};
  span.last = std::min(span.first + p.pages_per_split, (tokens + p.page_size - 1) / p.page_size);
  for (int64_t i = span.first; i < span.last; ++i) {
    if (span.pages[i] < 0 || span.pages[i] >= p.num_pages) return false;
  }
  const int32_t group = p.group(), width = p.values.width;
  if (span.first >= span.last) {
    std::fill_n(out, group * width, 0.0f);
    std::fill_n(lse, group, -INFINITY);
    return true;
  }
  const int64_t count = std::min(tokens, span.last * p.page_size) - span.first * p.page_size;
  const int64_t stride = (count + kLanes - 1) / kLanes * kLanes;
  if (room.size() < static_cast<size_t>(group * stride)) room.resize(group * stride);
  const Weights w{room.data(), stride};
  const float* q = p.query + (row * p.queries + head * group) * p.keys.width;
  score_keys<T>(p, span, head, q, w);
  apply_scales(p, span, head, 0, w);
  std::vector<float> totals(group);
  for_blocks(group, [&](auto queries, int32_t g) {
    constexpr int G = decltype(queries)::value;
    exponentiate<G>(w.numbers + g * stride, count, lse + g, &totals[g]);
  });
  apply_scales(p, span, head, 1, w);
  add_values<T>(p, span, head, w, out);
  for (int32_t g = 0; g < group; ++g) {
    const float scale = 1.0f / totals[g];
    for (int32_t d = 0; d < width; ++d) out[g * width + d] *= scale;
    lse[g] += std::log(totals[g]);
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
  const double tokens = static_cast<double>(p.num_rows) * p.table_width * p.page_size;
  const double work = tokens * p.queries * (p.keys.width + p.values.width);
  parallel_for(tasks, num_threads(tasks, work / 40), [&](int64_t task) {
    // Items are [row, split, head]; the output is [R, splits, Q, Dv].
    const int64_t row = task / p.heads / p.splits, split = task / p.heads % p.splits;
    float* to = out + task * group * p.values.width;
    if (!attend_split<T>(p, row, task % p.heads, split, to, lse + task * group)) in_range = false;
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

void paged_attention(TensorView query, TensorView k, TensorView v, TensorView scales,
                     TensorView page_table, TensorView seq_lens, TensorView out, TensorView lse) {
  AttentionParams p;
  p.query = vector_of<const float>(query, "query");
  p.keys = pages_of(k, "kv.k");
  p.values = pages_of(v, "kv.v");
  p.scales = scales.ndim() == 4 ? pages_of(scales, "kv.scales") : Pages{};
  p.page_table = rows_of<const int32_t>(page_table, "page_table");
  p.seq_lens = vector_of<const int32_t>(seq_lens, "seq_lens");
  p.out = vector_of<float>(out, "out");
  p.lse = vector_of<float>(lse, "lse");
  p.num_rows = query.size(0);
  p.num_pages = k.size(0);
  p.queries = static_cast<int32_t>(query.size(1));
  p.heads = static_cast<int32_t>(k.size(1));
  p.page_size = static_cast<int32_t>(k.size(2));
  p.table_width = static_cast<int32_t>(page_table.size(1));
  p.pages_per_split = std::max<int64_t>(1, kSplitTokens / p.page_size);
  p.splits = std::max<int64_t>(1, (p.table_width + p.pages_per_split - 1) / p.pages_per_split);
  require_lengths(p);
  const bool in_range =
      with_element_type(k, "kv.k", [&](auto type) { return run<decltype(type)>(p); });
  if (!in_range) {
    TVM_FFI_THROW(ValueError) << "page_table: a page is outside [0, " << p.num_pages
                              << "), the pages of kv";
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_attention, paged_attention);

}  // namespace
}  // namespace hisparse
