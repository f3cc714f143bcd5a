// What chunk_attention reads and writes, as both of its inner loops see it.
#pragma once

#include "simd.h"
#include "tensors.h"

#include <algorithm>
#include <cstdint>

namespace hisparse {

constexpr int32_t kTile = 128;      // keys
constexpr int32_t kBlock = 96;      // queries
constexpr float kLog2E = 1.44269504f;

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
  const void* query;  // [T, Hq, Dk]
  Tokens keys, values;
  float* out;            // [T, Hq, Dv]
  float* lse;            // [T, Hq]
  int64_t num_queries, num_keys, heads, group;
  int64_t window, first_key;  // the query of token t attends key j if first_key + j > t - window
  float scale;                // of the logits
  float logit_cap;            // times log2(e), as logits are; 0: none
  bool causal;

  int64_t tiles() const { return (num_keys + kTile - 1) / kTile; }
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

}  // namespace hisparse
