// A block-wide operation: number flagged elements in their order.
#pragma once

#include "hisparse/ptx.cuh"

namespace hisparse {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;
constexpr int kMaxThreads = kWarp * kMaxWarps;
constexpr unsigned kAllLanes = 0xffffffffu;

// Elements of a tile per thread: their loads overlap, and one barrier serves all of them.
constexpr int kItems = 4;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ inline int32_t num_threads() { return static_cast<int32_t>(blockDim.x); }

// Elements that the block takes at once.
__device__ inline int32_t tile_size() { return num_threads() * kItems; }

// Where item j of this thread is in its tile: lanes are neighbours, and so are a warp's items.
__device__ inline int32_t tile_index(int j) { return (warp_id() * kItems + j) * kWarp + lane_id(); }

// Numbers flagged elements, tile after tile, in the order of the elements.
class BlockRank {
 public:
  static constexpr int kTotals = 2 * kMaxWarps;

  // `totals` is [kTotals] in shared memory, used by nothing else.
  __device__ explicit BlockRank(int32_t* totals) : totals_(totals) {}

  // ranks[j] is the number of flagged elements before item j, which follows those of lower lanes, and
  // all items of lower warps. All threads call it. It is a barrier: writes before it are visible
  // after it.
  template <int kCount>
  __device__ void operator()(const bool (&flags)[kCount], int32_t (&ranks)[kCount]) {
    const unsigned lower_lanes = (1u << lane_id()) - 1u;
    int32_t in_warp = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const unsigned ballot = __ballot_sync(kAllLanes, flags[j]);
      ranks[j] = in_warp + __popc(ballot & lower_lanes);
      in_warp += __popc(ballot);
    }
    // Two sets of totals take turns, so that no second barrier has to keep a fast warp from
    // overwriting totals that a slow one still reads.
    int32_t* totals = totals_ + turn_ * kMaxWarps;
    if (lane_id() == 0) totals[warp_id()] = in_warp;
    __syncthreads();
    const int32_t total = lane_id() < num_threads() / kWarp ? totals[lane_id()] : 0;
    const int32_t before = __reduce_add_sync(kAllLanes, lane_id() < warp_id() ? total : 0);
#pragma unroll
    for (int j = 0; j < kCount; ++j) ranks[j] += count_ + before;
    count_ += __reduce_add_sync(kAllLanes, total);
    turn_ ^= 1;
  }

  // Flagged elements so far; the same in every thread.
  __device__ int32_t count() const { return count_; }

  // Counts from 0 again; no barrier.
  __device__ void restart() { count_ = 0; }

 private:
  int32_t* totals_;
  int32_t count_ = 0;
  int turn_ = 0;
};

}  // namespace hisparse
