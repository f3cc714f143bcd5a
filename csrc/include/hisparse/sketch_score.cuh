// sketch_score on the device: warps that score pages of a KV head, and copy those of their next turns.
#pragma once

#include "hisparse/sketch_scorer.cuh"

namespace hisparse {

// Starts to copy the sketches of half a batch; lane i below kHalf has the number of page i.
template <typename Layout>
__device__ inline void copy_sketches(const SketchScoreParams& p, const SketchScoreShared& sizes,
                                     int32_t host_page, int32_t head, uint8_t* half) {
  const int32_t chunks = sizes.layout.num_bytes() / kCopyBytes;
  constexpr int32_t lanes = 8;  // that copy a sketch together
  const int32_t own = lane_id() % lanes;
  const uint8_t* first = p.sketches + head * p.sketch_head + own * kCopyBytes;
  const auto number = static_cast<uint32_t>(max(0, min(host_page, p.last_host_page)));
#pragma unroll
  for (int32_t i = 0; i < kHalf; i += kWarp / lanes) {
    const int32_t page = i + lane_id() / lanes;
    const auto* from = static_cast<const uint8_t*>(
        row_at(first, __shfl_sync(kAllLanes, number, page), p.sketch_page));
    uint8_t* to = half + page * sizes.sketch_stride() + own * kCopyBytes;
#pragma unroll kUnroll<Layout>
    for (int32_t at = 0; at < chunks; at += lanes) {
      copy_async<kCopyBytes>(to + at * kCopyBytes, from + at * kCopyBytes, own + at < chunks);
    }
  }
}

// blockIdx.x is the request, KV head and tile of its queries; of gridDim.y blocks each takes every
// such batch of pages for all its warps, but if there are tail pages the first blocks are for those.
template <typename Layout, int kQueries, int kParts>
__global__ void __launch_bounds__(kScoreWarps * kWarp, score_blocks<Layout>(kQueries))
    sketch_score_kernel(const __grid_constant__ SketchScoreParams p) {
  wait_for_earlier_launches();
  using Scorer = SketchScorer<Layout, kQueries, kParts>;
  const uint32_t tiles = p.tiles, blocks = p.request_blocks;
  const int32_t request = blockIdx.x / blocks, head = blockIdx.x % blocks / tiles;
  const int32_t member = static_cast<int32_t>(blockIdx.x % tiles) * kQueries;
  const int32_t present = min(kQueries, p.group - member);
  const int32_t first_head = head * p.group + member;
  const int64_t row = int64_t{request} * p.heads + first_head;
  const NumberRows query = p.query.from(request * p.query_request, first_head);
  int32_t run = static_cast<int32_t>(blockIdx.y), runs = static_cast<int32_t>(gridDim.y);
  if (p.tail.keys.data != nullptr) {
    if (run == 0) {
      append_token(p.added, p.tail, request, head);
      __syncthreads();  // The new token is there.
      find_tail_lse(p.tail, query, present, p.layout.dim, request, head, p.scale, p.tail.lse + row);
      return;
    }
    --run, --runs;
  }
  const int32_t batches = num_threads() / kWarp * kBatch, step = runs * batches;
  const int32_t* table = p.host_pages + request * p.table_row;
  const auto find = [&](int32_t first) {
    const uint32_t at = min(first + lane_id() % kHalf, p.width - 1);
    return *static_cast<const int32_t*>(row_at(table, at, sizeof(int32_t)));
  };
  // The first loads are under way together: none of them is used before the others.
  const int32_t pages = p.num_pages[request];
  int32_t first = run * batches + warp_id() * kBatch;
  const int32_t begin = find(first), second = find(first + kHalf);
  int32_t next = find(first + step);
  const SketchScoreShared sizes = score_shared<Layout, kQueries, kParts>(Layout(p.layout).get());
  QueryTile<Layout, kQueries> tile{query, sizes, present, {}};
  tile.load(warp_id(), 0);
  const int32_t count = min(pages, p.width);
  if (run * batches >= count) return;
  char* shared = dynamic_shared();
  Scorer scorer{p, Layout(p.layout), shared + lane_id() % sizes.copies * kRowBytes, {}};
  const auto half_at = [&](int32_t place) {
    return reinterpret_cast<uint8_t*>(shared + sizes.warps() + warp_id() * sizes.warp_bytes() +
                                      place * sizes.half_bytes());
  };
  // The half with page `page`, of the batch with page `batch`; the lanes have its pages.
  const auto fetch = [&](int32_t batch, int32_t page, int32_t numbers, int32_t place) {
    // Page 0 in place of those beyond the last one.
    if (page + lane_id() % kHalf >= count) numbers = 0;
    if (batch < count) copy_sketches<Layout>(p, sizes, numbers, head, half_at(place));
    end_copies();
  };
  fetch(first, first, begin, 0);
  fetch(first, first + kHalf, second, 1);
  fetch(first + step, first + step, next, 2);
  next = find(first + step + kHalf);
  tile.store(p.scale, shared);
  __syncthreads();  // The queries are there.
  if constexpr (kCopies<Layout, kQueries> > 1) {
    tile.copy(shared);
    __syncthreads();
  }
  scorer.read_factors(reinterpret_cast<const float*>(shared + sizes.factors()));
  // The batch's first half is in this place, its second one in the next, that of the batch after it in
  // the one after that.
  int32_t place = 0;
  const auto follow = [](int32_t place) { return place < kHalves - 1 ? place + 1 : 0; };
  for (; first < count; first += step) {
    const int32_t upper = place, lower = follow(place);
    place = follow(lower);
    wait_for_copies<1>();
    __syncwarp();  // All lanes' copies are there.
    typename Scorer::Batch batch;
    scorer.add_bases(half_at(upper), half_at(lower), batch);
#pragma unroll 1
    for (int32_t half = 0, own = upper; half < 2; ++half, own = lower) {
      scorer.find_weights(half_at(own), half, batch);
      __syncwarp();  // Nobody reads this half any more.
      const int32_t later = first + step + half * step;
      fetch(later, later + (1 - half) * kHalf, next, own);
      // Read a while ahead of its copies.
      next = find(first + 2 * step + half * kHalf);
    }
    scorer.write(first, count, batch, p.scores + row * p.width, present);
  }
}

}  // namespace hisparse
