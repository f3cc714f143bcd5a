// The log-sum-exp of a tail page's logits, by one block; and rows of numbers of any dtype.
#pragma once

#include "hisparse/block.cuh"
#include "hisparse/page_rank.cuh"

namespace hisparse {

struct E4M3 {
  uint8_t bits;
};
__device__ inline float to_float(int8_t x) { return x; }
__device__ inline float to_float(E4M3 x) {
  // As a float16 number it is 2^-8 times itself.
  const uint32_t half = (x.bits & 0x80u) << 8 | (x.bits & 0x7fu) << 7;
  return to_float(Float16{static_cast<uint16_t>(half)}) * 256.0f;
}

// Lanes that share a token of a tail page; a warp has several tokens at a time.
constexpr int32_t kTokenLanes = 8;

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

  // A lane's numbers of a row: from `start` on every kStep-th one, 0 from `end` on. The dtype is
  // looked at once, so that no load waits for another one.
  template <int kStep, int kCount>
  __device__ void read(int32_t row, int32_t start, int32_t end, float (&out)[kCount]) const {
    switch (type) {
      case NumberType::kFloat32: return read_as<float, kStep>(row, start, end, out);
      case NumberType::kBFloat16: return read_as<BFloat16, kStep>(row, start, end, out);
      case NumberType::kFloat16: return read_as<Float16, kStep>(row, start, end, out);
      case NumberType::kInt8: return read_as<int8_t, kStep>(row, start, end, out);
      case NumberType::kE4M3: return read_as<E4M3, kStep>(row, start, end, out);
    }
  }

  template <typename T, int kStep, int kCount>
  __device__ void read_as(int32_t row, int32_t start, int32_t end, float (&out)[kCount]) const {
    const T* from = static_cast<const T*>(data) + first + row * stride;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int32_t d = start + i * kStep;
      out[i] = d < end ? to_float(from[d * dim_stride]) : 0.0f;
    }
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
  constexpr int kAtOnce = 8;  // numbers that a lane reads at a time
  const int32_t row = request * p.rows + head * p.rows / kv_heads, own = head % p.heads;
  const int64_t page = p.pages[row];
  const NumberRows keys = p.keys.from(page * p.page_stride + own * p.head_stride, 0);
  const uint8_t* scales =
      p.scales + (p.scales == nullptr ? 0
                                      : page * p.scales_page_stride + own * p.scales_head_stride);
  for (int32_t i = warp_id(); i < count; i += num_threads() / kWarp) {
    Mass mass;
    for (int32_t base = 0; base < p.lens[row]; base += kWarp / kTokenLanes) {
      const int32_t token = base + lane_id() / kTokenLanes, part = lane_id() % kTokenLanes;
      const bool there = token < p.lens[row];
      float sum = 0.0f;
      for (int32_t d = part; d < dim; d += kAtOnce * kTokenLanes) {
        float q[kAtOnce], k[kAtOnce];
        queries.read<kTokenLanes>(i, d, dim, q);
        keys.read<kTokenLanes>(there ? token : 0, d, dim, k);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) sum += q[j] * k[j];
      }
      for (int distance = kTokenLanes / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, distance);
      }
      if (!there || part != 0) continue;
      if (scales != nullptr) {
        sum *= __uint_as_float(uint32_t{scales[token * p.scales_token_stride]} << 23);
      }
      Mass one;
      one.top = sum * scale;
      one.total = 1.0f;
      mass.add(one);
    }
    mass.add_lanes();
    if (lane_id() == 0) lse[i] = mass.total > 0.0f ? mass.top + logf(mass.total) : -INFINITY;
  }
}

}  // namespace hisparse
