// What a sketch_score begins with: each query's product with the base values, and its values in the
// channels that a sketch has in detail.
#pragma once

#include "simd.h"
#include "sketch_decode.h"
#include "sketch_dot.h"

#ifndef HISPARSE_SKETCH_AVX512

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace hisparse {

// All queries of a call, as floats and as bytes, padded with zeros.
struct Queries {
  int32_t width;
  int32_t blocks;        // of kQueries queries that share a KV head
  Buffer<float> floats;  // [count, width]
  Buffer<int8_t> rows;   // [KV heads of all requests, blocks, width, kQueries]
  Buffer<float> units;   // [KV heads of all requests, blocks, kQueries]: times `rows` the query

  // queries [heads * group, dim], to be multiplied by `factor`
  Queries(const float* queries, float factor, int64_t heads, int32_t group, int32_t dim)
      : width(round_up(dim, kChannels)), blocks(round_up(group, kQueries) / kQueries),
        floats(heads * group * width), rows(heads * blocks * width * kQueries),
        units(heads * blocks * kQueries) {
    for (int64_t i = 0; i < heads * group; ++i) {
      const float* query = queries + i * dim;
      for (int32_t d = 0; d < dim; ++d) floats.data()[i * width + d] = query[d] * factor;
      float top = 0;
      for (int32_t d = 0; d < dim; ++d) top = std::max(top, std::abs(query[d] * factor));
      const int64_t block = i / group * blocks + i % group / kQueries, own = i % group % kQueries;
      units.data()[block * kQueries + own] = top / 127;
      const float scale = top > 0 ? 127 / top : 0;
      int8_t* row = rows.data() + block * width * kQueries + own;
      for (int32_t d = 0; d < dim; ++d, row += kQueries) {
        const float whole = query[d] * factor * scale;
        *row = static_cast<int8_t>(whole + (whole < 0 ? -0.5f : 0.5f));
      }
    }
  }
};

#if !defined(__AVX512F__)
// Lanes, in rising order, whose bits are set in a mask of kLanes bits.
constexpr auto make_fronts() {
  std::array<std::array<uint8_t, kLanes>, 1 << kLanes> fronts{};
  for (int mask = 0; mask < 1 << kLanes; ++mask) {
    int place = 0;
    for (int bit = 0; bit < kLanes; ++bit) {
      if (mask >> bit & 1) fronts[mask][place++] = static_cast<uint8_t>(bit);
    }
  }
  return fronts;
}
alignas(64) constexpr auto kFronts = make_fronts();
#endif

// The lanes of x whose bits are set, moved to the front.
HISPARSE_INLINE Ints to_front(Ints x, uint32_t bits) {
#if defined(__AVX512F__)
  return bit_cast<Ints>(
      _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), bit_cast<__m512i>(x)));
#elif defined(__AVX2__)
  const auto front = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kFronts[bits].data()));
  return bit_cast<Ints>(
      _mm256_permutevar8x32_epi32(bit_cast<__m256i>(x), _mm256_cvtepu8_epi32(front)));
#else
  const auto front = kFronts[bits];
  return __builtin_shuffle(x, Ints{front[0], front[1], front[2], front[3]});
#endif
}

// A block's values in the channels that a mask of `count` bytes names, ascending.
//   rows    [8 * count, kQueries]
//   chosen  [channels, kQueries]; written up to a register beyond
HISPARSE_INLINE void choose(const uint8_t* mask, int32_t count, const int8_t* rows,
                            uint8_t* chosen) {
  constexpr uint32_t all = (1u << kLanes) - 1;
  for (int32_t byte = 0; byte < count; byte += std::max(1, kLanes / 8)) {
    uint32_t bits = mask[byte];
    if (kLanes > 8 && byte + 1 < count) bits |= static_cast<uint32_t>(mask[byte + 1]) << 8;
    for (int part = 0; part < std::max(8, kLanes); part += kLanes) {
      const Ints x = to_front(load_vector<Ints>(rows), bits >> part & all);
      std::memcpy(chosen, &x, sizeof(x));
      rows += sizeof(x);
      chosen += kQueries * __builtin_popcount(bits >> part & all);
    }
  }
}


// What scale_of gives, of all codes.
constexpr auto make_scales() {
  static_assert(kScaleOffset == 107 << 3);
  std::array<float, 256> scales{};
  for (int code = 0; code < 256; ++code) {
    scales[code] = (8 + code % 8) * 0x1p-23f * static_cast<float>(1u << code / 8);
  }
  return scales;
}
alignas(64) constexpr auto kScales = make_scales();

// Base values of kLanes channels from d on; zeros beyond the last one.
HISPARSE_INLINE Floats base_at(const SketchLayout& l, const uint8_t* sketch, int32_t d) {
  uint8_t copy[kLanes] = {};
  const uint8_t* codes = sketch + d;
  if (d + kLanes > l.dim) {
    codes = copy;
    std::copy_n(sketch + d, std::max(0, l.dim - d), copy);
  }
  const uint8_t* scale = sketch + l.block_scales() + std::min(d / kBlock, l.blocks() - 1);
  Floats scales = splat(kScales[*scale]);
  for (int i = kBlock; i < kLanes; ++i) scales[i] = kScales[scale[d + i < l.dim ? i / kBlock : 0]];
  return __builtin_convertvector(load_signed_bytes(codes), Floats) * scales;
}

// Four values, of a quad's channels, that query g of a block has among what is chosen.
template <typename Layout>
HISPARSE_INLINE const uint8_t* chosen_by(const uint8_t* chosen, const Tile<Layout>&, int32_t g,
                                         int32_t quad) {
  return chosen + 16 * quad + 4 * g;
}

// Values of G queries in the detailed channels, times levels; and tops: the scores of the base
// values, less 1.5 times those values, because codes stand for numbers around 0.
template <int G, typename Layout>
HISPARSE_NOINLINE void start_scores(const Queries& queries, Tile<Layout>& tile, int32_t done) {
  const int32_t places = tile.places(), width = tile.width(), count = tile.count;
  const SketchLayout l = tile.layout();
  const int32_t stride = tile.chosen_stride();
  const uint8_t* multiples = tile.multiples.data();
  uint8_t* chosen = tile.chosen.data();
  for (int32_t i = 0; i < count; ++i, chosen += stride) {
    const int64_t block = tile.heads[i] * queries.blocks + done / kQueries;
    const int8_t* rows = queries.rows.data() + block * width * kQueries;
    choose(tile.sketches[i] + l.channels(), l.blocks(), rows, chosen);
  }
  chosen = tile.chosen.data();
  for (int32_t i = 0; i < count; ++i, chosen += stride, multiples += 4 * places) {
    const int64_t block = tile.heads[i] * queries.blocks + done / kQueries;
    tile.fetch_next(i, 0);
    // Two sums for each query, or each product waits for the one before.
    Floats even[kQueries] = {}, odd[G] = {};
    const float* q = queries.floats.data() + (tile.heads[i] * tile.group + done) * width;
    for (int32_t d = 0; d < width; d += 2 * kLanes) {
      const Floats x = base_at(l, tile.sketches[i], d);
      const Floats y = base_at(l, tile.sketches[i], d + kLanes);
      unroll<G>([&](auto g) HISPARSE_INLINED {
        even[g] += Float32::load(q + g * width + d) * x;
        odd[g] += Float32::load(q + g * width + d + kLanes) * y;
      });
    }
    for (int g = 0; g < G; ++g) even[g] += odd[g];
    Ints middles = {};
    for (int32_t place = 0; place < places; place += kLanes) {
      // Four channels of each query side by side.
      const Bytes own = transpose_sixteens(load_vector<Bytes>(chosen + kQueries * place));
      const Bytes x = times_levels(load_vector<Bytes>(multiples + 4 * place), own);
      std::memcpy(chosen + kQueries * place, &x, sizeof(x));
      middles = dot_bytes(middles, Bytes{} + 1, x);
    }
    using Four = Vec<float, kQueries>;
    const Four units = load_vector<Four>(queries.units.data() + block * kQueries) * tile.unit[i];
    const Four middle = __builtin_convertvector(join_fours<int32_t, kLanes>(middles), Four);
    const Four top = reduce_four(even) - middle * units * 1.5f;
    std::memcpy(tile.units[i], &units, sizeof(units));
    std::memcpy(tile.tops + i * tile.apart + done, &top, sizeof(top));
  }
}

}  // namespace hisparse

#endif
