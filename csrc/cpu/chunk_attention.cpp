// chunk_attention: many query tokens over contiguous keys; all of them, or those up to its own, or
// those of a window.
//
// A block of queries goes over the keys tile by tile with a running maximum and sum (FlashAttention,
// https://arxiv.org/abs/2205.14135). Within the block, a panel of queries at a time keeps its logits
// in the nearest cache. Keys after the panel's last token are neither scored nor masked. Keys and
// values are copied once, in the order of the products: a copy serves thousands of queries.
#include "chunk.h"
#include "chunk_amx.h"
#include "chunk_floats.h"
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

// What a block has attended so far, by the products of a processor.
template <typename Products>
struct Block {
  static constexpr int32_t kPanel = Products::kPanel, kStrip = Products::kStrip;
  using Number = typename Products::Number;

  const ChunkParams& p;
  int64_t head, first_row, columns;
  std::vector<Number> query;  // as Products has it
  std::vector<float> out;     // [kBlock, columns], weights relative to `top`
  float top[kBlock];          // the largest logit, in powers of 2
  Floats total[kBlock];       // the sum of weights, by lanes

  Block(const ChunkParams& params, int64_t head_id, int64_t block)
      : p(params), head(head_id), first_row(block * kBlock),
        columns(Products::columns(p.values.width)), query(Products::query_numbers(p)),
        out(kBlock * columns) {
    std::fill_n(top, kBlock, -INFINITY);
    std::fill_n(total, kBlock, Floats{});
    const auto* queries = static_cast<const typename Products::Query*>(p.query);
    for (int64_t i = 0; i < kBlock; ++i) {
      const int64_t row = std::min(first_row + i, p.rows() - 1);
      Products::pack_query(p, queries + p.query_of(row, head) * p.keys.width, i, query.data());
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

  void attend(int64_t tile, const Number* keys, const Number* values) {
    alignas(64) float logits[kPanel * kTile];
    const int64_t first_key = tile * kTile;
    for (int64_t panel = 0; panel < kBlock && first_row + panel < p.rows(); panel += kPanel) {
      const int64_t row = first_row + panel;
      const int64_t count = std::min<int64_t>(kTile, p.visible(row + kPanel - 1) - first_key);
      if (count <= 0 || p.hidden(row) >= first_key + kTile) continue;
      const int64_t some = (count + kStrip - 1) / kStrip * kStrip;
      Floats tops[kPanel];
      std::fill_n(tops, kPanel, Floats{} - INFINITY);
      const Number* own = query.data() + panel * (Products::query_numbers(p) / kBlock);
      Products::score(p, own, keys, some, logits, tops);
      const bool masked =
          p.visible(row) < first_key + some || p.hidden(row + kPanel - 1) > first_key;
      if (p.logit_cap > 0) cap(some, logits);
      if (masked) hide(row, first_key, some, logits);
      if (masked || p.logit_cap > 0) find_tops(some, logits, tops);
      float factors[kPanel];
      weigh(panel, some, logits, tops, factors);
      Products::add(p, logits, values, count, factors, out.data() + panel * columns);
    }
  }

  void finish() const {
    constexpr float kLn2 = 0.693147181f;
    for (int64_t i = 0; i < kBlock && first_row + i < p.rows(); ++i) {
      const int64_t query_id = p.query_of(first_row + i, head);
      const float weights = sum(total[i]), inverse = weights > 0 ? 1 / weights : 0;
      const float* from = out.data() + i * columns;
      float* to = p.out + query_id * p.values.width;
      for (int64_t d = 0; d < p.values.width; ++d) to[d] = from[d] * inverse;
      p.lse[query_id] = top[i] * kLn2 + std::log(weights);
    }
  }
};

// Attends all queries.
template <typename Products>
void attend_all(const ChunkParams& p) {
  using Number = typename Products::Number;
  const int64_t tiles = p.heads * p.tiles(), blocks = p.heads * p.blocks();
  const int64_t key_size = Products::key_numbers(p);
  const int64_t value_size = kTile * Products::columns(p.values.width);
  // Not initialised: the tiles write all of it.
  const std::unique_ptr<Number[]> keys(new Number[tiles * key_size]);
  const std::unique_ptr<Number[]> values(new Number[tiles * value_size]);
  const double widths = static_cast<double>(p.keys.width + p.values.width);
  parallel_for(tiles, num_threads(tiles, p.heads * p.num_keys * widths), [&](int64_t item) {
    Products::pack(p, item / p.tiles(), item % p.tiles(), keys.get() + item * key_size,
                   values.get() + item * value_size);
  });
  const double products = widths * p.rows() * p.heads * p.num_keys / (p.causal ? 2 : 1);
  parallel_for(blocks, num_threads(blocks, products / 40), [&](int64_t item) {
    [[maybe_unused]] const typename Products::Session session;
    const int64_t head = item / p.blocks(), before = head * p.tiles();
    Block<Products> block(p, head, item % p.blocks());
    const int64_t last = p.visible(block.first_row + kBlock - 1);
    const int64_t first = p.hidden(block.first_row) / kTile;
    for (int64_t tile = first; tile * kTile < last; ++tile) {
      block.attend(tile, keys.get() + (before + tile) * key_size,
                   values.get() + (before + tile) * value_size);
    }
    block.finish();
  });
}

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
#ifdef HISPARSE_CHUNK_AMX
  const auto is_bfloat16 = [](const TensorView& x) { return x.dtype().code == kDLBfloat; };
  if (is_bfloat16(query) && is_bfloat16(k) && has_matrices()) {
    p.query = data_of<const uint16_t>(query, "query");
    return attend_all<MatrixProducts>(p);
  }
#endif
  const AsFloats floats(query, "query");
  p.query = floats.data();
  with_element_type(k, "k", [&](auto type) { attend_all<FloatProducts<decltype(type)>>(p); });
}

HISPARSE_EXPORT_KERNEL(chunk_attention)

}  // namespace
}  // namespace hisparse
