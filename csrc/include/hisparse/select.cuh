// select on the device, for selections of fixed length: one block per request and head of the
// selection.
//
// A page's rank is its score as an integer of the same order. The score is that of the only head,
// or the sum of the shares that the page has in the softmax of each of several heads. The block
// counts the ranks' digits, 11 bits at a time, until it knows the rank of the last page that is
// taken. Then it writes the pages of that rank or a higher one, in ascending order.
#pragma once

#include "hisparse/page_rank.cuh"

namespace hisparse {

struct SelectParams {
  const void* scores;                  // [B, heads, P], of the kernel's type
  const bool* forced;                  // [B, P], or null: no page is
  const float* rest;                   // [B, heads], or null: -inf for each
  const int32_t* num_pages;            // [B]
  int32_t* pages;                      // [B, H, K]
  int32_t* lengths;                    // [B, H]
  unsigned long long* invalid_scores;  // [1], or null: selections with a score that is NaN or +inf
  uint32_t* scratch;                   // [B, H, P] for ranks, or null
  int64_t request_stride, head_stride, page_stride;  // of the scores, in elements
  int64_t forced_request_stride, forced_page_stride, rest_request_stride, rest_head_stride;
  int32_t heads, out_heads, width, max_pages;
  bool drop_last;
};

constexpr int kRankBits = 32;
constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
// Heads whose softmax the block computes between two barriers.
constexpr int kVoters = 8;

struct SelectShared {
  int32_t counts[kDigits];
  Mass masses[kVoters][kMaxWarps];
  Shares shares[kVoters];
  int32_t warp_counts[kMaxWarps];
  int32_t totals[BlockRank::kTotals], tie_totals[BlockRank::kTotals];
  int32_t digit, above, inside;
  int32_t unused;  // The ranks behind it begin at a multiple of 16 bytes.
};

// Which pages are taken: those with rank >> shift above `least`, and the first `ties` of those where
// it equals `least`.
struct Cut {
  int shift;
  uint32_t least;
  int32_t ties;
  bool all_ties;  // There are no more of them.
};

// The sum over this lane and those below it.
__device__ inline int32_t sum_to_here(int32_t value) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int32_t lower = __shfl_up_sync(kAllLanes, value, distance);
    if (lane_id() >= distance) value += lower;
  }
  return value;
}

// One selection. Every method is called by all threads.
template <typename Score, bool kInShared>
struct SelectRow {
  const SelectParams& p;
  SelectShared& shared;
  uint32_t* ranks;       // [P], or null: the ranks of a single head are read from its scores
  const Score* scores;   // of the first head
  const bool* forced;    // null: no page is
  const float* rest;     // of the first head, or null
  int32_t voters;        // heads that share the selection
  int32_t count;         // pages of the request

  __device__ float score(int32_t head, int32_t page) const {
    return to_float(scores[head * p.head_stride + page * p.page_stride]);
  }
  __device__ bool is_forced(int32_t page) const {
    return forced != nullptr && forced[page * p.forced_page_stride];
  }
  __device__ bool keeps_ranks() const { return kInShared || ranks != nullptr; }
  __device__ uint32_t rank_at(int32_t page) const {
    if (keeps_ranks()) return ranks[page];
    return is_forced(page) ? kForcedRank : rank_of(finite(score(0, page)));
  }

  __device__ void clear_counts() {
    for (int32_t i = threadIdx.x; i < kDigits; i += num_threads()) shared.counts[i] = 0;
    __syncthreads();  // The counts are 0.
  }

  // All lanes call it. Lanes that agree with the first one count together, for the shares of many
  // pages may be 0.
  __device__ void count_digit(bool counted, uint32_t digit) {
    const uint32_t first = __shfl_sync(kAllLanes, digit, 0);
    const unsigned same = __ballot_sync(kAllLanes, counted && digit == first);
    if (counted && digit != first) atomicAdd(&shared.counts[digit], 1);
    if (lane_id() == 0 && same != 0) atomicAdd(&shared.counts[first], __popc(same));
  }

  __device__ void keep_rank(int32_t page, uint32_t rank) {
    if (page < count && keeps_ranks()) ranks[page] = rank;
    count_digit(page < count, rank >> (kRankBits - kDigitBits));
  }

  // Ranks the pages by the scores of one head. Returns true in a thread that saw an invalid score.
  __device__ bool rank_alone() {
    bool invalid = false;
    for (int32_t base = 0; base < count; base += tile_size()) {
      float found[kItems];
      bool first[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int32_t page = base + tile_index(j);
        found[j] = page < count ? score(0, page) : 0.0f;
        first[j] = page < count && is_forced(page);
      }
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        invalid |= is_invalid(found[j]);
        keep_rank(base + tile_index(j), first[j] ? kForcedRank : rank_of(finite(found[j])));
      }
    }
    return invalid;
  }

  // Ranks the pages by the sum of their shares. Returns true in a thread that saw an invalid score.
  __device__ bool rank_together() {
    bool invalid = false;
    for (int32_t head = 0; head < voters; head += kVoters) {
      const int32_t heads = min(kVoters, voters - head);
      for (int32_t h = 0; h < heads; ++h) invalid |= weigh(head + h, shared.masses[h][warp_id()]);
      __syncthreads();  // Each warp's part of each head's mass is there.
      for (int32_t h = warp_id(); h < heads; h += num_threads() / kWarp) {
        invalid |= find_shares(head + h, shared.masses[h], shared.shares[h]);
      }
      __syncthreads();  // The heads' shares are known.
      add_shares(head, heads);
    }
    return invalid;
  }

  // This warp's part of a head's mass.
  __device__ bool weigh(int32_t head, Mass& out) {
    bool invalid = false;
    Mass mass;
    for (int32_t base = 0; base < count; base += tile_size()) {
      float found[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int32_t page = base + tile_index(j);
        found[j] = page < count ? score(head, page) : -INFINITY;
      }
      float top = mass.top;
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        invalid |= is_invalid(found[j]);
        found[j] = finite(found[j]);
        top = fmaxf(top, found[j]);
      }
      const float subtracted = Mass::subtracted(top);
      mass.total *= expf(mass.top - subtracted);
#pragma unroll
      for (int j = 0; j < kItems; ++j) mass.total += expf(found[j] - subtracted);
      mass.top = top;
    }
    mass.add_lanes();
    if (lane_id() == 0) out = mass;
    return invalid;
  }

  // From the warps' parts and the head's rest. One warp calls it.
  __device__ bool find_shares(int32_t head, const Mass* parts, Shares& out) {
    Mass mass;
    if (lane_id() < num_threads() / kWarp) mass = parts[lane_id()];
    mass.add_lanes();
    const float beside = rest == nullptr ? -INFINITY : rest[head * p.rest_head_stride];
    Mass of_rest;
    of_rest.top = finite(beside);
    of_rest.total = 1.0f;
    mass.add(of_rest);
    if (lane_id() == 0) {
      out.base = Mass::subtracted(mass.top);
      out.scale = 1.0f / (mass.total > 0.0f ? mass.total : 1.0f);
    }
    return is_invalid(beside);
  }

  // Adds the shares of `heads` heads; after the last head the sums become ranks.
  __device__ void add_shares(int32_t head, int32_t heads) {
    const bool begins = head == 0, ends = head + heads == voters;
    for (int32_t base = 0; base < count; base += tile_size()) {
      float sum[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int32_t page = base + tile_index(j);
        sum[j] = begins || page >= count ? 0.0f : __uint_as_float(ranks[page]);
      }
      for (int32_t h = 0; h < heads; ++h) {
        const Shares shares = shared.shares[h];
        float found[kItems];
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
          const int32_t page = base + tile_index(j);
          found[j] = page < count ? score(head + h, page) : -INFINITY;
        }
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
          sum[j] += expf(finite(found[j]) - shares.base) * shares.scale;
        }
      }
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int32_t page = base + tile_index(j);
        if (ends) {
          keep_rank(page, page < count && is_forced(page) ? kForcedRank : rank_of(sum[j]));
        } else if (page < count) {
          ranks[page] = __float_as_uint(sum[j]);
        }
      }
    }
  }

  // Finds the digit of the `wanted`-th rank from the top, among the ranks that are counted.
  __device__ void find_digit(int32_t wanted) {
    const int32_t each = (kDigits + num_threads() - 1) / num_threads();
    // Threads take digits from the highest down.
    const int32_t highest = kDigits - 1 - static_cast<int32_t>(threadIdx.x) * each;
    int32_t own = 0;
    for (int32_t digit = highest; digit > highest - each && digit >= 0; --digit) {
      own += shared.counts[digit];
    }
    const int32_t in_warp = sum_to_here(own);
    if (lane_id() == kWarp - 1) shared.warp_counts[warp_id()] = in_warp;
    __syncthreads();  // Each warp's count is there.
    const int32_t of_warp = lane_id() < num_threads() / kWarp ? shared.warp_counts[lane_id()] : 0;
    const int32_t before = __shfl_sync(kAllLanes, sum_to_here(of_warp) - of_warp, warp_id());
    int32_t above = before + in_warp - own;
    if (above < wanted && wanted <= above + own) {
      int32_t digit = highest;
      while (above + shared.counts[digit] < wanted) above += shared.counts[digit--];
      shared.digit = digit;
      shared.above = above;
      shared.inside = shared.counts[digit];
    }
    __syncthreads();  // The digit is known.
  }

  // The first digits are counted. `wanted` is at least 1 and at most the number of pages.
  __device__ Cut find_cut(int32_t wanted) {
    Cut cut{kRankBits, 0u, wanted, false};
    for (int bits = kDigitBits;; bits = min(kDigitBits, cut.shift)) {
      if (cut.shift < kRankBits) {
        clear_counts();
        count_next_digit(cut, bits);
      }
      cut.shift -= bits;
      find_digit(cut.ties);
      cut.least = cut.least << bits | static_cast<uint32_t>(shared.digit);
      cut.ties -= shared.above;
      cut.all_ties = cut.ties == shared.inside;
      if (cut.all_ties || cut.shift == 0) return cut;
    }
  }

  // Counts the digit behind those of the cut, of the pages that share them.
  __device__ void count_next_digit(const Cut& cut, int bits) {
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
        count_digit(counted, rank[j] >> (cut.shift - bits) & ((1u << bits) - 1u));
      }
    }
    __syncthreads();  // The digits are counted.
  }

  // Writes the pages that the cut takes, except `left_out`; returns how many.
  __device__ int32_t write(const Cut& cut, int32_t left_out, int32_t* pages) {
    BlockRank taken(shared.totals), tied(shared.tie_totals);
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
        for (int j = 0; j < kItems; ++j) ties[j] &= at[j] < cut.ties;
      }
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        takes[j] = (takes[j] || ties[j]) && base + tile_index(j) != left_out;
      }
      taken(takes, at);
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        if (takes[j]) pages[at[j]] = base + tile_index(j);
      }
    }
    return taken.count();
  }
};

template <typename Score, bool kInShared>
__global__ void __launch_bounds__(kMaxThreads, 1)
    select_kernel(const __grid_constant__ SelectParams p) {
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t request = row / p.out_heads, head = row % p.out_heads;
  const int32_t count = max(0, min(p.num_pages[request], p.width));
  const int32_t left_out = p.drop_last ? count - 1 : -1;
  int32_t* pages = p.pages + static_cast<int64_t>(row) * p.max_pages;
  int32_t length = 0;
  if (count <= p.max_pages) {
    length = count - (left_out >= 0);
    for (int32_t i = threadIdx.x; i < length; i += num_threads()) pages[i] = i;
  } else {
    // Fewer heads score than select: the heads of a group share their scores.
    const int32_t first = static_cast<int32_t>(int64_t{head} * p.heads / p.out_heads);
    SelectShared& shared = *reinterpret_cast<SelectShared*>(dynamic_shared());
    uint32_t* ranks = p.scratch;
    if (ranks != nullptr) ranks += static_cast<int64_t>(row) * p.width;
    if (kInShared) ranks = reinterpret_cast<uint32_t*>(dynamic_shared() + sizeof(SelectShared));
    SelectRow<Score, kInShared> step{
        p,
        shared,
        ranks,
        static_cast<const Score*>(p.scores) + request * p.request_stride + first * p.head_stride,
        p.forced == nullptr ? nullptr : p.forced + request * p.forced_request_stride,
        p.rest == nullptr
            ? nullptr
            : p.rest + request * p.rest_request_stride + first * p.rest_head_stride,
        max(1, p.heads / p.out_heads),
        count};
    step.clear_counts();
    const bool invalid = step.voters > 1 ? step.rank_together() : step.rank_alone();
    // A barrier: the first digits are counted.
    const bool spoilt = __syncthreads_or(invalid);
    if (spoilt && threadIdx.x == 0 && p.invalid_scores != nullptr) {
      atomicAdd(p.invalid_scores, 1ull);
    }
    if (p.max_pages > 0) length = step.write(step.find_cut(p.max_pages), left_out, pages);
  }
  for (int32_t i = length + static_cast<int32_t>(threadIdx.x); i < p.max_pages;
       i += num_threads()) {
    pages[i] = -1;
  }
  if (threadIdx.x == 0) p.lengths[row] = length;
}

}  // namespace hisparse
