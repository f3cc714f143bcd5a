// sketch_score on the device: warps that score pages of a KV head, and copy those of their next turn.
#pragma once

#include "hisparse/sketch_scorer.cuh"

namespace hisparse {

// blockIdx.x is the request, KV head and tile of its queries; of gridDim.y blocks each takes every
// such batch of pages for all its warps, but if there are tail pages the first blocks are for those.
template <typename Layout, int kTiles, int kParts>
__global__ void __launch_bounds__(kScoreWarps * kWarp, kTiles == 1 ? kScoreBlocks : kScoreBlocks - 1)
    sketch_score_kernel(const __grid_constant__ SketchScoreParams p) {
  wait_for_earlier_launches();
  using Scorer = SketchScorer<Layout, kTiles, kParts>;
  const uint32_t tiles = p.tiles, blocks = p.request_blocks;
  const int32_t request = blockIdx.x / blocks, head = blockIdx.x % blocks / tiles;
  const int32_t member = static_cast<int32_t>(blockIdx.x % tiles) * Scorer::kQueries;
  const int32_t present = min(Scorer::kQueries, p.group - member);
  const int32_t first_head = head * p.group + member;
  const int64_t row = int64_t{request} * p.heads + first_head;
  const NumberRows query = p.query.from(request * p.query_request, first_head);
  int32_t run = static_cast<int32_t>(blockIdx.y), runs = static_cast<int32_t>(gridDim.y);
  if (p.tail.keys.data != nullptr) {
    if (run == 0) {
      find_tail_lse(p.tail, query, present, p.layout.dim, request, head, p.scale, p.tail.lse + row);
      return;
    }
    --run, --runs;
  }
  const int32_t batches = num_threads() / kWarp * kBatch, step = runs * batches;
  const int32_t* table = p.host_pages + request * p.table_row;
  const auto find = [&](int32_t first) {
    return table[min(first + lane_id() % kBatch, p.width - 1)];
  };
  // The first three loads are under way together: none of them is used before the others.
  const int32_t pages = p.num_pages[request];
  int32_t first = run * batches + warp_id() * kBatch, next = find(first);
  const SketchScoreShared sizes{Layout(p.layout).get(), Scorer::kQueries, kParts};
  QueryTile<Layout, Scorer::kQueries> tile{query, sizes, present, {}};
  tile.load(warp_id(), 0);
  const int32_t count = min(pages, p.width);
  if (run * batches >= count) return;
  char* shared = dynamic_shared();
  auto* stages = reinterpret_cast<uint8_t*>(shared + sizes.warps() + warp_id() * sizes.warp_bytes());
  auto* barriers = reinterpret_cast<uint64_t*>(stages + 2 * sizes.stage_bytes());
  const int32_t g = lane_id() / 4, t = lane_id() % 4;
  Scorer scorer{p, Layout(p.layout), shared, stages, barriers, {}, g, t};
  if (lane_id() < 2) prepare_copies(barriers + lane_id());
  __syncwarp();
  const auto fetch = [&](int32_t from, int stage) {
    // Page 0 in place of those beyond the last one.
    if (from < count) scorer.fetch(from + lane_id() % kBatch < count ? next : 0, head, stage);
    end_copies();
  };
  fetch(first, 0);
  // Read a batch ahead of its copy, which needs them at once.
  next = find(first + step);
  tile.store(p.scale, shared);
  __syncthreads();  // The queries are there.
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const auto* factors = reinterpret_cast<const float*>(shared + sizes.factors());
    scorer.factors[i / 2][i % 2] = factors[i / 2 * kTileQueries + 2 * t + i % 2];
  }
  for (int32_t turn = 0; first < count; first += step, ++turn) {
    const int32_t stage = turn % 2;
    fetch(first + step, stage ^ 1);
    next = find(first + 2 * step);
    wait_for_rows<1>(barriers + stage, turn / 2 % 2);
    __syncwarp();  // All lanes' copies are there.
    scorer.score(first, count, stages + stage * sizes.stage_bytes(), p.scores + row * p.width,
                 present);
    __syncwarp();  // Nobody reads the stage any more.
  }
}

}  // namespace hisparse
