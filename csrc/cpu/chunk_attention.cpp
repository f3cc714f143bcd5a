// chunk_attention: many query tokens over contiguous keys; all of them, or those up to its own, or
// those of a window.
//
// A block of queries goes over the keys tile by tile with a running maximum and sum (FlashAttention,
// https://arxiv.org/abs/2205.14135). Within the block, a panel of queries at a time keeps its logits
// in the nearest cache. Keys after the panel's last token are neither scored nor masked. Keys and
// values are copied once, as float32 and in the order of the inner loops: a copy serves thousands of
// queries.
#include "logit_cap.h"
#include "parallel.h"
#include "simd.h"
#include "tensors.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

namespace hisparse {
namespace {

// Sums of a panel's queries and a strip's columns fill most of the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int32_t kPanel = 12;
#else
constexpr int32_t kPanel = 6;
#endif
constexpr int32_t kVectors = 2;
constexpr int32_t kStrip = kVectors * kLanes;
constexpr int32_t kTile = 128;  // keys
constexpr int32_t kBlock = 96;  // queries
static_assert(kTile % kStrip == 0 && kBlock % kPanel == 0);

// Tokens of keys or values: [Tk, Hkv, D], the last dimension contiguous.
struct Tokens {
  const char* data;
  int64_t token, head;  // strides in bytes
  int64_t width;        // D

  template <typename T>
  const typename T::Raw* at(int64_t token_id, int64_t head_id) const {
    return reinterpret_cast<const typename T::Raw*>(data + token_id * token + head_id * head);
  }
};

struct ChunkParams {
  const float* query;  // [T, Hq, Dk]
  Tokens keys, values;
  float* out;            // [T, Hq, Dv]
  float* lse;            // [T, Hq]
  float* packed_keys;    // [Hkv, tiles, strips of keys, Dk, kStrip]
  float* packed_values;  // [Hkv, tiles, strips of Dv, kTile, kStrip]
  int64_t num_queries, num_keys, heads, group;
  int64_t window, first_key;  // the query of token t attends key j if first_key + j > t - window
  float scale;                // of the logits
  float logit_cap;            // times log2(e), as logits are; 0: none
  bool causal;

  int64_t tiles() const { return (num_keys + kTile - 1) / kTile; }
  int64_t value_columns() const { return (values.width + kStrip - 1) / kStrip * kStrip; }
  int64_t key_floats() const { return kTile * keys.width; }
  int64_t value_floats() const { return kTile * value_columns(); }
  // The queries of a KV head are its rows: token by token, the heads of the group side by side.
  int64_t rows() const { return num_queries * group; }
  int64_t blocks() const { return (rows() + kBlock - 1) / kBlock; }
  int64_t query_of(int64_t row, int64_t head) const {
    return (row / group * heads + head) * group + row % group;
  }
  // Keys before the window of a row.
  int64_t hidden(int64_t row) const {
    if (window == 0) return 0;
    return std::max<int64_t>(0, std::min(row, rows() - 1) / group - window + 1 - first_key);
  }
  // The end of the keys that a row attends.
  int64_t visible(int64_t row) const {
    return causal ? std::min(row, rows() - 1) / group + 1 - first_key : num_keys;
  }
};

template <int N>
HISPARSE_INLINE float largest_of(const float* x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    typedef float Half __attribute__((vector_size(2 * N)));
    Half low, high;
    std::memcpy(&low, x, sizeof(low));
    std::memcpy(&high, x + N / 2, sizeof(high));
    low = low > high ? low : high;
    return largest_of<N / 2>(reinterpret_cast<const float*>(&low));
  }
}

HISPARSE_INLINE float largest(Floats x) {
  return largest_of<kLanes>(reinterpret_cast<const float*>(&x));
}

// Copies a tile of keys and values; keys beyond the last and columns beyond the width are 0.
template <typename T>
void pack_tile(const ChunkParams& p, int64_t head, int64_t tile) {
  float* keys = p.packed_keys + (head * p.tiles() + tile) * p.key_floats();
  float* values = p.packed_values + (head * p.tiles() + tile) * p.value_floats();
  const int64_t first = tile * kTile, count = std::min<int64_t>(kTile, p.num_keys - first);
  if (count < kTile) {
    std::fill_n(keys, p.key_floats(), 0.0f);
    std::fill_n(values, p.value_floats(), 0.0f);
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto* key = p.keys.at<T>(first + i, head);
    const auto* value = p.values.at<T>(first + i, head);
    float* to = keys + i / kStrip * kStrip * p.keys.width + i % kStrip;
    for (int64_t d = 0; d < p.keys.width; ++d) to[d * kStrip] = T::one(key[d]);
    for (int64_t strip = 0; strip < p.value_columns(); strip += kStrip) {
      float* row = values + strip * kTile + i * kStrip;
      const int64_t columns = std::min<int64_t>(kStrip, p.values.width - strip);
      for (int64_t d = 0; d < columns; ++d) row[d] = T::one(value[strip + d]);
      std::fill(row + columns, row + kStrip, 0.0f);
    }
  }
}

// Logits of a panel's queries [Dk, kPanel] and a strip of keys [Dk, kStrip]; raises `tops`.
HISPARSE_INLINE void score_strip(const float* query, const float* keys, int64_t width,
                                 float* logits, Floats* tops) {
  Floats sums[kPanel][kVectors] = {};
  for (int64_t d = 0; d < width; ++d) {
    Floats key[kVectors];
    for (int c = 0; c < kVectors; ++c) key[c] = Float32::load(keys + d * kStrip + c * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kPanel; ++r) {
      for (int c = 0; c < kVectors; ++c) sums[r][c] += query[d * kPanel + r] * key[c];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kPanel; ++r) {
    for (int c = 0; c < kVectors; ++c) {
      store(logits + r * kTile + c * kLanes, sums[r][c]);
      tops[r] = maximum(tops[r], sums[r][c]);
    }
  }
}

// out [kPanel, stride] = out * factors + weights [kPanel, kTile] . values [count, kStrip]
HISPARSE_INLINE void add_strip(const float* weights, const float* values, int64_t count,
                               const float* factors, float* out, int64_t stride) {
  Floats sums[kPanel][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kPanel; ++r) {
    for (int c = 0; c < kVectors; ++c) {
      sums[r][c] = Float32::load(out + r * stride + c * kLanes) * factors[r];
    }
  }
  for (int64_t t = 0; t < count; ++t) {
    Floats value[kVectors];
    for (int c = 0; c < kVectors; ++c) value[c] = Float32::load(values + t * kStrip + c * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kPanel; ++r) {
      for (int c = 0; c < kVectors; ++c) sums[r][c] += weights[r * kTile + t] * value[c];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kPanel; ++r) {
    for (int c = 0; c < kVectors; ++c) store(out + r * stride + c * kLanes, sums[r][c]);
  }
}

// What a block has attended so far.
struct Block {
  const ChunkParams& p;
  int64_t head, first_row;
  std::vector<float> query;  // [panels, Dk, kPanel], logits in powers of 2
  std::vector<float> out;    // [kBlock, value columns], weights relative to `top`
  float top[kBlock];         // the largest logit
  Floats total[kBlock];      // the sum of weights, by lanes

  Block(const ChunkParams& params, int64_t head_id, int64_t block)
      : p(params), head(head_id), first_row(block * kBlock), query(kBlock * p.keys.width),
        out(kBlock * p.value_columns()) {
    std::fill_n(top, kBlock, -INFINITY);
    std::fill_n(total, kBlock, Floats{});
    constexpr float kLog2E = 1.44269504f;
    for (int64_t i = 0; i < kBlock; ++i) {
      const int64_t row = std::min(first_row + i, p.rows() - 1);
      const float* from = p.query + p.query_of(row, head) * p.keys.width;
      float* to = query.data() + i / kPanel * kPanel * p.keys.width + i % kPanel;
      for (int64_t d = 0; d < p.keys.width; ++d) to[d * kPanel] = from[d] * p.scale * kLog2E;
    }
  }

  // Caps a panel's logits.
  void cap(int64_t columns, float* logits) const {
    for (int r = 0; r < kPanel; ++r, logits += kTile) cap_logits(logits, columns, p.logit_cap);
  }

  // Hides the keys of a tile from rows that do not attend them.
  void hide(int64_t row, int64_t first_key, int64_t columns, float* logits) const {
    for (int r = 0; r < kPanel; ++r, logits += kTile) {
      const int64_t visible = std::max<int64_t>(p.visible(row + r) - first_key, 0);
      if (visible < columns) std::fill(logits + visible, logits + columns, -INFINITY);
      const int64_t hidden = std::min(p.hidden(row + r) - first_key, columns);
      if (hidden > 0) std::fill(logits, logits + hidden, -INFINITY);
    }
  }

  // Finds the largest logits of a panel again.
  static void find_tops(int64_t columns, const float* logits, Floats* tops) {
    for (int r = 0; r < kPanel; ++r, logits += kTile) {
      tops[r] = Floats{} - INFINITY;
      for (int64_t t = 0; t < columns; t += kLanes) {
        tops[r] = maximum(tops[r], Float32::load(logits + t));
      }
    }
  }

  // Turns a panel's logits into weights; `factors` take what was summed before to the new maximum.
  void weigh(int64_t panel, int64_t columns, float* logits, const Floats* tops, float* factors) {
    for (int r = 0; r < kPanel; ++r, logits += kTile) {
      const float before = top[panel + r], now = std::max(before, largest(tops[r]));
      if (now == -INFINITY) {
        // A window hides all keys so far.
        std::fill_n(logits, columns, 0.0f);
        factors[r] = 0;
        continue;
      }
      const Floats factor = exp2_of_nonpositive(Floats{} + (before - now));
      Floats sums = total[panel + r] * factor;
      for (int64_t t = 0; t < columns; t += kLanes) {
        const Floats weight = exp2_of_nonpositive(Float32::load(logits + t) - now);
        store(logits + t, weight);
        sums += weight;
      }
      top[panel + r] = now;
      total[panel + r] = sums;
      factors[r] = factor[0];
    }
  }

  void attend(int64_t tile) {
    alignas(64) float logits[kPanel * kTile];
    const float* keys = p.packed_keys + (head * p.tiles() + tile) * p.key_floats();
    const float* values = p.packed_values + (head * p.tiles() + tile) * p.value_floats();
    const int64_t first_key = tile * kTile;
    for (int64_t panel = 0; panel < kBlock && first_row + panel < p.rows(); panel += kPanel) {
      const int64_t row = first_row + panel;
      const int64_t count = std::min<int64_t>(kTile, p.visible(row + kPanel - 1) - first_key);
      if (count <= 0 || p.hidden(row) >= first_key + kTile) continue;
      const int64_t columns = (count + kStrip - 1) / kStrip * kStrip;
      Floats tops[kPanel];
      std::fill_n(tops, kPanel, Floats{} - INFINITY);
      for (int64_t t = 0; t < columns; t += kStrip) {
        score_strip(query.data() + panel * p.keys.width, keys + t * p.keys.width, p.keys.width,
                    logits + t, tops);
      }
      const bool masked =
          p.visible(row) < first_key + columns || p.hidden(row + kPanel - 1) > first_key;
      if (p.logit_cap > 0) cap(columns, logits);
      if (masked) hide(row, first_key, columns, logits);
      if (masked || p.logit_cap > 0) find_tops(columns, logits, tops);
      float factors[kPanel];
      weigh(panel, columns, logits, tops, factors);
      for (int64_t d = 0; d < p.value_columns(); d += kStrip) {
        float* to = out.data() + panel * p.value_columns() + d;
        add_strip(logits, values + d * kTile, count, factors, to, p.value_columns());
      }
    }
  }

  void finish() const {
    constexpr float kLn2 = 0.693147181f;
    for (int64_t i = 0; i < kBlock && first_row + i < p.rows(); ++i) {
      const int64_t query_id = p.query_of(first_row + i, head);
      const float weights = sum(total[i]), inverse = weights > 0 ? 1 / weights : 0;
      const float* from = out.data() + i * p.value_columns();
      float* to = p.out + query_id * p.values.width;
      for (int64_t d = 0; d < p.values.width; ++d) to[d] = from[d] * inverse;
      p.lse[query_id] = top[i] * kLn2 + std::log(weights);
    }
  }
};

Tokens tokens_of(const TensorView& t, const char* name) {
  require_unit_stride(t, name);
  const int64_t bytes = t.dtype().bits / 8;
  return {static_cast<const char*>(t.data_ptr()), t.stride(0) * bytes, t.stride(1) * bytes,
          t.size(2)};
}

void chunk_attention(Arguments& in) {
  const TensorView query = in.tensor(), k = in.tensor(), v = in.tensor(), out = in.tensor(),
                   lse = in.tensor();
  const auto causal = in.number<bool>();
  const auto scale = in.number<double>(), logit_cap = in.number<double>();
  const auto window = in.number<int64_t>(), first_key = in.number<int64_t>();
  ChunkParams p;
  p.query = data_of<const float>(query, "query");
  p.keys = tokens_of(k, "k");
  p.values = tokens_of(v, "v");
  p.out = data_of<float>(out, "out");
  p.lse = data_of<float>(lse, "lse");
  p.num_queries = query.size(0);
  p.num_keys = k.size(0);
  p.heads = k.size(1);
  p.group = query.size(1) / p.heads;
  p.causal = causal;
  p.window = window;
  p.first_key = first_key;
  p.scale = static_cast<float>(scale);
  p.logit_cap = static_cast<float>(logit_cap * 1.44269504088896);
  // Not initialised: the tiles write all of it.
  const std::unique_ptr<float[]> keys(new float[p.heads * p.tiles() * p.key_floats()]);
  const std::unique_ptr<float[]> values(new float[p.heads * p.tiles() * p.value_floats()]);
  p.packed_keys = keys.get();
  p.packed_values = values.get();
  const double widths = static_cast<double>(p.keys.width + p.values.width);
  const int64_t tiles = p.heads * p.tiles(), blocks = p.heads * p.blocks();
  with_element_type(k, "k", [&](auto type) {
    parallel_for(tiles, num_threads(tiles, p.heads * p.num_keys * widths), [&](int64_t item) {
      pack_tile<decltype(type)>(p, item / p.tiles(), item % p.tiles());
    });
  });
  const double products = widths * p.rows() * p.heads * p.num_keys / (causal ? 2 : 1);
  parallel_for(blocks, num_threads(blocks, products / 40), [&](int64_t item) {
    Block block(p, item / p.blocks(), item % p.blocks());
    const int64_t last = p.visible(block.first_row + kBlock - 1);
    const int64_t first = p.hidden(block.first_row) / kTile;
    for (int64_t tile = first; tile * kTile < last; ++tile) block.attend(tile);
    block.finish();
  });
}

HISPARSE_EXPORT_KERNEL(chunk_attention)

}  // namespace
}  // namespace hisparse
