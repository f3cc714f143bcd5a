// The log-sum-exp of a tail page's logits, by one block; and rows of numbers of any dtype.
#pragma once

#include "hisparse/block.cuh"
#include "hisparse/page_rank.cuh"

namespace hisparse {

enum class NumberType : int32_t { kFloat32, kBFloat16, kFloat16, kE4M3, kInt8 };

struct NumberRows {
  const void* data;
  int64_t first;               // elements before the first row
  int64_t stride, dim_stride;  // elements
  NumberType type;

  // The rows from `row` on, `elements` further.
  __device__ NumberRows from(int64_t elements, int64_t row) const {
    return {data, first + elements + row * stride, stride, dim_stride, type};
  }

  __device__ float at(int32_t row, int32_t d) const {
    const int64_t i = first + row * stride + d * dim_stride;
    switch (type) {
      case NumberType::kFloat32: return static_cast<const float*>(data)[i];
      case NumberType::kBFloat16: return to_float(static_cast<const BFloat16*>(data)[i]);
      case NumberType::kFloat16: return to_float(static_cast<const Float16*>(data)[i]);
      case NumberType::kInt8: return static_cast<const int8_t*>(data)[i];
      case NumberType::kE4M3: break;
    }
    const uint32_t bits = static_cast<const uint8_t*>(data)[i];
    // As a float16 number it is 2^-8 times itself.
    const uint32_t half = (bits & 0x80u) << 8 | (bits & 0x7fu) << 7;
    return to_float(Float16{static_cast<uint16_t>(half)}) * 256.0f;
  }
};

struct TailParams {
  NumberRows keys;        // [N, heads, S, D], a token a row; without data there are no tail pages
  const uint8_t* scales;  // [N, heads, S, 2], or null
  const int32_t* pages;   // [B * rows]
  const int32_t* lens;    // [B * rows]
  float* lse;             // [B, Hq]
  int64_t page_stride, head_stride;                                      // of the keys, in elements
  int64_t scales_page_stride, scales_head_stride, scales_token_stride;
  int32_t rows, heads;    // rows of a request; heads of a page
};

// For `count` queries of a KV head. A warp takes a query at a time.
__device__ inline void find_tail_lse(const TailParams& p, const NumberRows& queries, int32_t count,
                                     int32_t dim, int32_t request, int32_t head, int32_t kv_heads,
                                     float scale, float* lse) {
  const int32_t row = request * p.rows + head * p.rows / kv_heads, own = head % p.heads;
  const int64_t page = p.pages[row];
  const NumberRows keys = p.keys.from(page * p.page_stride + own * p.head_stride, 0);
  const uint8_t* scales =
      p.scales + (p.scales == nullptr ? 0
                                      : page * p.scales_page_stride + own * p.scales_head_stride);
  for (int32_t i = warp_id(); i < count; i += num_threads() / kWarp) {
    Mass mass;
    for (int32_t token = 0; token < p.lens[row]; ++token) {
      float sum = 0.0f;
      for (int32_t d = lane_id(); d < dim; d += kWarp) sum += queries.at(i, d) * keys.at(token, d);
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, distance);
      }
      if (scales != nullptr) {
        sum *= __uint_as_float(uint32_t{scales[token * p.scales_token_stride]} << 23);
      }
      Mass one;
      one.top = sum * scale;
      one.total = 1.0f;
      mass.add(one);
    }
    if (lane_id() == 0) lse[i] = mass.total > 0.0f ? mass.top + logf(mass.total) : -INFINITY;
  }
}

}  // namespace hisparse
