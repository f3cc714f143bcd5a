// A tail page by one block: its new token is written, and the log-sum-exp of its logits found. And rows of
// numbers of any dtype.
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

  // A lane's numbers of some rows: from `start` on every kStep-th one, 0 from `end` on; `end` is
  // positive. The dtype is looked at once, so that no load waits for another one.
  template <int kStep, int kRows, int kCount>
  __device__ void read(const int32_t (&rows)[kRows], int32_t start, int32_t end,
                       float (&out)[kRows][kCount]) const {
    switch (type) {
      case NumberType::kFloat32: return read_as<float, kStep>(rows, start, end, out);
      case NumberType::kBFloat16: return read_as<BFloat16, kStep>(rows, start, end, out);
      case NumberType::kFloat16: return read_as<Float16, kStep>(rows, start, end, out);
      case NumberType::kInt8: return read_as<int8_t, kStep>(rows, start, end, out);
      case NumberType::kE4M3: return read_as<E4M3, kStep>(rows, start, end, out);
    }
  }

  template <typename T, int kStep, int kRows, int kCount>
  __device__ void read_as(const int32_t (&rows)[kRows], int32_t start, int32_t end,
                          float (&out)[kRows][kCount]) const {
    T found[kRows][kCount];
#pragma unroll
    for (int i = 0; i < kRows * kCount; ++i) {
      const int32_t d = min(start + i % kCount * kStep, end - 1);
      found[i / kCount][i % kCount] =
          static_cast<const T*>(data)[first + rows[i / kCount] * stride + d * dim_stride];
    }
#pragma unroll
    for (int i = 0; i < kRows * kCount; ++i) {
      const bool there = start + i % kCount * kStep < end;
      out[i / kCount][i % kCount] = there ? to_float(found[i / kCount][i % kCount]) : 0.0f;
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
  int32_t num_pages, size;  // N, S
  int32_t rows, heads;    // rows of a request; heads of a page: 1, or all
  int32_t head_rows;      // from a head's row to the next one's; 0: a request has one
};

// K or V of new tokens: where they are, and where they go.
struct NewPart {
  const char* tokens;  // [B, Hkv, D]
  char* host_pages;    // [P, Hkv, S, D]
  char* tail_pages;    // [N, heads, S, D]
  int64_t token, token_head, host_page, host_head, host_token;  // strides, bytes
  int64_t tail_page, tail_head, tail_token;                     // strides, bytes
  int32_t units;  // of one head; 0: there are none
};

struct NewTokens {
  NewPart parts[2];
  const int64_t* host_slots;  // [B], host page times S, plus the offset in it; null: there are no tokens
  const int64_t* tail_slots;  // [B * rows], the same of tail pages
  int64_t num_host_slots, num_tail_slots;
  int32_t page_size;
  bool wide;  // units are of 16 bytes, else of 2
};

template <typename Unit>
__device__ void append_units(const NewTokens& p, const TailParams& tail, int32_t request,
                             int32_t head) {
  const int32_t own = tail.heads == 1 ? 0 : head, row = request * tail.rows + head * tail.head_rows;
  const int32_t keys = p.parts[0].units, units = keys + p.parts[1].units;
  const int64_t host = p.host_slots[request];
  for (int32_t i = threadIdx.x; i < units; i += num_threads()) {
    const NewPart& q = p.parts[i < keys ? 0 : 1];
    const int64_t at = int64_t{i < keys ? i : i - keys} * sizeof(Unit);
    const Unit unit = *reinterpret_cast<const Unit*>(q.tokens + request * q.token +
                                                     head * q.token_head + at);
    if (host >= 0 && host < p.num_host_slots) {
      char* to = q.host_pages + host / p.page_size * q.host_page + head * q.host_head;
      *reinterpret_cast<Unit*>(to + host % p.page_size * q.host_token + at) = unit;
    }
    for (int32_t r = row; r < row + max(tail.head_rows, 1); ++r) {
      const int64_t slot = p.tail_slots[r];
      if (slot < 0 || slot >= p.num_tail_slots) continue;
      char* to = q.tail_pages + slot / p.page_size * q.tail_page + own * q.tail_head;
      *reinterpret_cast<Unit*>(to + slot % p.page_size * q.tail_token + at) = unit;
    }
  }
}

// Writes a request's new token of a KV head, if there is one, to its host page and to the tail pages of the
// head's rows. It is there after a barrier.
__device__ inline void append_token(const NewTokens& p, const TailParams& tail, int32_t request,
                                    int32_t head) {
  if (p.host_slots == nullptr) return;
  p.wide ? append_units<uint4>(p, tail, request, head)
         : append_units<unsigned short>(p, tail, request, head);
}

// For `count` queries of a KV head. A warp takes a query at a time, and several tokens.
__device__ inline void find_tail_lse(const TailParams& p, const NumberRows& queries, int32_t count,
                                     int32_t dim, int32_t request, int32_t head, float scale,
                                     float* lse) {
  constexpr int kAtOnce = 8, kTokens = kItems;  // numbers of a token, and tokens, read together
  constexpr int kChunk = 2 * kAtOnce;           // numbers of a query
  constexpr int kApart = kWarp / kTokenLanes;
  const int32_t row = request * p.rows + head * p.head_rows, own = p.heads == 1 ? 0 : head;
  const int32_t tokens = min(p.lens[row], p.size);
  const int64_t page = max(0, min(p.pages[row], p.num_pages - 1));
  const NumberRows keys = p.keys.from(page * p.page_stride + own * p.head_stride, 0);
  const uint8_t* scales =
      p.scales + (p.scales == nullptr ? 0
                                      : page * p.scales_page_stride + own * p.scales_head_stride);
  const int32_t part = lane_id() % kTokenLanes;
  for (int32_t i = warp_id(); i < count; i += num_threads() / kWarp) {
    Mass mass;
    float q[1][kChunk];
    queries.read<kTokenLanes>({i}, part, dim, q);  // While the page's number is on its way.
    for (int32_t base = 0; base < tokens; base += kTokens * kApart) {
      int32_t rows[kTokens];
      float sums[kTokens] = {};
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        rows[j] = min(base + j * kApart + lane_id() / kTokenLanes, tokens - 1);
      }
      for (int32_t d = 0; d < dim; d += kAtOnce * kTokenLanes) {
        const int half = d / (kAtOnce * kTokenLanes) % 2;
        if (half == 0 && dim > kChunk * kTokenLanes) {
          queries.read<kTokenLanes>({i}, d + part, dim, q);
        }
        float k[kTokens][kAtOnce];
        keys.read<kTokenLanes>(rows, d + part, dim, k);
#pragma unroll
        for (int j = 0; j < kTokens * kAtOnce; ++j) {
          const int own = j % kAtOnce;
          sums[j / kAtOnce] += (half == 0 ? q[0][own] : q[0][kAtOnce + own]) * k[j / kAtOnce][own];
        }
      }
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        for (int distance = kTokenLanes / 2; distance > 0; distance /= 2) {
          sums[j] += __shfl_xor_sync(kAllLanes, sums[j], distance);
        }
        if (scales != nullptr) {
          sums[j] *= __uint_as_float(uint32_t{scales[rows[j] * p.scales_token_stride]} << 23);
        }
        const int32_t token = base + j * kApart + lane_id() / kTokenLanes;
        sums[j] = token < tokens && part == 0 ? sums[j] * scale : -INFINITY;
      }
      mass.add(sums);
    }
    mass.add_lanes();
    if (lane_id() == 0) lse[i] = mass.total > 0.0f ? mass.top + logf(mass.total) : -INFINITY;
  }
}

}  // namespace hisparse
