// sketch_score on the device: warps that score pages of a KV head, and copy those of their next turn.
#pragma once

#include "hisparse/sketch_scorer.cuh"

namespace hisparse {

// blockIdx.x is the request, KV head and tile of its queries, blockIdx.y the run of pages; if there
// are tail pages the first blocks are for those.
template <typename Layout, int kTiles, int kParts>
__global__ void __launch_bounds__(kScoreWarps * kWarp, kTiles == 1 ? kScoreBlocks : kScoreBlocks - 1)
    sketch_score_kernel(const __grid_constant__ SketchScoreParams p) {
  wait_for_earlier_launches();
  using Scorer = SketchScorer<Layout, kTiles, kParts>;
  const int32_t part = static_cast<int32_t>(blockIdx.x) % p.tiles;
  const int32_t head = static_cast<int32_t>(blockIdx.x) / p.tiles % p.kv_heads;
  const int32_t request = static_cast<int32_t>(blockIdx.x) / p.tiles / p.kv_heads;
  const int32_t group = p.heads / p.kv_heads, member = part * Scorer::kQueries;
  const int32_t present = min(Scorer::kQueries, group - member);
  const int64_t first_head = int64_t{head} * group + member;
  const int64_t row = int64_t{request} * p.heads + first_head;
  const NumberRows query = p.query.from(request * p.query_request, first_head);
  int32_t run = static_cast<int32_t>(blockIdx.y), runs = static_cast<int32_t>(gridDim.y);
  if (p.tail.keys.data != nullptr) {
    if (run == 0) {
      find_tail_lse(p.tail, query, present, p.layout.dim, request, head, p.kv_heads, p.scale,
                    p.tail.lse + row);
      return;
    }
    --run, --runs;
  }
  const int32_t count = min(p.num_pages[request], p.width);
  const int32_t step = num_threads() / kWarp * kBatch;
  const int32_t each = (count + runs * step - 1) / (runs * step) * step;
  const int32_t start = run * each, end = min(start + each, count);
  if (start >= end) return;
  const SketchScoreShared sizes{Layout(p.layout).get(), Scorer::kQueries, kParts};
  char* shared = dynamic_shared();
  auto* stages = reinterpret_cast<uint8_t*>(shared + sizes.warps() + warp_id() * sizes.warp_bytes());
  auto* barriers = reinterpret_cast<uint64_t*>(stages + 2 * sizes.stage_bytes());
  const int32_t g = lane_id() / 4, t = lane_id() % 4;
  Scorer scorer{p, Layout(p.layout), shared, stages, barriers, {}, g, t};
  if (lane_id() < 2) prepare_copies(barriers + lane_id());
  __syncwarp();
  const int32_t* table = p.host_pages + request * p.table_row;
  const auto find = [&](int32_t first) {
    const int32_t page = first + lane_id() % kBatch;
    return page < count ? table[page] : 0;
  };
  int32_t first = start + warp_id() * kBatch;
  if (first < end) scorer.fetch(find(first), head, 0);
  end_copies();
  // Read a batch ahead of its copy, which needs them at once.
  int32_t next = find(first + step);
  load_queries(query, p.scale, sizes, present, shared);
  __syncthreads();  // The queries are there.
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const auto* factors = reinterpret_cast<const float*>(shared + sizes.factors());
    scorer.factors[i / 2][i % 2] = factors[i / 2 * kTileQueries + 2 * t + i % 2];
  }
  for (int32_t turn = 0; first < end; first += step, ++turn) {
    const int32_t stage = turn % 2;
    if (first + step < end) scorer.fetch(next, head, stage ^ 1);
    end_copies();
    next = find(first + 2 * step);
    wait_for_rows<1>(barriers + stage, turn / 2 % 2);
    __syncwarp();  // All lanes' copies are there.
    scorer.score(first, count, stages + stage * sizes.stage_bytes(), p.scores + row * p.width,
                 present);
    __syncwarp();  // Nobody reads the stage any more.
  }
}

}  // namespace hisparse
