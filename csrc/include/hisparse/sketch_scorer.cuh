// The scores of a warp in sketch_score: it scores sixteen pages of a KV head at a time, for up to
// sixteen of its queries.
//
// Everything is a product of matrices of float16 numbers, with queries as the columns of the right
// one. The pages' bases are the rows of a left one. Then the tokens of a page, or of a pair of pages
// where four queries leave room for two of them, are the rows of a left one, their codes its numbers;
// and the queries' detailed channels are multiplied by the channels' scales. A code is two bits that
// are used where they are: as a subnormal float16 number, which tensor cores take exactly
// (https://doi.org/10.7717/peerj-cs.330). That leaves a power of four in a token's row, which its
// logits make good. A code stands for 1.5 less than itself, so -1.5 is multiplied, too.
#pragma once

#include "hisparse/block.cuh"
#include "hisparse/page_rank.cuh"
#include "hisparse/sketch_params.cuh"

namespace hisparse {

// With g = lane / 4 and t = lane % 4, a lane has columns 2t and 2t + 1 of each tile of eight: queries of
// pages g and g + 8; or of one page of pair g, which is also of half g / 2 % 2 of a batch.
template <typename Layout, int kQueries, int kParts>
struct SketchScorer {
  static constexpr int kTiles = (kQueries + kTileQueries - 1) / kTileQueries;
  static constexpr int kPack = kQueries < kTileQueries ? 2 : 1;  // pages that share a product
  static constexpr int kUnits = 4 / kPack;                       // products of four pages
  static constexpr int kPages = 2 / kPack;                       // pages of which a lane has scores
  static constexpr int kShare = 4 / kPack;                       // lanes that share a page's channels

  // What is known of a batch: products of bases with the queries, times 2^-6, less the factors; and
  // log2 of the pages' summed weights.
  struct Batch {
    float bases[kTiles][4], weights[kPages][kTiles][2];
  };

  const SketchScoreParams& p;
  const Layout of_layout;
  const char* queries;       // shared, this lane's copy
  float factors[kTiles][2];  // from a query in shared memory to an exponent of two

  __device__ static int32_t g() { return lane_id() / 4; }
  __device__ static int32_t t() { return lane_id() % 4; }
  __device__ SketchLayout layout() const { return of_layout.get(); }
  __device__ SketchScoreShared sizes() const {
    return score_shared<Layout, kQueries, kParts>(layout());
  }
  // Whether codes and scales can be read as whole words, in any order.
  __device__ bool aligned() const {
    return layout().dim % 16 == 0 && layout().code_bytes() % 4 == 0 &&
           layout().channel_scales() % 8 == 0;
  }
  // The query of a column of this lane.
  __device__ static int32_t query_of(int tile, int column) {
    return tile * kTileQueries + (2 * t() + column) % kQueries;
  }
  // Page `i` of a batch of which this lane has scores.
  __device__ static int32_t page_of(int i) {
    if constexpr (kPack == 1) return g() + 8 * i;
    return g() / 2 % 2 * kHalf + g() / 4 * 4 + t() / 2 * 2 + g() % 2;
  }

  __device__ void read_factors(const float* shared) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) factors[i / 2][i % 2] = shared[query_of(i / 2, i % 2)];
  }

  // The row of shared memory with the queries' numbers in a channel.
  __device__ const char* row_of(int32_t channel, int part = 0) const {
    return queries + part * sizes().part_bytes() + channel * sizes().row_stride();
  }

  // Row g + 8i of the left factor that has the bases is of this page. Those of a pair are rows g and
  // g + 8, in an order in which no two rows begin in the same banks.
  __device__ const uint8_t* base_row(const uint8_t* first, const uint8_t* second, int i) const {
    const int32_t half = kPack == 1 ? i : g() / 2 % 2;
    const int32_t page = kPack == 1 ? g() : g() / 4 * 4 + (i ^ half) * 2 + g() % 2;
    return (half == 0 ? first : second) + page * sizes().sketch_stride();
  }

  // Products of the bases of 16 pages with the queries, from the batch's two halves.
  __device__ void add_bases(const uint8_t* first, const uint8_t* second, Batch& batch) const {
    const int32_t each = sizes().blocks_of_lane();
    // This lane's row of a matrix: channels lie as the lanes' pairs of bytes do. So that reads are of
    // different banks, lanes of odd t take every two blocks the other way around; and without copies
    // of the rows lane t takes pair i ^ t of its block as its i-th one.
    const int32_t row = lane_id() % 8, matrix = lane_id() / 8;
    const auto block_of = [&](int32_t lane, int32_t j) {
      const int32_t odd = each % 2 == 0 ? lane % 2 : 0;
      return lane * each + (j % 2 == 0 ? j + odd : j - odd);
    };
    const int32_t within = sizes().copies > 1 ? 2 * matrix + row % 2 : row ^ 2 * matrix;
    const uint32_t order = sizes().copies > 1 ? 0x76543210u : 0x76543210u ^ 0x22222222u * t();
    const uint8_t* own[2] = {base_row(first, second, 0), base_row(first, second, 1)};
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) batch.bases[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int32_t j = 0; j < each; ++j) {
      const int32_t block = block_of(t(), j);
      const bool there = 4 * each == layout().blocks() || block < layout().blocks();
      uint32_t a[2][4];  // of two pairs of channels of the block each
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 values =
            there ? *reinterpret_cast<const uint2*>(own[i] + kBlock * block) : uint2{0, 0};
        const uint32_t code = there ? own[i][layout().block_scales() + block] : 0u;
        const uint32_t scale = multiply_halves(code * 0x00800080u, 0x10001000u);  // 2^-11
        const uint32_t zero = multiply_halves(scale, 0xe480e480u);                      // -1152
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          // A byte after 0x64 is 1024 more than itself.
          const uint32_t word = sizes().copies > 1
                                    ? (step == 0 ? values.x : values.y)
                                    : permute_bytes(values.x, values.y, order >> 16 * step);
          const uint32_t bytes = word ^ 0x80808080u;
          a[step][i] =
              multiply_add_halves(permute_bytes(bytes, 0x64646464u, 0x4140), scale, zero);
          a[step][i + 2] =
              multiply_add_halves(permute_bytes(bytes, 0x64646464u, 0x4342), scale, zero);
        }
      }
      const int32_t channel = kBlock * block_of(row / 2, j) + within;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          uint32_t b[4];
          load_matrices(b, row_of(channel, part) + tile * sizes().tile_bytes());
          multiply_add(batch.bases[tile], a[0], b[0], b[1]);
          multiply_add(batch.bases[tile], a[1], b[2], b[3]);
        }
      }
    }
  }

  // The row of a detailed channel of a page; of zeros for a slot beyond the last.
  __device__ const char* row_of_slot(const uint8_t* sketch, int32_t slot) const {
    const SketchLayout l = layout();
    const uint8_t* at = sketch + l.channels() + slot * l.channel_width();
    int32_t channel = sizes().rows() - 1;
    if (slot < l.num_channels) {
      // Memory that no sketch was written to may have other numbers.
      channel = min(channel, l.channel_width() == 1 ? *at : *reinterpret_cast<const uint16_t*>(at));
    }
    return row_of(channel);
  }

  // The codes of one channel for the tokens of a word; any beyond the last, where queries are 0.
  __device__ uint32_t codes_of(const uint8_t* sketch, int32_t slot, int32_t word) const {
    const SketchLayout l = layout();
    slot = min(slot, l.num_channels - 1);
    const uint8_t* at = sketch + l.dim + slot * l.code_bytes() + 4 * word;
    if (aligned()) return *reinterpret_cast<const uint32_t*>(at);
    uint32_t out = 0;
    for (int32_t b = 0; b < 4 && 4 * word + b < l.code_bytes(); ++b) {
      out |= uint32_t{at[b]} << 8 * b;
    }
    return out;
  }

  // A lane's channels of one product, two in each matrix: codes of the tokens of a word; and bytes of
  // scales, 0 beyond the last. `whole`: no channel is beyond the last.
  template <int kCount>
  __device__ void read_channels(const uint8_t* sketch, int32_t slot, int32_t word, bool whole,
                                uint32_t (&codes)[kCount], uint32_t& scales) const {
    const SketchLayout l = layout();
    const uint8_t* at = sketch + l.channel_scales() + slot;
    const uint8_t* own = sketch + l.dim + 4 * slot;
    whole &= aligned();
    if (whole && kCount == 4) {
      scales = *reinterpret_cast<const uint32_t*>(at);
    } else if (whole) {
      scales = *reinterpret_cast<const uint16_t*>(at);
    } else {
      scales = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        scales |= (slot + i < l.num_channels ? uint32_t{at[i]} : 0u) << 8 * i;
      }
    }
    if constexpr (kCount == 4) {
      if (whole && l.code_bytes() == 4) {
        const uint4 read = *reinterpret_cast<const uint4*>(own);
        codes[0] = read.x, codes[1] = read.y, codes[2] = read.z, codes[3] = read.w;
        return;
      }
    } else if (whole && l.code_bytes() == 4) {
      const uint2 read = *reinterpret_cast<const uint2*>(own);
      codes[0] = read.x, codes[1] = read.y;
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) codes[i] = codes_of(sketch, slot + i, word);
  }

  // Of four pages: products of codes and queries, of the tokens of a word, less their rows' powers of
  // four. Rows g and g + 8 are tokens 2g and 2g + 1.
  using Sums = float[kUnits][kTiles][4];

  // Channels `first` to first + 8 * kEights - 1 of four pages, every other one from `sketches` on.
  template <int kEights>
  __device__ void add_channels(const uint8_t* sketches, int32_t first, int32_t word,
                               Sums& sums) const {
    constexpr int kMatrices = kEights * kPack;  // of a product
    const int32_t apart = 2 * sizes().sketch_stride(), row = lane_id() % 8;
    uint32_t b[kTiles][kEights][4];
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      const int32_t matrix = 4 * e + lane_id() / 8;
      const int32_t page = matrix / kMatrices * kPack + row / 2 / kShare;
      const int32_t slot =
          2 * (row / 2 % kShare * kMatrices + matrix % kMatrices) + row % 2 + first;
      const char* channel = row_of_slot(sketches + page * apart, slot);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        load_matrices(b[tile][e], channel + tile * sizes().tile_bytes());
      }
    }
    // Columns of a pair's other page are 0.
    const bool own = kPack == 1 || g() / 4 == t() / 2;
    const uint32_t picks[2] = {own ? 0x1404u : 0x4444u, own ? 0x3424u : 0x4444u};
    const uint32_t zeros[4] = {code_zero(0), code_zero(1), code_zero(0), code_zero(1)};
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const uint8_t* sketch = sketches + (unit * kPack + t() / kShare) * apart;
      const int32_t slot = first + t() % kShare * 2 * kMatrices;
      uint32_t codes[2 * kMatrices], scales, a[4];
      read_channels(sketch, slot, word, first + kMatrix * kEights <= layout().num_channels, codes,
                    scales);
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        // As float16 numbers, times 2^5. Codes below 8 stand for scales under 2^-19: they become less.
        const uint32_t scale = permute_bytes(scales, 0u, picks[m]) >> 1;
        const int at = unit * kMatrices + m;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          b[tile][at / 4][at % 4] = multiply_halves(b[tile][at / 4][at % 4], scale);
        }
        const uint32_t pair = permute_bytes(codes[2 * m], codes[2 * m + 1], code_bytes());
        a[2 * m] = pair & code_mask(0);
        a[2 * m + 1] = pair & code_mask(1);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int at = unit * kMatrices, next = at + kMatrices - 1;
        const uint32_t b0 = b[tile][at / 4][at % 4], b1 = b[tile][next / 4][next % 4];
        if constexpr (kMatrices == 2) {
          multiply_add(sums[unit][tile], zeros, b0, b1);
          multiply_add(sums[unit][tile], a, b0, b1);
        } else {
          multiply_add(sums[unit][tile], zeros, b0);
          multiply_add(sums[unit][tile], a, b0);
        }
      }
    }
  }

  // Sums of weights of this lane's tokens, of four pages: every other one from `sketches` on.
  __device__ void add_weights(const uint8_t* sketches, float (&totals)[kUnits][kTiles][2]) const {
    const SketchLayout l = layout();
    // Products of two matrices, as long as there are channels for them.
    const int32_t whole = kPack == 2 ? 0 : l.num_channels / (2 * kMatrix) * (2 * kMatrix);
#pragma unroll 1
    for (int32_t word = 0; 4 * word < l.code_bytes(); ++word) {
      Sums sums{};
#pragma unroll kUnroll<Layout>
      for (int32_t slot = 0; slot < whole; slot += 2 * kMatrix) {
        add_channels<2 / kPack>(sketches, slot, word, sums);
      }
#pragma unroll kUnroll<Layout>
      for (int32_t slot = whole; slot < sizes().slots(); slot += kMatrix) {
        add_channels<1>(sketches, slot, word, sums);
      }
#pragma unroll
      for (int i = 0; i < 2 * kTiles * kUnits; ++i) {
        const int unit = i / (2 * kTiles), tile = i / 2 % kTiles, column = i % 2;
        float sum = 0.0f;
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const float weight = power_of_two(sums[unit][tile][2 * second + column] *
                                            (factors[tile][column] * code_power(second)));
          const int32_t token = kWordTokens * word + 2 * g() + second;
          const bool there = l.page_size % kWordTokens == 0 || token < l.page_size;
          sum = second == 0 ? (there ? weight : 0.0f) : sum + (there ? weight : 0.0f);
        }
        float& total = totals[unit][tile][column];
        total = word == 0 ? sum : total + sum;
      }
    }
  }

  // log2 of the sum of a page's weights for one query, however large they are.
  __device__ __noinline__ float add_any(const uint8_t* sketch, int32_t query, float unit) const {
    const SketchLayout l = layout();
    Mass mass;
    for (int32_t token = 0; token < l.page_size; ++token) {
      float sum = 0.0f;
      for (int32_t i = 0; i < l.num_channels; ++i) {
        const uint32_t code = sketch[l.dim + i * l.code_bytes() + token / 4] >> token % 4 * 2 & 3u;
        const uint32_t scale = uint32_t{sketch[l.channel_scales() + i]} + kScaleOffset;
        const auto* q = reinterpret_cast<const Float16*>(
            row_of_slot(sketch, i) + query / kTileQueries * sizes().tile_bytes());
        sum += to_float(q[query % kTileQueries]) * __uint_as_float(scale << 20) *
               (static_cast<float>(code) - 1.5f);
      }
      Mass one;
      one.top = sum * unit * kLn2;
      one.total = 1.0f;
      mass.add(one);
    }
    return (mass.top + logf(mass.total)) * kLog2E;
  }

  // Sums over the lanes of the products' totals: lane g has those of product g / 2, or of pair g / 4, as
  // the first ones at the end.
  __device__ static void add_lanes(float (&totals)[kUnits][kTiles][2]) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int tile = i / 2, column = i % 2;
#pragma unroll
      for (int lanes = 16; lanes >= 4; lanes /= 2) {
        const int distance = kUnits * lanes / 32;
        float& sum = totals[0][tile][column];
        if (distance == 0) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
#pragma unroll
        for (int unit = 0; unit < distance; ++unit) {
          const bool upper = lane_id() & lanes;
          float &low = totals[unit][tile][column], &high = totals[unit + distance][tile][column];
          low = (upper ? high : low) + __shfl_xor_sync(kAllLanes, upper ? low : high, lanes);
        }
      }
    }
  }

  // log2 of the summed weights of the pages of half `second` of a batch.
  __device__ void find_weights(const uint8_t* half, int32_t second, Batch& batch) const {
    if (layout().num_channels == 0) {
      const float size = log_of_two(static_cast<float>(layout().page_size));
#pragma unroll
      for (int i = 0; i < 2 * kTiles * kPages; ++i) {
        batch.weights[i / (2 * kTiles)][i / 2 % kTiles][i % 2] = size;
      }
      return;
    }
    float own[kTiles][2] = {};
#pragma unroll 1
    for (int32_t odd = 0; odd < 2; ++odd) {
      float totals[kUnits][kTiles][2];
      add_weights(half + odd * sizes().sketch_stride(), totals);
      add_lanes(totals);
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        if (odd == g() % 2) own[i / 2][i % 2] = totals[0][i / 2][i % 2];
      }
    }
    bool far = false;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const float weight = log_of_two(own[i / 2][i % 2]);
      far |= !(fabsf(weight) <= kFarExponent);  // NaN, too.
      own[i / 2][i % 2] = weight;
    }
    const bool any = __any_sync(kAllLanes, far);
#pragma unroll
    for (int i = 0; i < 2 * kTiles * kPages; ++i) {
      const int page = i / (2 * kTiles), tile = i / 2 % kTiles;
      if (page_of(page) / kHalf != second) continue;
      batch.weights[page][tile][i % 2] =
          any ? add_any(half + page_of(page) % kHalf * sizes().sketch_stride(),
                        query_of(tile, i % 2), factors[tile][i % 2])
              : own[tile][i % 2];
    }
  }

  // Writes the scores of pages `first` to first + 15 of the request. `out` are those of the first query,
  // of `present` ones.
  __device__ void write(int32_t first, int32_t count, const Batch& batch, float* out,
                        int32_t present) const {
    // A pair's pages are rows g and g + 8 in either order: base_row.
    const bool other = (t() / 2 ^ g() / 2 % 2) != 0;
#pragma unroll
    for (int i = 0; i < 2 * kTiles * kPages; ++i) {
      const int index = i % kPages, tile = i / kPages % kTiles, column = i / (kPages * kTiles);
      const int32_t page = first + page_of(index), query = query_of(tile, column);
      const float(&bases)[4] = batch.bases[tile];
      const float base = kPack == 1 ? bases[2 * index + column]
                                    : (other ? bases[2 + column] : bases[column]);
      if (query >= present || page >= count) continue;
      const float score =
          fmaf(base, factors[tile][column] * 64.0f, batch.weights[index][tile][column]);
      out[int64_t{query} * p.width + page] = score * kLn2;
    }
  }
};

}  // namespace hisparse
