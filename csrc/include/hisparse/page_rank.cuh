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

// The score of a rank, which is finite.
__device__ inline float score_of(uint32_t rank) {
  return __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}

// To about 2^-20 near 0, 2^-17 at -80; 0 below 2^-126.
__device__ inline float exp_of(float x) { return power_of_two(x * 1.44269504f); }

// The sum of exp(score - top) over some scores of a head; `top` is the largest of them that is finite.
struct alignas(8) Mass {
  float top = -FLT_MAX, total = 0.0f;

  __device__ void raise(float highest) {
    total *= exp_of(top - highest);
    top = highest;
  }

  __device__ void add(Mass other) {
    const float highest = fmaxf(top, other.top);
    raise(highest);
    other.raise(highest);
    total += other.total;
  }

  __device__ void add(const float (&scores)[kItems]) {
    float highest = top;
#pragma unroll
    for (int j = 0; j < kItems; ++j) highest = fmaxf(highest, scores[j]);
    raise(highest);
#pragma unroll
    for (int j = 0; j < kItems; ++j) total += exp_of(scores[j] - highest);
  }

  // Adds the masses of a warp's lanes; all of them get the sum.
  __device__ void add_lanes() {
    raise(score_of(__reduce_max_sync(kAllLanes, rank_of(top))));
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(kAllLanes, total, distance);
    }
  }
};

// A page's share of a head's softmax is exp(score - base) * scale.
struct Shares {
  float base, scale;
};

struct SelectParams {
  const void* scores;                  // [B, heads, P], of the kernel's type
  const uint8_t* forced;               // [B, P], 0 or 1, or null: no page is
  const float* rest;                   // [B, heads], or null: -inf for each
  const int32_t* num_pages;            // [B]
  int32_t* pages;                      // [B, H, K]
  int32_t* lengths;                    // [B, H]
  unsigned long long* invalid_scores;  // [1], or null: selections with a score that is NaN or +inf
  uint32_t* scratch;                   // [B, H, P] for ranks, or null
  int64_t request_stride, head_stride, page_stride;  // of the scores, in elements
  int64_t forced_request_stride, forced_page_stride, rest_request_stride, rest_head_stride;
  int32_t out_heads, width, max_pages;
  int32_t voters, sharers;  // heads that share a selection; selections that share a head
  int32_t log_blocks;       // of the blocks of a cluster
  float within;             // pages further from their heads' best scores are left out, if kNear
  bool drop_last;
};

constexpr int kRankBits = 32;
// A digit has two halves, each with as many values as a warp has lanes.
constexpr int kHalfBits = 5;
constexpr int kDigitBits = 2 * kHalfBits;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kTurns = (kRankBits + kDigitBits - 1) / kDigitBits;
// Blocks of a cluster on any GPU that has clusters.
constexpr int kMaxCluster = 8;
// Heads whose softmax the blocks compute between two barriers, and those that are read at once.
constexpr int kVoters = 8;
constexpr int kRows = 4;

// Ranks that are counted, in all blocks and in those before this one.
struct Counted {
  int32_t all = 0, before = 0;
};

// Which pages are taken: those with rank >> shift above `least`, and the first `ties` of those where
// it equals `least`.
struct Cut {
  int32_t shift;
  uint32_t least;
  int32_t ties;
  int32_t before, ties_before;  // Pages above `least`, and equal to it, in the blocks before this one.
  bool all_ties;                // There are no more of them.
};

struct SelectShared {
  // Of this block's ranks, by digit and by the first half of the digit.
  int32_t counts[kTurns][kDigits + kWarp];
  Mass masses[2][kVoters][kMaxWarps];  // by turn
  Shares shares[kVoters];
  int32_t totals[BlockRank::kTotals], tie_totals[BlockRank::kTotals];
  Cut cut;
  int32_t invalid;    // A thread saw an invalid score.
  int32_t near;       // Pages of this block that are within the distance, if kNear.

  __device__ void count(int turn, uint32_t digit) {
    atomicAdd(&counts[turn][digit], 1);
    atomicAdd(&counts[turn][kDigits + (digit >> kHalfBits)], 1);
  }
};
static_assert(sizeof(SelectShared) % 16 == 0);

// Pages of each block of a cluster, but for the last ones.
__host__ __device__ inline int32_t pages_of_block(int32_t pages, int32_t log_blocks) {
  return (pages + (kWarp << log_blocks) - 1) / kWarp >> log_blocks << 5;
}

// This block's part of a selection, whose pages are numbered from 0 here. Every method is called by all
// threads of the cluster. With kNear a page's score is the largest distance, 0 or less, that it has from
// the best score of a head.
template <typename Score, bool kInShared, bool kNear>
struct RankedPages {
  const SelectParams& p;
  SelectShared& shared;
  uint32_t* ranks;      // [count], or null: the ranks of a single head are read from its scores
  const Score* scores;  // of the first head and the first page of the part
  const uint8_t* forced;  // the same; null: no page is
  const float* rest;    // of the first head, or null
  int32_t block;        // number in the cluster
  int32_t count;        // pages of the part
  bool invalid = false;  // This thread saw an invalid score.
  int32_t near = 0;      // Pages of this thread that are within the distance.

  __device__ int blocks() const { return 1 << p.log_blocks; }
  __device__ bool keeps_ranks() const { return kInShared || ranks != nullptr; }
  __device__ uint32_t rank_at(int32_t page) const {
    if (keeps_ranks()) return ranks[page];
    if (forced != nullptr && forced[page * p.forced_page_stride]) return kForcedRank;
    return rank_of(finite(to_float(scores[page * p.page_stride])));
  }

  // Each warp has kItems pages per lane of a tile; its loops are over those that begin at `base`.
  __device__ int32_t first_base() const { return warp_id() * kItems * kWarp; }
  __device__ int32_t page_of(int32_t base, int j) const { return base + j * kWarp + lane_id(); }

  // Scores of the pages from `base` in some rows, of which row i begins `between * i` elements after
  // `first` and ends at page `ends[i]`. All of them are under way together.
  __device__ void load(const Score* first, int64_t between, int32_t base,
                       const int32_t (&ends)[kRows], float (&found)[kRows][kItems]) {
    const Score* row = first + page_of(base, 0) * p.page_stride;
#pragma unroll
    for (int i = 0; i < kRows; ++i, row += between) {
      const Score* at = row;
#pragma unroll
      for (int j = 0; j < kItems; ++j, at += kWarp * p.page_stride) {
        found[i][j] = page_of(base, j) < ends[i] ? to_float(*at) : -INFINITY;
      }
    }
  }
  // Of scores as they were loaded.
  __device__ void make_finite(float (&found)[kRows][kItems]) {
    bool spoilt = false;
#pragma unroll
    for (int i = 0; i < kRows * kItems; ++i) spoilt |= is_invalid(found[i / kItems][i % kItems]);
    if (!spoilt) return;
    invalid = true;
#pragma unroll
    for (int i = 0; i < kRows * kItems; ++i) {
      found[i / kItems][i % kItems] = finite(found[i / kItems][i % kItems]);
    }
  }

  // 1 for each of this thread's pages from `base` that is forced. A bool would wait for its load.
  __device__ void load_forced(int32_t base, uint32_t (&found)[kItems]) const {
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int32_t page = page_of(base, j);
      found[j] = 0u;
      if (forced != nullptr && page < count) found[j] = forced[page * p.forced_page_stride];
    }
  }

  // Ranks this thread's pages from `base` by their scores, and counts the first digits.
  __device__ void keep_ranks(int32_t base, const float (&found)[kItems],
                             const uint32_t (&first)[kItems]) {
    uint32_t rank[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) rank[j] = first[j] != 0 ? kForcedRank : rank_of(found[j]);
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int32_t page = page_of(base, j);
      if (page < count) {
        if (keeps_ranks()) ranks[page] = rank[j];
        if (kNear) near += rank[j] >= rank_of(-p.within);
        shared.count(0, rank[j] >> (kRankBits - kDigitBits));
      }
    }
  }

  __device__ void rank_pages() {
    if (kNear || p.voters > 1) {
      rank_together();
    } else {
      __syncthreads();  // The counts are 0.
      rank_alone();
    }
    if (invalid) atomicOr(&shared.invalid, 1);
    if (kNear && near != 0) atomicAdd(&shared.near, near);
  }

  // Ranks the pages by the scores of one head.
  __device__ void rank_alone() {
    for (int32_t base = first_base(); base < count; base += kRows * tile_size()) {
      float found[kRows][kItems];
      int32_t ends[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) ends[i] = count - i * tile_size();
      load(scores, tile_size() * p.page_stride, base, ends, found);
      make_finite(found);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int32_t own = base + i * tile_size();
        if (own >= count) break;
        uint32_t forced_ones[kItems];
        load_forced(own, forced_ones);
        keep_ranks(own, found[i], forced_ones);
      }
    }
  }

  // Ranks the pages by the sum of their shares, or by the largest distance.
  __device__ void rank_together() {
    // Scores stay in registers where this warp has no pages in a second tile.
    const bool stay = p.voters <= kRows && count <= first_base() + tile_size();
    float found[kRows][kItems];
    uint32_t forced_ones[kItems];
    if (stay) load_forced(first_base(), forced_ones);
    for (int32_t head = 0, turn = 0; head < p.voters; head += kVoters, turn ^= 1) {
      // Heads beyond the last one have no share.
      const int32_t heads = min(kVoters, p.voters - head + kRows - 1) / kRows * kRows;
      for (int32_t h = 0; h < heads; h += kRows) {
        Mass masses[kRows];
        const int32_t own = head + h + lane_id();
        float beside = -INFINITY;  // It is used when the scores are there too.
        if (has_rest() && own < p.voters) beside = rest[own * p.rest_head_stride];
        for (int32_t base = first_base(); base < count; base += tile_size()) {
          load_heads(head + h, base, found);
          make_finite(found);
#pragma unroll
          for (int i = 0; i < kRows; ++i) masses[i].add(found[i]);
        }
        if (has_rest()) add_rest(beside, masses);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          masses[i].add_lanes();
          if (lane_id() == 0) shared.masses[turn][h + i][warp_id()] = masses[i];
        }
      }
      cluster_sync();  // Each warp's part of each head's mass is there.
      for (int32_t h = warp_id(); h < heads; h += num_threads() / kWarp) {
        find_shares(shared.masses[turn][h], shared.shares[h]);
      }
      __syncthreads();  // The heads' shares are known.
      for (int32_t base = first_base(); base < count; base += tile_size()) {
        float sum[kItems];
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
          const int32_t page = page_of(base, j);
          constexpr float kNothing = kNear ? -INFINITY : 0.0f;
          sum[j] = head == 0 || page >= count ? kNothing : __uint_as_float(ranks[page]);
        }
        for (int32_t h = 0; h < heads; h += kRows) {
          if (!stay) {
            load_heads(head + h, base, found);
            make_finite(found);
          }
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            const Shares shares = shared.shares[h + i];
#pragma unroll
            for (int j = 0; j < kItems; ++j) {
              const float distance = found[i][j] - shares.base;
              if (kNear) {
                sum[j] = fmaxf(sum[j], distance);
              } else {
                sum[j] += exp_of(distance) * shares.scale;
              }
            }
          }
        }
        if (head + heads >= p.voters) {
          if (!stay) load_forced(base, forced_ones);
          keep_ranks(base, sum, forced_ones);
          continue;
        }
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
          const int32_t page = page_of(base, j);
          if (page < count) ranks[page] = __float_as_uint(sum[j]);
        }
      }
    }
  }

  __device__ void load_heads(int32_t head, int32_t base, float (&found)[kRows][kItems]) {
    int32_t ends[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) ends[i] = head + i < p.voters ? count : 0;
    load(scores + head * p.head_stride, p.head_stride, base, ends, found);
  }

  // The first warp of the cluster has the heads' rest: lane i that of head i of those that are read.
  __device__ bool has_rest() const { return rest != nullptr && block == 0 && warp_id() == 0; }
  __device__ void add_rest(float beside, Mass (&masses)[kRows]) {
    invalid |= is_invalid(beside);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      masses[i].add(Mass{lane_id() == i ? finite(beside) : -INFINITY, 1.0f});
    }
  }

  // From the masses of all warps of all blocks. One warp calls it.
  __device__ void find_shares(const Mass (&of_warps)[kMaxWarps], Shares& out) {
    Mass mass;
    if (lane_id() < num_threads() / kWarp) {
      mass = of_warps[lane_id()];
      if (p.log_blocks > 0) {
        mass.total = 0.0f;
        Mass of[kMaxCluster];
        // Without a branch between them all loads are under way together.
#pragma unroll
        for (int b = 0; b < kMaxCluster; ++b) {
          of[b] = of_block(of_warps[lane_id()], min(b, blocks() - 1));
          mass.top = fmaxf(mass.top, of[b].top);
        }
#pragma unroll
        for (int b = 0; b < kMaxCluster; ++b) {
          of[b].raise(mass.top);
          if (b < blocks()) mass.total += of[b].total;
        }
      }
    }
    mass.add_lanes();
    // The total is 0, or 1 and more.
    if (lane_id() == 0) out = {mass.top, power_of_two(-log_of_two(fmaxf(mass.total, 0.5f)))};
  }
};

}  // namespace hisparse
