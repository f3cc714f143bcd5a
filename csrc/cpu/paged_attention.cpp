// paged_attention: one query token per row over the row's pages, split over the pages.
#include "parallel.h"
#include "tensors.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

namespace hisparse {
namespace {

// Pages of one layer, keys or values: [N, Hr, S, D], the last dimension contiguous.
struct Pages {
  const char* data;
  int64_t page, head, token;  // strides in bytes
  int32_t width;              // D

  const char* at(int64_t page_id, int64_t head_id) const {
    return data + page_id * page + head_id * head;
  }
};

struct AttentionParams {
  const float* query;             // [R, Q, Dk], times the softmax scale
  Pages keys, values;
  Rows<const int32_t> page_table; // [R, P]
  const int32_t* seq_lens;        // [R]
  float* out;                     // [R, splits, Q, Dv]
  float* lse;                     // [R, splits, Q]
  int64_t num_rows, num_pages, splits, pages_per_split;
  int32_t queries, heads, page_size, table_width;
};

constexpr int32_t kLanes = 16;

struct Float32 {
  using Raw = float;
  static float load(Raw x) { return x; }
};

struct BFloat16 {
  using Raw = uint16_t;
  static float load(Raw x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
};

// e^x for x <= 0, relative error about 2e-7: 2^n * 2^f with a polynomial in f. It vectorises,
// std::exp does not.
inline float exp_of_nonpositive(float x) {
  const float scaled = std::max(x, -87.0f) * 1.44269504f;
  const float whole = std::floor(scaled + 0.5f);
  const float f = (scaled - whole) * 0.693147181f;
  float poly = 1.0f / 5040;
  poly = poly * f + 1.0f / 720;
  poly = poly * f + 1.0f / 120;
  poly = poly * f + 1.0f / 24;
  poly = poly * f + 1.0f / 6;
  poly = poly * f + 0.5f;
  poly = poly * f + 1.0f;
  poly = poly * f + 1.0f;
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < -87.0f ? 0.0f : poly * power;
}

// Width of a head: known when compiled for the usual ones, so that a query and an output stay in
// registers over a page; 0 stands for any other.
template <int W>
inline int32_t width_or(int32_t width) {
  return W > 0 ? W : width;
}

template <typename T, int W>
inline float dot(const float* q, const typename T::Raw* k, int32_t any_width) {
  const int32_t dim = width_or<W>(any_width);
  float lanes[kLanes] = {};
  int32_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    for (int32_t i = 0; i < kLanes; ++i) lanes[i] += q[d + i] * T::load(k[d + i]);
  }
  float sum = 0;
  for (; d < dim; ++d) sum += q[d] * T::load(k[d]);
  for (int32_t half = kLanes / 2; half > 0; half /= 2) {
    for (int32_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return sum + lanes[0];
}

// out += sum over tokens of weight * value.
template <typename T, int W>
inline void add_values(const Pages& values, const char* v, int32_t count, const float* weights,
                       float* out) {
  using Raw = typename T::Raw;
  const int32_t dim = width_or<W>(values.width);
  if constexpr (W > 0) {
    float sum[W];
    for (int32_t d = 0; d < W; ++d) sum[d] = out[d];
    for (int32_t t = 0; t < count; ++t) {
      const Raw* value = reinterpret_cast<const Raw*>(v + t * values.token);
      for (int32_t d = 0; d < W; ++d) sum[d] += weights[t] * T::load(value[d]);
    }
    for (int32_t d = 0; d < W; ++d) out[d] = sum[d];
  } else {
    for (int32_t t = 0; t < count; ++t) {
      const Raw* value = reinterpret_cast<const Raw*>(v + t * values.token);
      for (int32_t d = 0; d < dim; ++d) out[d] += weights[t] * T::load(value[d]);
    }
  }
}

// Softmax over the tokens seen so far, of one query.
struct Running {
  float highest = -INFINITY;
  float sum = 0;
};

// Adds `count` tokens of a page to what one query has attended.
template <typename T, int W>
void attend_page(const float* q, const Pages& keys, const Pages& values, const char* k,
                 const char* v, int32_t count, float* weights, Running& running, float* out) {
  using Raw = typename T::Raw;
  float highest = running.highest;
  for (int32_t t = 0; t < count; ++t) {
    weights[t] = dot<T, W>(q, reinterpret_cast<const Raw*>(k + t * keys.token), keys.width);
    highest = std::max(highest, weights[t]);
  }
  if (highest > running.highest) {
    const float shrink = running.sum == 0 ? 0 : exp_of_nonpositive(running.highest - highest);
    running.sum *= shrink;
    for (int32_t d = 0; d < values.width; ++d) out[d] *= shrink;
    running.highest = highest;
  }
  for (int32_t t = 0; t < count; ++t) weights[t] = exp_of_nonpositive(weights[t] - highest);
  for (int32_t t = 0; t < count; ++t) running.sum += weights[t];
  add_values<T, W>(values, v, count, weights, out);
}

// One row over one split of its pages; false if a page id is not a page.
template <typename T, int W>
bool attend_split(const AttentionParams& p, int64_t row, int64_t split) {
  thread_local std::vector<float> weights;
  thread_local std::vector<Running> running;
  weights.resize(static_cast<size_t>(p.page_size));
  running.assign(static_cast<size_t>(p.queries), Running());
  const int64_t item = row * p.splits + split;
  float* out = p.out + item * p.queries * p.values.width;
  std::fill_n(out, p.queries * p.values.width, 0.0f);
  const int64_t first = split * p.pages_per_split;
  const int64_t tokens = p.seq_lens[row];
  const int64_t last = std::min(first + p.pages_per_split,
                                (tokens + p.page_size - 1) / p.page_size);
  const int32_t group = p.queries / p.heads;
  for (int64_t i = first; i < last; ++i) {
    const int32_t page = p.page_table[row][i];
    if (page < 0 || page >= p.num_pages) return false;
    const int32_t count =
        static_cast<int32_t>(std::min<int64_t>(p.page_size, tokens - i * p.page_size));
    for (int32_t h = 0; h < p.queries; ++h) {
      const float* q = p.query + (row * p.queries + h) * p.keys.width;
      attend_page<T, W>(q, p.keys, p.values, p.keys.at(page, h / group), p.values.at(page, h / group),
                     count, weights.data(), running[h], out + h * p.values.width);
    }
  }
  for (int32_t h = 0; h < p.queries; ++h) {
    const Running& r = running[h];
    const float scale = r.sum > 0 ? 1.0f / r.sum : 0.0f;
    for (int32_t d = 0; d < p.values.width; ++d) out[h * p.values.width + d] *= scale;
    p.lse[item * p.queries + h] = r.sum > 0 ? r.highest + std::log(r.sum) : -INFINITY;
  }
  return true;
}

template <typename T, int W>
bool run(const AttentionParams& p) {
  std::atomic<bool> in_range{true};
  const int64_t items = p.num_rows * p.splits;
  const double per_item = static_cast<double>(p.pages_per_split) * p.page_size * p.queries *
                          (p.keys.width + p.values.width) / 32;
  parallel_for(items, num_threads(items, per_item * static_cast<double>(items)), [&](int64_t i) {
    if (!attend_split<T, W>(p, i / p.splits, i % p.splits)) in_range = false;
  });
  return in_range;
}

template <typename T>
bool run_any_width(const AttentionParams& p) {
  const bool square = p.keys.width == p.values.width;
  if (square && p.keys.width == 64) return run<T, 64>(p);
  if (square && p.keys.width == 128) return run<T, 128>(p);
  return run<T, 0>(p);
}

Pages pages_of(const TensorView& tensor, const char* name) {
  require_unit_stride(tensor, name);
  const int64_t bytes = tensor.dtype().bits / 8;
  return {static_cast<const char*>(tensor.data_ptr()), tensor.stride(0) * bytes,
          tensor.stride(1) * bytes, tensor.stride(2) * bytes,
          static_cast<int32_t>(tensor.size(3))};
}

void paged_attention(TensorView query, TensorView k, TensorView v, TensorView page_table,
                     TensorView seq_lens, TensorView out, TensorView lse,
                     int64_t pages_per_split) {
  AttentionParams p;
  p.query = vector_of<const float>(query, "query");
  p.keys = pages_of(k, "k");
  p.values = pages_of(v, "v");
  p.page_table = rows_of<const int32_t>(page_table, "page_table");
  p.seq_lens = vector_of<const int32_t>(seq_lens, "seq_lens");
  p.out = vector_of<float>(out, "out");
  p.lse = vector_of<float>(lse, "lse");
  p.num_rows = query.size(0);
  p.num_pages = k.size(0);
  p.splits = out.size(1);
  p.pages_per_split = pages_per_split;
  p.queries = static_cast<int32_t>(query.size(1));
  p.heads = static_cast<int32_t>(k.size(1));
  p.page_size = static_cast<int32_t>(k.size(2));
  p.table_width = static_cast<int32_t>(page_table.size(1));
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const int64_t most = static_cast<int64_t>(p.table_width) * p.page_size;
    if (p.seq_lens[r] < 0 || p.seq_lens[r] > most) {
      TVM_FFI_THROW(ValueError) << "seq_lens: got " << p.seq_lens[r] << " tokens, expected 0 to "
                                << most << ", what the page table has room for";
    }
  }
  if (!(k.dtype().bits == 16 ? run_any_width<BFloat16>(p) : run_any_width<Float32>(p))) {
    TVM_FFI_THROW(ValueError) << "page_table: a page is outside [0, " << p.num_pages << ")";
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_attention, paged_attention);

}  // namespace
}  // namespace hisparse
