// The scores of a warp in sketch_score: it scores sixteen pages of a KV head at a time, for up to
// sixteen of its queries.
//
// Everything is a product of matrices of float16 numbers, with queries as the columns of the right
// one. The pages' bases are the rows of a left one. Then the tokens of a page, or of a pair of pages
// where four queries leave room for two of them, are the rows of a left one, their codes its numbers;
// and the queries' detailed channels are multiplied by the channels' scales. A code stands for 1.5 less
// than itself, so -1.5 is multiplied, too.
#pragma once

#include "hisparse/block.cuh"
#include "hisparse/page_rank.cuh"
#include "hisparse/sketch_lane.cuh"
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

  // The lowest bit of codes in a left factor. Products of -1.5 are sums of their own where a right
  // factor has two pages, so they need no bits below a code's.
  static constexpr int kLow = kPack == 1 ? 2 : 0;
  // -1.5 in place of a code: in rows 0 to 7, and 8 to 15.
  static constexpr uint32_t kZero = 0x80068006u, kUpperZero = 0x80188018u;

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
  // The query of a column of this lane.
  __device__ static int32_t query_of(int tile, int column) {
    return tile * kTileQueries + (2 * t() + column) % kQueries;
  }
  // Of the pages of a right factor, the one of column g.
  __device__ static int32_t own_page() { return kPack == 1 ? 0 : g() / 4; }
  // Page `i` of a batch of which this lane has scores.
  __device__ static int32_t page_of(int i) {
    if constexpr (kPack == 1) return g() + 8 * i;
    return g() / 2 % 2 * kHalf + g() / 4 * 4 + t() / 2 * 2 + g() % 2;
  }

  __device__ void read_factors(const float* shared) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      factors[i / 2][i % 2] = shared[query_of(i / 2, i % 2)] * 0x1p17f;
    }
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
    // different banks without copies of the rows, lane t takes pair i ^ t of its block as its i-th one.
    const int32_t row = lane_id() % 8, matrix = lane_id() / 8;
    const int32_t within = sizes().copies > 1 ? 2 * matrix + row % 2 : row ^ 2 * matrix;
    const uint32_t order = sizes().copies > 1 ? 0x76543210u : 0x76543210u ^ 0x22222222u * t();
    const uint8_t* own[2] = {base_row(first, second, 0), base_row(first, second, 1)};
    uint4 two[2];  // blocks
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) batch.bases[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int32_t j = 0; j < each; ++j) {
      const int32_t block = t() * each + j;
      const bool there = 4 * each == layout().blocks() || block < layout().blocks();
      uint32_t a[2][4];  // of two pairs of channels of the block each
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint8_t* at = own[i] + kBlock * block;
        uint2 values;
        if (Layout::kTokens == 0 || each % 2 == 1) {
          values = *reinterpret_cast<const uint2*>(at);
        } else {
          if (j % 2 == 0) two[i] = *reinterpret_cast<const uint4*>(at);
          values = j % 2 == 0 ? uint2{two[i].x, two[i].y} : uint2{two[i].z, two[i].w};
        }
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
      const int32_t channel = kBlock * (row / 2 * each + j) + within;
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

  // Where the queries' numbers lie for detailed channels of a page, those of row `row` of kEights
  // matrices.
  template <int kEights>
  __device__ void find_rows(const uint8_t* sketch, int32_t first, int32_t row,
                            const char* (&rows)[kEights]) const {
    const SketchLayout l = layout();
    const uint8_t* at = sketch + l.channels();
    if constexpr (kEights == 4) {
      at += (first + row / 2 * 8) * l.channel_width();
      if (l.channel_width() == 1) {
        const auto* words = reinterpret_cast<const uint32_t*>(at);
        const uint2 both = l.channels() % 8 == 0 ? *reinterpret_cast<const uint2*>(at)
                                                 : uint2{words[0], words[1]};
        const uint32_t four = permute_bytes(both.x, both.y, row % 2 == 0 ? 0x6420u : 0x7531u);
#pragma unroll
        for (int e = 0; e < 4; ++e) rows[e] = row_of_byte(four, 8 * e);
        return;
      }
    }
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      const int32_t slot = kEights == 4 ? 2 * e + row % 2 : first + 8 * e + row;
      const uint32_t channel = l.channel_width() == 1
                                   ? at[slot]
                                   : reinterpret_cast<const uint16_t*>(at)[slot];
      // Memory that no sketch was written to may have other numbers.
      rows[e] = row_of(min(channel, sizes().rows() - 1u));
    }
  }

  // The row of the channel that a byte of four numbers has, from bit `bit` on.
  __device__ const char* row_of_byte(uint32_t four, int bit) const {
    const uint32_t stride = sizes().row_stride(), last = sizes().rows() - 1;
    if ((sizes().rows() & last) != 0) return row_of(min(four >> bit & 255u, last));
    // A product with the stride, a power of two, of the bits that number a row.
    const int shift = bit - (stride == kRowBytes ? 4 : 7);
    const uint32_t row = (shift < 0 ? four << -shift : four >> shift) & last * stride;
    return dynamic_shared() + (row | lane_id() % sizes().copies * kRowBytes);
  }

  // Of four pages and a word's tokens: products of codes and queries, less their rows' powers of four;
  // rows g and g + 8 are tokens g and g + 8. And of pages that share a right factor, products of
  // -1.5 with it, in any row.
  struct Sums {
    float products[4][kTiles][4], zeros[kPack == 1 ? 1 : kUnits][kTiles][4];
  };

  // Slots `first` to first + 8 * kEights - 1 of four pages, every other one from `sketches` on.
  template <int kEights>
  __device__ void add_channels(const uint8_t* sketches, int32_t first, int32_t word,
                               Sums& sums) const {
    constexpr int kAtOnce = kEights == 1 ? 1 : 2;  // eights
    const int32_t apart = 2 * sizes().sketch_stride();
    const char* rows[kEights];
    LaneCodes<kEights, kLow> codes[4];
    LaneScales<kEights> scales[kUnits];
    // There are fewer than 2^28 heads, which the compiler does not know: it keeps these registers.
    uint32_t zeros[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) zeros[i] = kZero + (static_cast<uint32_t>(p.heads) >> (28 + i));
    find_rows<kEights>(sketches + lane_id() / 8 * apart, first, lane_id() % 8, rows);
#pragma unroll
    for (int page = 0; page < 4; ++page) {
      codes[page].read(layout(), sketches + page * apart, first, word);
    }
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      scales[unit].read(layout(), sketches + (unit * kPack + own_page()) * apart, first);
    }
#pragma unroll
    for (int e = 0; e < kEights; e += kAtOnce) {
      uint32_t b[2][kTiles][kUnits];
#pragma unroll
      for (int i = 0; i < kAtOnce * kTiles; ++i) {
        const int second = i / kTiles, tile = i % kTiles;
        uint32_t of_pages[4];
        load_matrices(of_pages, rows[e + second] + tile * sizes().tile_bytes());
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          const int page = unit * kPack;
          const uint32_t own = own_page() == 0 ? of_pages[page] : of_pages[page + kPack - 1];
          b[second][tile][unit] = multiply_halves(own, scales[unit].of(e + second));
        }
      }
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        const int page = i / kTiles, tile = i % kTiles, unit = page / kPack;
        const uint32_t b0 = b[0][tile][unit], b1 = b[kAtOnce - 1][tile][unit];
        const auto add = [&](float (&sum)[4], const uint32_t (&a)[4]) {
          if constexpr (kAtOnce == 1) {
            multiply_add(sum, a, b0);
          } else {
            multiply_add(sum, a, b0, b1);
          }
        };
        if (kPack == 1) {
          add(sums.products[page][tile], {kZero, kUpperZero, kZero, kUpperZero});
        } else if (page % kPack == 0) {
          add(sums.zeros[kPack == 1 ? 0 : unit][tile], zeros);
        }
        uint32_t a[4];
        codes[page].expand(e, a[0], a[1]);
        if constexpr (kAtOnce == 2) codes[page].expand(e + 1, a[2], a[3]);
        add(sums.products[page][tile], a);
      }
    }
  }

  // Sums of weights of this lane's tokens, of four pages: every other one from `sketches` on.
  __device__ void add_weights(const uint8_t* sketches, float (&totals)[kUnits][kTiles][2]) const {
    const SketchLayout l = layout();
    const int32_t bytes = l.first_byte(), left = (l.slots() - bytes) / kEight;
#pragma unroll 1
    for (int32_t word = 0; word < l.words(); ++word) {
      Sums sums{};
#pragma unroll kUnroll<Layout>
      for (int32_t first = 0; first < bytes; first += 4 * kEight) {
        add_channels<4>(sketches, first, word, sums);
      }
      if (left >= 2) add_channels<2>(sketches, bytes, word, sums);
      if (left % 2 == 1) add_channels<1>(sketches, l.slots() - kEight, word, sums);
#pragma unroll
      for (int i = 0; i < 2 * kTiles * kUnits; ++i) {
        const int unit = i / (2 * kTiles), tile = i / 2 % kTiles, column = i % 2;
        // Of a right factor's two pages, columns of the other one mean nothing.
        const float(&low)[4] = sums.products[unit * kPack][tile];
        const float(&high)[4] = sums.products[unit * kPack + kPack - 1][tile];
        const float factor = factors[tile][column];
        const float zero =
            kPack == 1 ? 0.0f : sums.zeros[kPack == 1 ? 0 : unit][tile][column] * factor;
        float sum = 0.0f;
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const float product = t() < 2 ? low[2 * second + column] : high[2 * second + column];
          // A code's last bit is 2^(kLow - 24), or four times that in rows from 8 on.
          const float power = factor * (second == 0 ? 4.0f : 1.0f) / (1 << kLow);
          const float weight =
              power_of_two(kPack == 1 ? product * power : fmaf(product, power, zero));
          const int32_t token = kWordTokens * word + g() + 8 * second;
          const bool there = l.page_size % kWordTokens == 0 || token < l.page_size;
          sum = second == 0 ? (there ? weight : 0.0f) : sum + (there ? weight : 0.0f);
        }
        float& total = totals[unit][tile][column];
        total = word == 0 ? sum : total + sum;
      }
    }
  }

  // log2 of the sum of a page's weights for one query, however large they are.
  __device__ static __noinline__ float add_any(Layout of_layout, const char* queries,
                                               const uint8_t* sketch, int32_t query, float unit) {
    const SketchLayout l = of_layout.get();
    const SketchScoreShared sizes = score_shared<Layout, kQueries, kParts>(l);
    Mass mass;
    for (int32_t token = 0; token < l.page_size; ++token) {
      float sum = 0.0f;
      for (int32_t i = 0; i < l.num_channels; ++i) {
        const uint32_t code = l.code_of(sketch, i, token);
        const uint32_t scale = uint32_t{sketch[l.channel_scales() + i]} + kScaleOffset;
        const uint8_t* number = sketch + l.channels() + i * l.channel_width();
        const int32_t channel =
            l.channel_width() == 1 ? *number : *reinterpret_cast<const uint16_t*>(number);
        const auto* q = reinterpret_cast<const Float16*>(
            queries + min(channel, sizes.rows() - 1) * sizes.row_stride() +
            query / kTileQueries * sizes.tile_bytes());
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
          any ? add_any(of_layout, queries, half + page_of(page) % kHalf * sizes().sketch_stride(),
                        query_of(tile, i % 2), factors[tile][i % 2] * 0x1p-17f)
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
          fmaf(base, factors[tile][column] * 0x1p-11f, batch.weights[index][tile][column]);
      out[int64_t{query} * p.width + page] = score * kLn2;
    }
  }
};

}  // namespace hisparse
