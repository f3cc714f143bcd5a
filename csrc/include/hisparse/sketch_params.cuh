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
  int64_t sketch_head;        // bytes
  uint32_t sketch_page;       // bytes
  int32_t last_host_page, heads, kv_heads, width;
  int32_t group;              // queries of a KV head
  int32_t tiles;              // of a group
  int32_t request_blocks;     // tiles of a request
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

// A tile of queries on its way to shared memory. A warp has every kScoreWarps-th one, and of those a
// lane has kReads numbers at a time: all of them unless they are many, or their count is unknown.
template <typename Layout, int kQueries>
struct QueryTile {
  static constexpr int kRows = kQueries / kScoreWarps;
  static constexpr int kReads = Layout::kDim > 256 ? 8 : (Layout::kDim + kWarp - 1) / kWarp;

  const NumberRows query;
  const SketchScoreShared sizes;
  const int32_t present;
  float read[kRows][kReads];

  // Reads from channel `start` on; queries that are not present are 0.
  __device__ void load(int32_t number, int32_t start) {
    int32_t rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows[i] = min(number + i * kScoreWarps, present - 1);
    query.read<kWarp>(rows, start + lane_id(), sizes.layout.dim, read);
#pragma unroll
    for (int i = 0; i < kRows * kReads; ++i) {
      if (number + i / kReads * kScoreWarps >= present) read[i / kReads][i % kReads] = 0.0f;
    }
  }

  // Writes queries, each times a power of two that makes its largest channel at least 0.5 and less
  // than 1, and factors, which undo that, with the softmax scale, in units of log2. Those that the
  // warp takes first are loaded, from channel 0 on.
  __device__ void store(float scale, char* shared) {
    constexpr int32_t kChannels = kReads * kWarp;
    for (int32_t number = warp_id(); number < kScoreWarps; number += num_threads() / kWarp) {
      if (number != warp_id()) load(number, 0);
      float largest[kRows] = {}, up[kRows];
      for (int32_t start = 0; start < sizes.layout.dim; start += kChannels) {
        if (start > 0) load(number, start);
#pragma unroll
        for (int i = 0; i < kRows * kReads; ++i) {
          largest[i / kReads] = fmaxf(largest[i / kReads], fabsf(read[i / kReads][i % kReads]));
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const uint32_t bits = __reduce_max_sync(kAllLanes, __float_as_uint(largest[i]));
        const uint32_t exponent = min(max(bits >> 23, 1u), 252u);
        up[i] = __uint_as_float((253u - exponent) << 23);
        if (lane_id() == 0) {
          const int32_t query_number = number + i * kScoreWarps;
          reinterpret_cast<float*>(shared + sizes.factors())[query_number] =
              __uint_as_float((exponent + 1u) << 23) * (scale * kLog2E);
          write(0.0f, query_number, sizes.zero_row(), shared);
        }
      }
      for (int32_t start = 0; start < sizes.zero_row(); start += kChannels) {
        if (kChannels < sizes.layout.dim) load(number, start);
#pragma unroll
        for (int i = 0; i < kRows * kReads; ++i) {
          const int32_t d = start + i % kReads * kWarp + lane_id();
          if (d >= sizes.zero_row()) continue;
          write(read[i / kReads][i % kReads] * up[i / kReads], number + i / kReads * kScoreWarps, d,
                shared);
        }
      }
    }
  }

  // Writes a channel of a query as a sum of float16 numbers.
  __device__ void write(float left, int32_t number, int32_t channel, char* shared) const {
    for (int part = 0; part < sizes.parts; ++part) {
      const Float16 rounded{to_half_bits(left)};
      left -= to_float(rounded);
      char* row = shared + part * sizes.part_bytes() + channel * sizes.row_bytes();
      reinterpret_cast<Float16*>(row)[number] = rounded;
    }
  }
};

// Scales as float16 numbers, times 2^5, of two codes: bytes `which` and the next of x. Codes below 8
// stand for scales under 2^-19, and come out as less.
__device__ inline uint32_t scales_in(uint32_t x, int which) {
  return permute_bytes(x, 0u, which == 0 ? 0x1404u : 0x3424u) >> 1;
}

}  // namespace hisparse
