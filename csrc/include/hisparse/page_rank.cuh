// What select makes of scores: a number of any dtype as float32, its rank, and its share in the softmax
// of its head; then the ranks of a block's pages, and how many there are of each first digit.
#pragma once

#include "hisparse/block.cuh"

#include <cfloat>
#include <cmath>

namespace hisparse {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(BFloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
__device__ inline float to_float(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, digits = (x.bits & 0x7fffu) << 13;
  // The product moves the exponent to float32's bias, and makes a number of a subnormal one.
  const uint32_t number = __float_as_uint(__uint_as_float(digits) * 0x1p112f);
  return __uint_as_float(sign | ((x.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u | digits : number));
}

__device__ inline bool is_invalid(float score) { return !(score <= FLT_MAX); }

// NaN as -inf, and inf as the largest number, so that a difference of scores is no NaN.
__device__ inline float finite(float score) {
  return score == score ? fminf(score, FLT_MAX) : -INFINITY;
}

// The rank of a forced page: that of inf, which no score has.
constexpr uint32_t kForcedRank = 0xff800000u;

__device__ inline uint32_t rank_of(float score) {
  // The sum makes -0 a 0. Negative floats have integers in the opposite order.
  const uint32_t bits = __float_as_uint(fmaxf(score, -FLT_MAX) + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The sum of exp(score - top) over some scores of a head, the largest of which is `top`.
struct Mass {
  float top = -INFINITY, total = 0.0f;

  // -inf everywhere: there is no maximum to subtract.
  __device__ static float subtracted(float top) { return top == -INFINITY ? 0.0f : top; }

  __device__ void add(const Mass& other) {
    const float highest = fmaxf(top, other.top), base = subtracted(highest);
    total = total * expf(top - base) + other.total * expf(other.top - base);
    top = highest;
  }

  // Adds the masses of a warp's lanes; all of them get the sum.
  __device__ void add_lanes() {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      Mass other;
      other.top = __shfl_xor_sync(kAllLanes, top, distance);
      other.total = __shfl_xor_sync(kAllLanes, total, distance);
      add(other);
    }
  }
};

// A page's share of a head's softmax is exp(score - base) * scale.
struct Shares {
  float base, scale;
};

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
  int32_t blocks;  // of a cluster
  bool drop_last;
};

constexpr int kRankBits = 32;
constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
// Blocks of a cluster on any GPU that has clusters. They read fewer counts of each other, more often.
constexpr int kMaxCluster = 8;
constexpr int kClusterDigitBits = 8;
// Heads whose softmax the blocks compute between two barriers.
constexpr int kVoters = 8;

// Ranks that are counted, in all blocks and in those before this one.
struct Counted {
  int32_t all = 0, before = 0;

  __device__ void add(const Counted& other) {
    all += other.all;
    before += other.before;
  }
};

struct SelectShared {
  int32_t counts[2][kDigits];  // by turn
  Mass masses[kVoters][kMaxWarps];
  Mass block_masses[2][kVoters];  // by turn
  Shares shares[kVoters];
  Counted warp_counts[kMaxWarps];
  int32_t totals[BlockRank::kTotals], tie_totals[BlockRank::kTotals];
  Counted above, inside;
  int32_t digit;
  int32_t invalid;  // A thread saw an invalid score.
  int32_t unused[2];  // The ranks behind it begin at a multiple of 16 bytes.
};

// Pages of each block of a cluster, but for the last ones.
__host__ __device__ inline int32_t pages_of_block(int32_t pages, int32_t blocks) {
  return (pages + blocks * kWarp - 1) / (blocks * kWarp) * kWarp;
}

// This block's part of a selection, whose pages are numbered from 0 here. Every method is called by all
// threads of the cluster.
template <typename Score, bool kInShared>
struct RankedPages {
  const SelectParams& p;
  SelectShared& shared;
  uint32_t* ranks;      // [count], or null: the ranks of a single head are read from its scores
  const Score* scores;  // of the first head and the first page of the part
  const bool* forced;   // the same; null: no page is
  const float* rest;    // of the first head, or null
  int32_t voters;       // heads that share the selection
  int32_t block;        // number in the cluster
  int32_t count;        // pages of the part

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

  __device__ int digit_bits() const { return p.blocks > 1 ? kClusterDigitBits : kDigitBits; }

  __device__ void clear_counts(int turn) {
    const int32_t digits = 1 << digit_bits();
    for (int32_t i = threadIdx.x; i < digits; i += num_threads()) shared.counts[turn][i] = 0;
    __syncthreads();  // The counts are 0.
  }

  // All lanes call it. Lanes that agree with the first one count together, for the shares of many
  // pages may be 0; where none counts, as for the last digits of most pages, little is done.
  __device__ void count_digit(int turn, bool counted, uint32_t digit) {
    const unsigned counting = __ballot_sync(kAllLanes, counted);
    if (counting == 0) return;
    const int leader = __ffs(static_cast<int>(counting)) - 1;
    const uint32_t first = __shfl_sync(kAllLanes, digit, leader);
    const unsigned same = __ballot_sync(kAllLanes, counted && digit == first);
    if (counted && digit != first) atomicAdd(&shared.counts[turn][digit], 1);
    if (lane_id() == leader) atomicAdd(&shared.counts[turn][first], __popc(same));
  }

  __device__ void keep_rank(int32_t page, uint32_t rank) {
    if (page < count && keeps_ranks()) ranks[page] = rank;
    count_digit(0, page < count, rank >> (kRankBits - digit_bits()));
  }

  // Ranks the pages and counts their first digits. Returns whether one of the selection's scores was
  // invalid, in the first warp of the first block.
  __device__ bool rank_pages() {
    if (threadIdx.x == 0) shared.invalid = 0;
    clear_counts(0);
    const bool invalid = voters > 1 ? rank_together() : rank_alone();
    if (invalid) atomicOr(&shared.invalid, 1);
    cluster_sync();  // The first digits are counted.
    if (block != 0 || warp_id() != 0) return false;
    return __any_sync(kAllLanes, lane_id() < p.blocks && of_block(shared.invalid, lane_id()) != 0);
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
    for (int32_t head = 0, turn = 0; head < voters; head += kVoters, turn ^= 1) {
      const int32_t heads = min(kVoters, voters - head);
      for (int32_t h = 0; h < heads; ++h) invalid |= weigh(head + h, shared.masses[h][warp_id()]);
      __syncthreads();  // Each warp's part of each head's mass is there.
      for (int32_t h = warp_id(); h < heads; h += num_threads() / kWarp) {
        Mass mass;
        if (lane_id() < num_threads() / kWarp) mass = shared.masses[h][lane_id()];
        mass.add_lanes();
        if (lane_id() == 0) shared.block_masses[turn][h] = mass;
      }
      cluster_sync();  // Each block's part is there.
      for (int32_t h = warp_id(); h < heads; h += num_threads() / kWarp) {
        invalid |= find_shares(head + h, shared.block_masses[turn][h], shared.shares[h]);
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

  // From the blocks' parts and the head's rest. One warp calls it.
  __device__ bool find_shares(int32_t head, const Mass& part, Shares& out) {
    Mass mass;
    if (lane_id() < p.blocks) {
      mass.top = of_block(part.top, lane_id());
      mass.total = of_block(part.total, lane_id());
    }
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
};

}  // namespace hisparse
