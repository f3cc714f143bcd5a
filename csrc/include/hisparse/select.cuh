// select on the device, for selections of fixed length, or of all pages near the best score (kNear): one
// block per request and head of the selection, or a cluster of blocks (sm_90), each of which has a part of
// the pages.
//
// A page's rank is its score as an integer of the same order. The score is that of the only head,
// or the sum of the shares that the page has in the softmax of each of several heads. The blocks
// count the ranks' digits, some bits at a time, until they know the rank of the last page that is
// taken. Then they write the pages of that rank or a higher one, in ascending order.
//
// Blocks read each other's counts and parts of the softmax, and all come to the same result: nothing
// is sent back. What they read is written again only two cluster barriers later.
#pragma once

#include "hisparse/page_rank.cuh"

namespace hisparse {

// This block's part of a selection, when its pages have ranks. Every method is called by all threads of
// the cluster, but for those of one warp.
template <typename Score, bool kInShared, bool kNear>
struct SelectRow : RankedPages<Score, kInShared, kNear> {
  using Pages = RankedPages<Score, kInShared, kNear>;
  using Pages::block, Pages::blocks, Pages::count, Pages::first_base, Pages::p, Pages::page_of,
      Pages::rank_at, Pages::shared;

  __device__ Counted counted(const int32_t& own) const {
    if (p.log_blocks == 0) return {own, 0};
    Counted sum;
    int32_t of[kMaxCluster];
    // Without a branch between them all loads are under way together.
#pragma unroll
    for (int b = 0; b < kMaxCluster; ++b) of[b] = of_block(own, min(b, blocks() - 1));
#pragma unroll
    for (int b = 0; b < kMaxCluster; ++b) {
      if (b < blocks()) sum.all += of[b];
      if (b < block) sum.before += of[b];
    }
    return sum;
  }

  // Narrows the cut by `bits` more of the ranks, by the counts of their values. One warp calls it.
  __device__ void narrow(const int32_t* counts, int bits, Cut& cut) const {
    // Lanes take values from the highest down.
    const Counted own = counted(counts[kWarp - 1 - lane_id()]);
    int32_t up_to_here = own.all;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int32_t lower = __shfl_up_sync(kAllLanes, up_to_here, distance);
      if (lane_id() >= distance) up_to_here += lower;
    }
    const int lane = __ffs(static_cast<int>(__ballot_sync(kAllLanes, up_to_here >= cut.ties))) - 1;
    cut.shift -= bits;
    cut.least = cut.least << bits | static_cast<uint32_t>(kWarp - 1 - lane);
    cut.ties -= __shfl_sync(kAllLanes, up_to_here - own.all, lane);
    cut.before += __reduce_add_sync(kAllLanes, lane_id() < lane ? own.before : 0);
    cut.ties_before = __shfl_sync(kAllLanes, own.before, lane);
    cut.all_ties = cut.ties == __shfl_sync(kAllLanes, own.all, lane);
  }

  // The first digits are counted, but for a barrier. `wanted` is at least 1 and at most the number of
  // pages.
  __device__ Cut find_cut(int32_t wanted) {
    Cut cut{kRankBits, 0u, wanted, 0, 0, false};
    for (int turn = 0; !cut.all_ties && cut.shift > 0; ++turn) {
      const int bits = min(kDigitBits, cut.shift);
      if (turn > 0) count_next_digit(turn, cut, bits);
      cluster_sync();  // The blocks' digits are counted.
      if (warp_id() == 0) {
        const int32_t* counts = shared.counts[turn];
        if (bits > kHalfBits) {
          narrow(counts + kDigits, bits - kHalfBits, cut);
          counts += cut.least % kWarp * kWarp;
        }
        narrow(counts, min(bits, kHalfBits), cut);
        if (lane_id() == 0) shared.cut = cut;
      }
      __syncthreads();  // The digit is known.
      cut = shared.cut;
    }
    return cut;
  }

  // Counts the digit after those of the cut, of the pages that share them.
  __device__ void count_next_digit(int turn, const Cut& cut, int bits) {
    for (int32_t base = first_base(); base < count; base += tile_size()) {
      uint32_t rank[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        rank[j] = page_of(base, j) < count ? rank_at(page_of(base, j)) : 0u;
      }
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        if (page_of(base, j) < count && rank[j] >> cut.shift == cut.least) {
          shared.count(turn, rank[j] >> (cut.shift - bits) & ((1u << bits) - 1u));
        }
      }
    }
  }

  // Writes the pages that the cut takes, except `left_out`; returns how many there are in this block and
  // those before it. Page 0 of the block is `first` of the request.
  __device__ int32_t write(const Cut& cut, int32_t first, int32_t left_out, int32_t* pages) {
    BlockRank taken(shared.totals), tied(shared.tie_totals);
    const int32_t before = cut.before + min(cut.ties_before, cut.ties);
    for (int32_t base = 0; base < count; base += tile_size()) {
      bool takes[kItems], ties[kItems];
      int32_t at[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int32_t page = base + tile_index(j);
        const uint32_t upper = page < count ? rank_at(page) >> cut.shift : 0u;
        takes[j] = page < count && upper > cut.least;
        ties[j] = page < count && upper == cut.least;
      }
      if (!cut.all_ties) {
        tied(ties, at);
#pragma unroll
        for (int j = 0; j < kItems; ++j) ties[j] &= cut.ties_before + at[j] < cut.ties;
      }
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        takes[j] = (takes[j] || ties[j]) && first + base + tile_index(j) != left_out;
      }
      taken(takes, at);
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        if (takes[j]) pages[before + at[j]] = first + base + tile_index(j);
      }
    }
    return before + taken.count();
  }
};

// The blocks of a cluster come one after the other.
template <typename Score, bool kInShared, bool kNear>
__global__ void __launch_bounds__(kMaxThreads, 1)
    select_kernel(const __grid_constant__ SelectParams p) {
  wait_for_earlier_launches();
  const int32_t block = static_cast<int32_t>(blockIdx.x) & ((1 << p.log_blocks) - 1);
  const int32_t request = static_cast<int32_t>(blockIdx.x) >> p.log_blocks;
  const int32_t head = static_cast<int32_t>(blockIdx.y);
  const int32_t given = p.num_pages[request];
  // Meanwhile the counts become 0.
  constexpr int32_t kCounts = kTurns * (kDigits + kWarp);
  auto& shared = *reinterpret_cast<SelectShared*>(dynamic_shared());
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < kCounts; i += num_threads()) shared.counts[0][i] = 0;
  if (threadIdx.x == 0) shared.invalid = shared.near = 0;
  const int32_t count = max(0, min(given, p.width));
  const int32_t left_out = p.drop_last ? count - 1 : -1;
  const int64_t row = int64_t{request} * p.out_heads + head;
  int32_t* pages = p.pages + row * p.max_pages;
  int32_t length = 0;
  bool is_last = block == 0;  // This block has the end of the selection.
  if (count == 0 || (!kNear && count <= p.max_pages)) {
    length = count - (left_out >= 0);
    if (is_last) {
#pragma unroll 1
      for (int32_t i = threadIdx.x; i < length; i += num_threads()) pages[i] = i;
    }
  } else {
    // Where fewer heads score than select, some share their scores.
    const int32_t first_head = p.sharers > 1 ? head / p.sharers : head * p.voters;
    const int32_t each = pages_of_block(count, p.log_blocks), first = min(block * each, count);
    is_last = first < count && first + each >= count;
    uint32_t* ranks = p.scratch;
    if (ranks != nullptr) ranks += row * p.width + first;
    if (kInShared) ranks = reinterpret_cast<uint32_t*>(dynamic_shared() + sizeof(SelectShared));
    SelectRow<Score, kInShared, kNear> step{{
        p,
        shared,
        ranks,
        static_cast<const Score*>(p.scores) + request * p.request_stride +
            first_head * p.head_stride + first * p.page_stride,
        p.forced == nullptr
            ? nullptr
            : p.forced + request * p.forced_request_stride + first * p.forced_page_stride,
        p.rest == nullptr
            ? nullptr
            : p.rest + request * p.rest_request_stride + first_head * p.rest_head_stride,
        block,
        min(each, count - first)}};
    step.rank_pages();
    int32_t wanted = p.max_pages;
    if (kNear) {
      cluster_sync();  // The blocks' near pages are counted.
      wanted = min(wanted, step.counted(shared.near).all);
    }
    const Cut cut = step.find_cut(max(1, wanted));
    if (block == 0 && warp_id() == 0 && p.invalid_scores != nullptr) {
      const bool invalid =
          lane_id() < step.blocks() && of_block(shared.invalid, lane_id()) != 0;
      if (__any_sync(kAllLanes, invalid) && lane_id() == 0) atomicAdd(p.invalid_scores, 1ull);
    }
    // What was read of other blocks has been used: an arrival orders no read after it.
    cluster_arrive();
    if (wanted > 0) length = step.write(cut, first, left_out, pages);
    cluster_wait();  // No block reads the shared memory of another one any more.
  }
  if (!is_last) return;
#pragma unroll 1
  for (int32_t i = length + static_cast<int32_t>(threadIdx.x); i < p.max_pages;
       i += num_threads()) {
    pages[i] = -1;
  }
  if (threadIdx.x == 0) p.lengths[row] = length;
}

}  // namespace hisparse
