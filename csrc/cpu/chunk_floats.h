// The products of chunk_attention in float32, by vectors.
#pragma once

#include "chunk.h"

#include <cstring>

namespace hisparse {

// Keys and values lie as float32 in the order of the inner loops.
//   keys     [strips of keys, Dk, kStrip]
//   values   [strips of Dv, kTile, kStrip]
//   queries  [panels, Dk, kPanel], times scale and log2(e)
template <typename T>
struct FloatProducts {
  using Number = float;
  using Query = float;
  // Sums of a panel's queries and a strip's columns fill most of the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
  static constexpr int32_t kPanel = 12;
#else
  static constexpr int32_t kPanel = 6;
#endif
  static constexpr int32_t kVectors = 2, kStrip = kVectors * kLanes;
  static_assert(kTile % kStrip == 0 && kBlock % kPanel == 0);

  struct Session {};  // of a thread while it multiplies

  static int64_t columns(int64_t width) { return (width + kStrip - 1) / kStrip * kStrip; }
  static int64_t key_numbers(const ChunkParams& p) { return kTile * p.keys.width; }
  static int64_t query_numbers(const ChunkParams& p) { return kBlock * p.keys.width; }

  // Copies a tile of keys and values; keys beyond the last and columns beyond the width are 0.
  static void pack(const ChunkParams& p, int64_t head, int64_t tile, float* keys, float* values) {
    const int64_t first = tile * kTile, count = std::min<int64_t>(kTile, p.num_keys - first);
    if (count < kTile) {
      std::fill_n(keys, key_numbers(p), 0.0f);
      std::fill_n(values, kTile * columns(p.values.width), 0.0f);
    }
    for (int64_t i = 0; i < count; ++i) {
      const auto* key = p.keys.at<T>(first + i, head);
      const auto* value = p.values.at<T>(first + i, head);
      float* to = keys + i / kStrip * kStrip * p.keys.width + i % kStrip;
      for (int64_t d = 0; d < p.keys.width; ++d) to[d * kStrip] = T::one(key[d]);
      for (int64_t strip = 0; strip < columns(p.values.width); strip += kStrip) {
        float* row = values + strip * kTile + i * kStrip;
        const int64_t some = std::min<int64_t>(kStrip, p.values.width - strip);
        for (int64_t d = 0; d < some; ++d) row[d] = T::one(value[strip + d]);
        std::fill(row + some, row + kStrip, 0.0f);
      }
    }
  }

  // Copies row i of a block's queries.
  static void pack_query(const ChunkParams& p, const float* query, int64_t i, float* queries) {
    float* to = queries + i / kPanel * kPanel * p.keys.width + i % kPanel;
    for (int64_t d = 0; d < p.keys.width; ++d) to[d * kPanel] = query[d] * p.scale * kLog2E;
  }

  // logits [kPanel, kTile], in powers of 2, of a panel's queries and `count` keys; raises `tops`.
  static void score(const ChunkParams& p, const float* queries, const float* keys, int64_t count,
                    float* logits, Floats* tops) {
    for (int64_t t = 0; t < count; t += kStrip) {
      score_strip(queries, keys + t * p.keys.width, p.keys.width, logits + t, tops);
    }
  }

  // out [kPanel, columns] = out * factors + weights . values [count, columns]
  static void add(const ChunkParams& p, const float* weights, const float* values, int64_t count,
                  const float* factors, float* out) {
    const int64_t width = columns(p.values.width);
    for (int64_t d = 0; d < width; d += kStrip) {
      add_strip(weights, values + d * kTile, count, factors, out + d, width);
    }
  }

 private:
  static HISPARSE_INLINE void score_strip(const float* query, const float* keys, int64_t width,
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

  static HISPARSE_INLINE void add_strip(const float* weights, const float* values, int64_t count,
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
};

}  // namespace hisparse
