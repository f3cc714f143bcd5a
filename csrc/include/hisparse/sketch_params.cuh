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
  NewTokens added;            // to the tail pages, before they are scored
};

constexpr int32_t kScoreWarps = 4;     // of a block, at most
// Blocks that shared memory has room for on a multiprocessor. Fewer leave registers for more queries,
// for pages of several words, and where the layout is not known.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int32_t kScoreBlocks = 3;
#else
constexpr int32_t kScoreBlocks = 4;
#endif
template <typename Layout>
HISPARSE_ANYWHERE constexpr int32_t score_blocks(int32_t queries) {
  return queries > 8 ? 2 : Layout::kTokens != kWordTokens ? kScoreBlocks - 1 : kScoreBlocks;
}
constexpr int32_t kBatch = 16;         // pages that a warp scores at a time
constexpr int32_t kHalf = 8;           // pages that are copied together
constexpr int32_t kHalves = 3;         // of batches in shared memory: one and its successor's first
constexpr int32_t kTileQueries = 8;    // columns of a product
constexpr int32_t kRowBytes = 2 * kTileQueries;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;
// A page with an exponent beyond it, in absolute value, is scored again with its maximum known.
constexpr float kFarExponent = 100.0f;

// Where there are many channels or tokens, reads of all of them at once would take too many registers.
template <typename Layout>
constexpr int kUnroll = Layout::kChannels <= 40 && Layout::kTokens <= kWordTokens ? 8 : 1;

// Shared memory: of the block the queries' channels, for each tile of eight columns a row of float16
// numbers; their factors; and of each warp some halves of batches. Four queries are columns twice.
//
// The rows that a warp reads together are of any channels. So each row may lie there eight times, side
// by side: the i-th one of a matrix is read from the i-th copy, in banks of its own.
struct SketchScoreShared {
  SketchLayout layout;
  int32_t queries;  // 4, 8 or 16
  int32_t parts;    // float16 numbers whose sum is a query's channel
  int32_t copies;   // of a row: 1 or 8

  HISPARSE_ANYWHERE constexpr int32_t tiles() const {
    return (queries + kTileQueries - 1) / kTileQueries;
  }
  HISPARSE_ANYWHERE constexpr int32_t blocks_of_lane() const { return (layout.blocks() + 3) / 4; }
  // Channels of a tile.
  HISPARSE_ANYWHERE constexpr int32_t rows() const { return 4 * kBlock * blocks_of_lane(); }
  HISPARSE_ANYWHERE constexpr int32_t row_stride() const { return copies * kRowBytes; }
  HISPARSE_ANYWHERE constexpr int32_t tile_bytes() const { return rows() * row_stride(); }
  HISPARSE_ANYWHERE constexpr int32_t part_bytes() const { return tiles() * tile_bytes(); }
  HISPARSE_ANYWHERE constexpr int32_t factors() const { return parts * part_bytes(); }
  // An odd number of 16 bytes, so that pages begin in different banks.
  HISPARSE_ANYWHERE constexpr int32_t sketch_stride() const {
    return (layout.num_bytes() / kCopyBytes | 1) * kCopyBytes;
  }
  HISPARSE_ANYWHERE constexpr int32_t half_bytes() const { return kHalf * sketch_stride(); }
  HISPARSE_ANYWHERE constexpr int32_t warps() const { return factors() + 16 * tiles() * 2; }
  HISPARSE_ANYWHERE constexpr int32_t warp_bytes() const { return kHalves * half_bytes(); }
};

// Copies of the queries' rows, where they leave room for two blocks on a multiprocessor.
template <typename Layout, int kQueries>
constexpr int32_t kCopies =
    Layout::kChannels < Layout::kDim && Layout::kDim * kQueries <= 256 * kTileQueries ? 8 : 1;

template <typename Layout, int kQueries, int kParts>
HISPARSE_ANYWHERE constexpr SketchScoreShared score_shared(const SketchLayout& layout) {
  return {layout, kQueries, kParts, kCopies<Layout, kQueries>};
}

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
        }
      }
      for (int32_t start = 0; start < sizes.rows(); start += kChannels) {
        if (kChannels < sizes.layout.dim) load(number, start);
#pragma unroll
        for (int i = 0; i < kRows * kReads; ++i) {
          const int32_t d = start + i % kReads * kWarp + lane_id();
          if (d >= sizes.rows()) continue;
          write(read[i / kReads][i % kReads] * up[i / kReads], number + i / kReads * kScoreWarps, d,
                shared);
        }
      }
    }
  }

  // Writes a channel of a query as a sum of float16 numbers, to one copy of its row. Which one: so
  // that the lanes, with a channel each, write to different banks.
  __device__ void write(float left, int32_t number, int32_t channel, char* shared) const {
    if (channel >= sizes.rows()) return;
    for (int part = 0; part < sizes.parts; ++part) {
      const Float16 rounded{to_half_bits(left)};
      left -= to_float(rounded);
      char* row = shared + part * sizes.part_bytes() + number / kTileQueries * sizes.tile_bytes() +
                  channel * sizes.row_stride() + channel % sizes.copies * kRowBytes;
      for (int32_t column = number % kTileQueries; column < kTileQueries; column += kQueries) {
        reinterpret_cast<Float16*>(row)[column] = rounded;
      }
    }
  }

  // Writes the other copies, once all threads have met: eight threads those of a channel.
  __device__ void copy(char* shared) const {
    const int32_t own = static_cast<int32_t>(threadIdx.x) % sizes.copies;
    const int32_t step = num_threads() / sizes.copies;
    for (int32_t tile = 0; tile < sizes.tiles(); ++tile) {
#pragma unroll 4
      for (int32_t i = threadIdx.x / sizes.copies; i < sizes.rows(); i += step) {
        auto* row = reinterpret_cast<uint4*>(shared + tile * sizes.tile_bytes() +
                                             i * sizes.row_stride());
        const int32_t written = i % sizes.copies;
        if (own != written) row[own] = row[written];
      }
    }
  }
};

}  // namespace hisparse
