// select on the device, for selections of fixed length: one block per request and head of the
// selection, or a cluster of blocks (sm_90), each of which has a part of the pages.
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

// Which pages are taken: those with rank >> shift above `least`, and the first `ties` of those where
// it equals `least`.
struct Cut {
  int shift;
  uint32_t least;
  int32_t ties;
  bool all_ties;                // There are no more of them.
  int32_t before, ties_before;  // Pages above `least`, and equal to it, in the blocks before this one.
};

// The sum over this lane and those below it.
__device__ inline Counted sum_to_here(Counted value) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    Counted lower;
    lower.all = __shfl_up_sync(kAllLanes, value.all, distance);
    lower.before = __shfl_up_sync(kAllLanes, value.before, distance);
    if (lane_id() >= distance) value.add(lower);
  }
  return value;
}

// This block's part of a selection, when its pages have ranks. Every method is called by all threads of
// the cluster.
template <typename Score, bool kInShared>
struct SelectRow : RankedPages<Score, kInShared> {
  using Pages = RankedPages<Score, kInShared>;
  using Pages::block, Pages::clear_counts, Pages::count, Pages::count_digit, Pages::digit_bits,
      Pages::p, Pages::rank_at, Pages::shared;

  __device__ Counted counted(int turn, int32_t digit) const {
    if (p.blocks == 1) return {shared.counts[turn][digit], 0};
    Counted sum;
    int32_t of[kMaxCluster];
    // Without a branch between them all loads are under way together.
#pragma unroll
    for (int b = 0; b < kMaxCluster; ++b) {
      of[b] = of_block(shared.counts[turn][digit], min(b, p.blocks - 1));
    }
#pragma unroll
    for (int b = 0; b < kMaxCluster; ++b) {
      if (b < p.blocks) sum.all += of[b];
      if (b < block) sum.before += of[b];
    }
    return sum;
  }

  // Finds the digit of the `wanted`-th rank from the top, among the ranks that are counted.
  __device__ void find_digit(int turn, int bits, int32_t wanted) {
    const int32_t digits = 1 << bits, each = (digits + num_threads() - 1) / num_threads();
    // Threads take digits from the highest down.
    const int32_t highest = digits - 1 - static_cast<int32_t>(threadIdx.x) * each;
    Counted own;
    for (int32_t digit = highest; digit > highest - each && digit >= 0; --digit) {
      own.add(counted(turn, digit));
    }
    Counted above = sum_to_here(own);
    if (lane_id() == kWarp - 1) shared.warp_counts[warp_id()] = above;
    __syncthreads();  // Each warp's count is there.
    Counted warps;
    if (lane_id() < warp_id()) warps = shared.warp_counts[lane_id()];
    warps = sum_to_here(warps);
    above.all += __shfl_sync(kAllLanes, warps.all, kWarp - 1) - own.all;
    above.before += __shfl_sync(kAllLanes, warps.before, kWarp - 1) - own.before;
    if (above.all < wanted && wanted <= above.all + own.all) {
      int32_t digit = highest;
      Counted inside = each == 1 ? own : counted(turn, digit);
      while (above.all + inside.all < wanted) {
        above.add(inside);
        inside = counted(turn, --digit);
      }
      shared.digit = digit;
      shared.above = above;
      shared.inside = inside;
    }
    __syncthreads();  // The digit is known.
  }

  // The first digits are counted. `wanted` is at least 1 and at most the number of pages.
  __device__ Cut find_cut(int32_t wanted) {
    Cut cut{kRankBits, 0u, wanted, false, 0, 0};
    for (int turn = 0;; turn ^= 1) {
      const int bits = min(digit_bits(), cut.shift);
      if (cut.shift < kRankBits) {
        clear_counts(turn);
        count_next_digit(turn, cut, bits);
      }
      cut.shift -= bits;
      find_digit(turn, bits, cut.ties);
      cut.least = cut.least << bits | static_cast<uint32_t>(shared.digit);
      cut.ties -= shared.above.all;
      cut.before += shared.above.before;
      cut.ties_before = shared.inside.before;
      cut.all_ties = cut.ties == shared.inside.all;
      if (cut.all_ties || cut.shift == 0) return cut;
    }
  }

  // Counts the digit behind those of the cut, of the pages that share them.
  __device__ void count_next_digit(int turn, const Cut& cut, int bits) {
    for (int32_t base = 0; base < count; base += tile_size()) {
      uint32_t rank[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int32_t page = base + tile_index(j);
        rank[j] = page < count ? rank_at(page) : 0u;
      }
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const bool counted = base + tile_index(j) < count && rank[j] >> cut.shift == cut.least;
        count_digit(turn, counted, rank[j] >> (cut.shift - bits) & ((1u << bits) - 1u));
      }
    }
    cluster_sync();  // The digits are counted.
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
template <typename Score, bool kInShared>
__global__ void __launch_bounds__(kMaxThreads, 1)
    select_kernel(const __grid_constant__ SelectParams p) {
  wait_for_earlier_launches();
  const int32_t row = static_cast<int32_t>(blockIdx.x) / p.blocks;
  const int32_t block = static_cast<int32_t>(blockIdx.x) % p.blocks;
  const int32_t request = row / p.out_heads, head = row % p.out_heads;
  const int32_t count = max(0, min(p.num_pages[request], p.width));
  const int32_t left_out = p.drop_last ? count - 1 : -1;
  int32_t* pages = p.pages + static_cast<int64_t>(row) * p.max_pages;
  int32_t length = 0;
  bool is_last = block == 0;  // This block has the end of the selection.
  if (count <= p.max_pages) {
    length = count - (left_out >= 0);
    if (is_last) {
      for (int32_t i = threadIdx.x; i < length; i += num_threads()) pages[i] = i;
    }
  } else {
    // Fewer heads score than select: the heads of a group share their scores.
    const int32_t first_head = static_cast<int32_t>(int64_t{head} * p.heads / p.out_heads);
    const int32_t each = pages_of_block(count, p.blocks), first = min(block * each, count);
    is_last = first < count && first + each >= count;
    uint32_t* ranks = p.scratch;
    if (ranks != nullptr) ranks += static_cast<int64_t>(row) * p.width + first;
    if (kInShared) ranks = reinterpret_cast<uint32_t*>(dynamic_shared() + sizeof(SelectShared));
    SelectRow<Score, kInShared> step{{
        p,
        *reinterpret_cast<SelectShared*>(dynamic_shared()),
        ranks,
        static_cast<const Score*>(p.scores) + request * p.request_stride +
            first_head * p.head_stride + first * p.page_stride,
        p.forced == nullptr
            ? nullptr
            : p.forced + request * p.forced_request_stride + first * p.forced_page_stride,
        p.rest == nullptr
            ? nullptr
            : p.rest + request * p.rest_request_stride + first_head * p.rest_head_stride,
        max(1, p.heads / p.out_heads),
        block,
        min(each, count - first)}};
    const bool invalid = step.rank_pages();
    if (invalid && threadIdx.x == 0 && p.invalid_scores != nullptr) {
      atomicAdd(p.invalid_scores, 1ull);
    }
    if (p.max_pages > 0) length = step.write(step.find_cut(p.max_pages), first, left_out, pages);
    cluster_sync();  // No block reads the shared memory of another one any more.
  }
  if (!is_last) return;
  for (int32_t i = length + static_cast<int32_t>(threadIdx.x); i < p.max_pages;
       i += num_threads()) {
    pages[i] = -1;
  }
  if (threadIdx.x == 0) p.lengths[row] = length;
}

}  // namespace hisparse
