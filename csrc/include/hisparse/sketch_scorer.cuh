// The scores of a warp in sketch_score: it scores sixteen pages of a KV head at a time, for up to
// sixteen of its queries.
//
// Everything is a product of matrices of float16 numbers, with queries as the columns of the right
// one. The pages' bases are the rows of a left one. Then, page by page, the tokens' codes are the
// rows of a left one, and the queries' detailed channels are multiplied by the channels' scales. A
// code is two bits that are used where they are: as a subnormal float16 number, which tensor cores
// take exactly (https://doi.org/10.7717/peerj-cs.330). That leaves a power of four in a token's row,
// which its logits make good.
#pragma once

#include "hisparse/block.cuh"
#include "hisparse/page_rank.cuh"
#include "hisparse/sketch_params.cuh"

namespace hisparse {

// One warp's pages. With g = lane / 4 and t = lane % 4, a lane has the scores of pages g and g + 8
// for queries 2t and 2t + 1 of each tile of eight.
template <typename Layout, int kTiles, int kParts>
struct SketchScorer {
  static constexpr int kQueries = kTiles * kTileQueries;
  // Where there are many channels, reads of all of them at once would take too many registers.
  static constexpr int kUnroll = Layout::kChannels <= 40 ? 8 : 1;

  const SketchScoreParams& p;
  const Layout of_layout;
  const char* queries;      // shared
  uint8_t* stages;          // [2, kBatch, stride]
  uint64_t* barriers;       // [2], of the copies to a stage
  float factors[kTiles][2]; // from a query in shared memory to an exponent of two
  int32_t g, t;

  __device__ SketchLayout layout() const { return of_layout.get(); }
  __device__ SketchScoreShared sizes() const { return {layout(), kQueries, kParts}; }
  // Whether codes and scales can be read as whole words, in any order.
  __device__ bool aligned() const {
    return layout().dim % 16 == 0 && layout().code_bytes() % 4 == 0 &&
           layout().channel_scales() % 8 == 0;
  }

  // Starts to copy the sketches of a batch; lane i below kBatch has the number of page i.
  __device__ void fetch(int32_t host_page, int32_t head, int stage) const {
    copy_rows<kBatch>(reinterpret_cast<char*>(stages) + stage * sizes().stage_bytes(),
                      sizes().sketch_stride(), p.sketches + head * p.sketch_head,
                      max(0, min(host_page, p.last_host_page)), p.sketch_page,
                      layout().num_bytes(), barriers + stage);
  }

  // The row of shared memory with the queries' numbers in a channel.
  __device__ const char* row_of(int32_t channel, int part = 0) const {
    return queries + part * sizes().part_bytes() + channel * sizes().row_bytes();
  }

  // Products of the bases of 16 pages with the queries, times 2^-6, less the factors.
  __device__ void add_bases(const uint8_t* stage, float (&c)[kTiles][4]) const {
    const int32_t each = sizes().blocks_of_lane();
    // This lane's row of a matrix: channels lie as the lanes' pairs of bytes do. Lane t takes pair i ^ t
    // of its block as its i-th one, so that the rows of a matrix are in different banks.
    const int32_t row = lane_id() % 8, matrix = lane_id() / 8 % 2;
    const int32_t channel = kBlock * (row / 2) * each + (row ^ 2 * matrix);
    const uint32_t order = 0x76543210u ^ 0x22222222u * t;
#pragma unroll
    for (int32_t j = 0; j < each; ++j) {
      const int32_t block = t * each + j;
      const bool there = block < layout().blocks();
      uint32_t a[2][4];  // of two pairs of channels of the block each
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint8_t* own = stage + (g + 8 * i) * sizes().sketch_stride();
        const uint2 values =
            there ? *reinterpret_cast<const uint2*>(own + kBlock * block) : uint2{0, 0};
        const uint32_t code = there ? own[layout().block_scales() + block] : 0u;
        const uint32_t scale = multiply_halves((code | code << 16) << 7, 0x10001000u);  // 2^-11
        const uint32_t zero = multiply_halves(scale, 0xe480e480u);                      // -1152
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          // A byte after 0x64 is 1024 more than itself.
          const uint32_t bytes =
              permute_bytes(values.x, values.y, order >> 16 * step) ^ 0x80808080u;
          a[step][i] =
              multiply_add_halves(permute_bytes(bytes, 0x64646464u, 0x4140), scale, zero);
          a[step][i + 2] =
              multiply_add_halves(permute_bytes(bytes, 0x64646464u, 0x4342), scale, zero);
        }
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            uint32_t b[2];
            load_matrices(b, row_of((channel ^ 4 * step) + kBlock * j, part) + 16 * tile);
            multiply_add(c[tile], a[step], b[0], b[1]);
          }
        }
      }
    }
  }

  // The detailed channels of a page are in slots. Of each 32 that are there, lane t
  // has channels 8t to 8t + 7, so that it reads words; of the rest 2t and 2t + 1 of each 8.
  __device__ int32_t whole_slots() const {
    return aligned() ? layout().num_channels / 32 * 32 : 0;
  }

  // The row of a detailed channel of a page; of zeros for a slot beyond the last.
  __device__ const char* row_of_slot(const uint8_t* sketch, int32_t slot) const {
    const SketchLayout l = layout();
    const uint8_t* at = sketch + l.channels() + slot * l.channel_width();
    int32_t channel = sizes().zero_row();
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

  // The scales of channels `slot` and slot + 1, times 2^5; 0 beyond the last. Those from `first` to
  // first + 7 are read together.
  __device__ uint32_t scales_of(const uint8_t* sketch, int32_t slot, int32_t first) const {
    const SketchLayout l = layout();
    const uint8_t* at = sketch + l.channel_scales() + slot;
    if (aligned() && first + kMatrix <= l.num_channels) {
      return scales_in(*reinterpret_cast<const uint16_t*>(at), 0);
    }
    const uint32_t low = slot < l.num_channels ? at[0] : 0u;
    const uint32_t high = slot + 1 < l.num_channels ? at[1] : 0u;
    return low << 7 | high << 23;
  }

  // Sums of products of codes and queries: of the tokens of a word, less their row's power of four,
  // and with 1 in place of each code.
  struct Sums {
    float codes[kTiles][4], ones[kTiles][4];
  };

  // The left factor's registers for one matrix: tokens g and g + 8, channels `first` and `second`.
  __device__ void codes_to(uint32_t (&a)[4], int which, uint32_t first, uint32_t second) const {
    const uint32_t mask = 0x00030003u << 2 * (g % 4);
    const uint32_t bytes = static_cast<uint32_t>(g / 4) * 0x0101u + 0x0400u;
    a[2 * which] = permute_bytes(first, second, bytes) & mask;
    a[2 * which + 1] = permute_bytes(first, second, bytes + 0x0202u) & mask;
  }

  // 32 channels, of which this lane has eight side by side.
  __device__ void add_whole(const uint8_t* sketch, int32_t first, int32_t word, Sums& sums) const {
    const int32_t row = lane_id() % 8, matrix = lane_id() / 8;
    const char* channel = row_of_slot(sketch, first + 8 * (row / 2) + 2 * matrix + row % 2);
    const int32_t slot = first + 8 * t;
    const uint2 scales = *reinterpret_cast<const uint2*>(sketch + layout().channel_scales() + slot);
    uint32_t b[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      load_matrices(b[tile], channel + 16 * tile);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        b[tile][i] = multiply_halves(b[tile][i], scales_in(i < 2 ? scales.x : scales.y, i % 2));
      }
      const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
      multiply_add(sums.ones[tile], ones, b[tile][0], b[tile][1]);
      multiply_add(sums.ones[tile], ones, b[tile][2], b[tile][3]);
    }
    uint32_t x[8];
    if (layout().code_bytes() == 4) {
      const auto* at = reinterpret_cast<const uint4*>(sketch + layout().dim + 4 * slot);
      const uint4 low = at[0], high = at[1];
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
      x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
      for (int i = 0; i < 8; ++i) x[i] = codes_of(sketch, slot + i, word);
    }
#pragma unroll
    for (int two = 0; two < 4; two += 2) {
      uint32_t a[4];
      codes_to(a, 0, x[2 * two], x[2 * two + 1]);
      codes_to(a, 1, x[2 * two + 2], x[2 * two + 3]);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        multiply_add(sums.codes[tile], a, b[tile][two], b[tile][two + 1]);
      }
    }
  }

  // Eight channels.
  __device__ void add_some(const uint8_t* sketch, int32_t first, int32_t word, Sums& sums) const {
    const char* channel = row_of_slot(sketch, first + lane_id() % 8);
    const int32_t slot = first + 2 * t;
    const uint32_t scales = scales_of(sketch, slot, first);
    uint32_t b[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      b[tile] = multiply_halves(load_matrix(channel + 16 * tile), scales);
      const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
      multiply_add(sums.ones[tile], ones, b[tile]);
    }
    uint32_t a[4];
    codes_to(a, 0, codes_of(sketch, slot, word), codes_of(sketch, slot + 1, word));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) multiply_add(sums.codes[tile], a, b[tile]);
  }

  // The weights of a page's tokens g, g + 8 and so on, added up. Returns the largest exponent.
  __device__ float add_weights(const uint8_t* sketch, float (&total)[kTiles][2]) const {
    const SketchLayout l = layout();
    const float row = 1.0f / static_cast<float>(1 << 2 * (g % 4));
    float worst = 0.0f;
#pragma unroll 1
    for (int32_t word = 0; 4 * word < l.code_bytes(); ++word) {
      Sums sums{};
#pragma unroll kUnroll
      for (int32_t slot = 0; slot < whole_slots(); slot += 32) {
        add_whole(sketch, slot, word, sums);
      }
#pragma unroll kUnroll
      for (int32_t slot = whole_slots(); slot < sizes().slots(); slot += kMatrix) {
        add_some(sketch, slot, word, sums);
      }
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        const int tile = i / 4, place = i % 4;
        const float factor = factors[tile][place % 2];
        // A code's last bit is 2^-24, and scales are times 2^5.
        const float shift = sums.ones[tile][place % 2] * (factor * (-1.5f * 0x1p-5f));
        const float exponent = fmaf(sums.codes[tile][place], factor * 0x1p19f * row, shift);
        const int32_t token = kWordTokens * word + 8 * (place / 2) + g;
        const bool there = l.page_size % kWordTokens == 0 || token < l.page_size;
        worst = fmaxf(worst, there ? fabsf(exponent) : 0.0f);
        total[tile][place % 2] += there ? power_of_two(exponent) : 0.0f;
      }
    }
    return worst;
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
        const auto* q = reinterpret_cast<const Float16*>(row_of_slot(sketch, i));
        sum += to_float(q[query]) * __uint_as_float(scale << 20) *
               (static_cast<float>(code) - 1.5f);
      }
      Mass one;
      one.top = sum * unit * kLn2;
      one.total = 1.0f;
      mass.add(one);
    }
    return (mass.top + logf(mass.total)) * kLog2E;
  }

  // Sums over the lanes of four pages' totals; lane g has those of page g / 2 at the end.
  __device__ static void add_lanes(float (&totals)[4][kTiles][2]) {
    const bool third = lane_id() / 4 & 4, second = lane_id() / 4 & 2;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int tile = i / 2, column = i % 2;
      const auto pick = [&](bool upper, int page, int distance) {
        float &low = totals[page][tile][column], &high = totals[page + distance][tile][column];
        low = (upper ? high : low) +
              __shfl_xor_sync(kAllLanes, upper ? low : high, 8 * distance);
      };
      pick(third, 0, 2);
      pick(third, 1, 2);
      pick(second, 0, 1);
      float& sum = totals[0][tile][column];
      sum += __shfl_xor_sync(kAllLanes, sum, 4);
    }
  }

  // log2 of the pages' summed weights.
  __device__ void find_weights(const uint8_t* stage, float (&weights)[2][kTiles][2]) const {
    float worst = 0.0f;
#pragma unroll 1
    for (int four = 0; four < 4; ++four) {
      // Every other page of eight, so that lane g gets the sums of page g.
      const int32_t first = four / 2 * 8 + four % 2;
      float totals[4][kTiles][2] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t page = first + 2 * i;
        worst = fmaxf(worst, add_weights(stage + page * sizes().sketch_stride(), totals[i]));
      }
      add_lanes(totals);
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        const int upper = i / (2 * kTiles), tile = i / 2 % kTiles;
        if (four / 2 == upper && four % 2 == g % 2) {
          weights[upper][tile][i % 2] = log_of_two(totals[0][tile][i % 2]);
        }
      }
    }
    // NaN, too.
    if (!__any_sync(kAllLanes, !(worst <= kFarExponent))) return;
#pragma unroll
    for (int i = 0; i < 2 * kTiles * 2; ++i) {
      const int32_t page = g + i / (kTiles * 2) * 8, tile = i / 2 % kTiles;
      weights[i / (kTiles * 2)][tile][i % 2] =
          add_any(stage + page * sizes().sketch_stride(), tile * kTileQueries + 2 * t + i % 2,
                  factors[tile][i % 2]);
    }
  }

  // Scores pages `first` to first + 15 of the request, whose sketches are in `stage`. `out` are the
  // scores of the first query, of `present` ones.
  __device__ void score(int32_t first, int32_t count, const uint8_t* stage, float* out,
                        int32_t present) const {
    float base[kTiles][4] = {}, weights[2][kTiles][2] = {};
    add_bases(stage, base);
    if (layout().num_channels > 0) {
      find_weights(stage, weights);
    } else {
      const float size = log_of_two(static_cast<float>(layout().page_size));
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) weights[i / (2 * kTiles)][i / 2 % kTiles][i % 2] = size;
    }
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      const int upper = i % 2, tile = i / 2 % kTiles, column = i / (2 * kTiles);
      const int32_t page = first + g + 8 * upper, query = tile * kTileQueries + 2 * t + column;
      if (query >= present || page >= count) continue;
      const float score = fmaf(base[tile][2 * upper + column], factors[tile][column] * 64.0f,
                               weights[upper][tile][column]);
      out[int64_t{query} * p.width + page] = score * kLn2;
    }
  }
};

}  // namespace hisparse
