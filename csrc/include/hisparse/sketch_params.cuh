// What the parts of sketch_score share on the device: its parameters, and the queries in shared memory.
#pragma once

#include "hisparse/ptx.cuh"
#include "hisparse/sketch_layout.h"
#include "hisparse/tail_lse.cuh"

namespace hisparse {

struct SketchScoreParams {
  NumberRows query;           // [B * Hq, D]
  const uint8_t* sketches;    // [host pages, Hkv, bytes]
  const int32_t* host_pages;  // [B, P]
  const int32_t* num_pages;   // [B]
  float* scores;              // [B, Hq, P]
  int64_t query_request;      // elements from a request's queries to the next one's
  int64_t table_row;          // elements of host_pages
  int64_t sketch_page, sketch_head;  // bytes
  int32_t num_host_pages, heads, kv_heads, width;
  int32_t tiles;              // of each KV head's queries
  float scale;
  SketchLayout layout;
  TailParams tail;            // without keys: no block is for tail pages
};

constexpr int32_t kScoreWarps = 4;     // of a block, at most
// Blocks that shared memory has room for on a multiprocessor.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int32_t kScoreBlocks = 3;
#else
constexpr int32_t kScoreBlocks = 4;
#endif
constexpr int32_t kBatch = 16;         // pages that a warp scores at a time
constexpr int32_t kTileQueries = 8;    // columns of a product
constexpr int32_t kMatrix = 8;         // channels of a matrix that is loaded
constexpr int32_t kReads = 4;          // of a query by a lane that wait together
constexpr int32_t kWordTokens = 16;    // tokens whose codes for a channel are a word
constexpr uint32_t kOnes = 0x3c003c00u;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;
// A page with an exponent beyond it, in absolute value, is scored again with its maximum known.
constexpr float kFarExponent = 100.0f;

// Shared memory: of the block the queries' channels, each a row of float16 numbers, then a row of
// zeros; their factors; and of each warp two stages of sketches and the barriers of their copies.
struct SketchScoreShared {
  SketchLayout layout;
  int32_t queries;
  int32_t parts;    // float16 numbers whose sum is a query's channel

  HISPARSE_ANYWHERE constexpr int32_t blocks_of_lane() const { return (layout.blocks() + 3) / 4; }
  HISPARSE_ANYWHERE constexpr int32_t zero_row() const { return 4 * kBlock * blocks_of_lane(); }
  HISPARSE_ANYWHERE constexpr int32_t row_bytes() const { return 2 * queries; }
  HISPARSE_ANYWHERE constexpr int32_t part_bytes() const { return (zero_row() + 1) * row_bytes(); }
  HISPARSE_ANYWHERE constexpr int32_t factors() const { return parts * part_bytes(); }
  HISPARSE_ANYWHERE constexpr int32_t slots() const {
    return (layout.num_channels + kMatrix - 1) / kMatrix * kMatrix;
  }
  // An odd number of 16 bytes, so that pages begin in different banks.
  HISPARSE_ANYWHERE constexpr int32_t sketch_stride() const {
    return (layout.num_bytes() / 16 | 1) * 16;
  }
  HISPARSE_ANYWHERE constexpr int32_t stage_bytes() const { return kBatch * sketch_stride(); }
  HISPARSE_ANYWHERE constexpr int32_t warps() const { return factors() + 4 * queries; }
  HISPARSE_ANYWHERE constexpr int32_t warp_bytes() const { return 2 * (stage_bytes() + 8); }
};

// Writes a tile of queries to shared memory, each times a power of two that makes its largest
// channel at least 0.5 and less than 1. `factors` are what undoes that, and the softmax scale, in
// units of log2.
__device__ inline void load_queries(const NumberRows& query, float scale,
                                    const SketchScoreShared& sizes, int32_t present, char* shared) {
  float* factors = reinterpret_cast<float*>(shared + sizes.factors());
  for (int32_t i = warp_id(); i < sizes.queries; i += num_threads() / kWarp) {
    const int32_t end = i < present ? sizes.layout.dim : 0;
    float largest = 0.0f, read[kReads];
    for (int32_t first = lane_id(); first - lane_id() < end; first += kReads * kWarp) {
      query.read<kWarp>(i, first, end, read);
#pragma unroll
      for (int j = 0; j < kReads; ++j) largest = fmaxf(largest, fabsf(read[j]));
    }
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    const uint32_t exponent = min(max(__float_as_uint(largest) >> 23, 1u), 252u);
    const float up = __uint_as_float((253u - exponent) << 23);
    for (int32_t first = lane_id(); first <= sizes.zero_row(); first += kReads * kWarp) {
      query.read<kWarp>(i, first, end, read);
#pragma unroll
      for (int j = 0; j < kReads; ++j) {
        const int32_t d = first + j * kWarp;
        float left = read[j] * up;
        for (int part = 0; part < sizes.parts && d <= sizes.zero_row(); ++part) {
          const Float16 rounded{to_half_bits(left)};
          left -= to_float(rounded);
          char* row = shared + part * sizes.part_bytes() + d * sizes.row_bytes();
          reinterpret_cast<Float16*>(row)[i] = rounded;
        }
      }
    }
    if (lane_id() == 0) factors[i] = __uint_as_float((exponent + 1u) << 23) * (scale * kLog2E);
  }
}

// Scales as float16 numbers, times 2^5, of two codes: bytes `which` and the next of x. Codes below 8
// stand for scales under 2^-19, and come out as less.
__device__ inline uint32_t scales_in(uint32_t x, int which) {
  return permute_bytes(x, 0u, which == 0 ? 0x1404u : 0x3424u) >> 1;
}

}  // namespace hisparse
