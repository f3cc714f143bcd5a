// The same as sketch_start.h where AVX-512 multiplies and compresses bytes. A query has 16 bits a
// channel: both bytes multiply base values, and the high one alone multiplies codes.
#pragma once

#include "simd.h"
#include "sketch_decode.h"
#include "sketch_dot.h"

#ifdef HISPARSE_SKETCH_AVX512

#include <algorithm>
#include <cmath>
#include <cstring>

namespace hisparse {

// All queries of a call, padded with zeros.
struct Queries {
  int32_t width;
  int32_t blocks;         // of kQueries queries that share a KV head
  Buffer<int8_t> high;    // [KV heads of all requests, blocks, kQueries, width]
  Buffer<int8_t> low;     // the same: 256 times `high` plus `low` is 256 / units times the query
  Buffer<int32_t> zero;   // [.., width / 4]: -128 times the sums over four channels
  Buffer<float> units;    // [KV heads of all requests, blocks, kQueries]: times `high` the query

  // queries [heads * group, dim], to be multiplied by `factor`
  Queries(const float* queries, float factor, int64_t heads, int32_t group, int32_t dim)
      : width(round_up(dim, kChannels)), blocks(round_up(group, kQueries) / kQueries),
        high(heads * blocks * kQueries * width), low(heads * blocks * kQueries * width),
        zero(heads * blocks * kQueries * width / 4), units(heads * blocks * kQueries) {
    for (int64_t i = 0; i < heads * group; ++i) {
      const float* query = queries + i * dim;
      float top = 0;
      for (int32_t d = 0; d < dim; ++d) top = std::max(top, std::abs(query[d] * factor));
      const int64_t own = i / group * blocks * kQueries + i % group;
      units.data()[own] = top / 127;
      const float scale = top > 0 ? 127 / top : 0;
      const auto rounded = [](float x) { return static_cast<int32_t>(x + (x < 0 ? -0.5f : 0.5f)); };
      for (int32_t d = 0; d < dim; ++d) {
        // The high byte as other processors round it; the low one may then miss by one.
        const float exact = query[d] * factor * scale;
        const int32_t upper = rounded(exact);
        const int32_t lower = std::clamp(rounded(exact * 256) - 256 * upper, -128, 127);
        high.data()[own * width + d] = static_cast<int8_t>(upper);
        low.data()[own * width + d] = static_cast<int8_t>(lower);
        zero.data()[(own * width + d) / 4] -= 128 * (256 * upper + lower);
      }
    }
  }
};

// Four values, of a quad's channels, that query g of a block has among what is chosen.
template <typename Layout>
HISPARSE_INLINE const uint8_t* chosen_by(const uint8_t* chosen, const Tile<Layout>& tile, int32_t g,
                                         int32_t quad) {
  return chosen + tile.chosen_stride() / kQueries * g + 4 * quad;
}

HISPARSE_INLINE __m512i load_bytes(const void* p, int32_t count) {
  const __mmask64 some = count < 64 ? (1ull << count) - 1 : ~0ull;
  return _mm512_maskz_loadu_epi8(some, p);
}

// The scales of 64 channels, one for each four.
HISPARSE_INLINE Floats block_scales(const uint8_t* codes, int32_t blocks) {
  const __mmask16 some = static_cast<__mmask16>(blocks < 8 ? (1 << blocks) - 1 : 255);
  const __m128i x = _mm_maskz_loadu_epi8(some, codes);
  const auto twice = bit_cast<Words>(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(x, x)));
  return bit_cast<Floats>((twice + static_cast<uint32_t>(kScaleOffset)) << 20);
}

// Values of G queries in the detailed channels, and tops: the scores of the base values, less 1.5
// times the detailed channels' products, because codes stand for levels around 0.
template <int G, typename Layout>
HISPARSE_NOINLINE void start_scores(const Queries& queries, Tile<Layout>& tile, int32_t done) {
  const SketchLayout l = tile.layout();
  const int32_t places = tile.places(), width = tile.width(), count = tile.count;
  const int32_t stride = tile.chosen_stride() / kQueries;
  const int32_t ahead = done == 0 ? l.channels() : 0;
  const uint8_t* levels = tile.levels.data();
  uint8_t* chosen = tile.chosen.data();
  using Four = Vec<float, kQueries>;
  for (int32_t i = 0; i < count; ++i, chosen += kQueries * stride) {
    // A little at a time: a processor waits if many reads are under way.
    for (int32_t at = 0; at < ahead; at += 64) {
      __builtin_prefetch(tile.sketches[i + kTile] + at, 0, 2);
    }
    const uint8_t* sketch = tile.sketches[i];
    const int64_t first = (tile.heads[i] * queries.blocks + done / kQueries) * kQueries;
    const int8_t *high = queries.high.data() + first * width;
    const int8_t *low = queries.low.data() + first * width;
    const int32_t* zero = queries.zero.data() + first * width / 4;
    Floats products[kQueries] = {};
    int32_t place = 0;
    for (int32_t d = 0; d < width; d += kChannels) {
      uint64_t mask = 0;
      std::memcpy(&mask, sketch + l.mask() + d / 8, std::min(8, l.blocks() - d / 8));
      // Unsigned, as one factor has to be: 128 more.
      const __m512i base = _mm512_xor_si512(load_bytes(sketch + d, l.dim - d),
                                            _mm512_set1_epi8(static_cast<char>(0x80)));
      const Floats scale = block_scales(sketch + l.block_scales() + d / 8, l.blocks() - d / 8);
      for (int g = 0; g < G; ++g) {
        const __m512i upper = _mm512_load_si512(high + g * width + d);
        const __m512i lower = _mm512_load_si512(low + g * width + d);
        const __m512i start = _mm512_load_si512(zero + (g * width + d) / 4);
        const __m512i much = _mm512_dpbusd_epi32(_mm512_setzero_si512(), base, upper);
        const Ints sum = bit_cast<Ints>(_mm512_dpbusd_epi32(start, base, lower)) +
                         (bit_cast<Ints>(much) << 8);
        products[g] += __builtin_convertvector(sum, Floats) * scale;
        _mm512_storeu_si512(chosen + g * stride + place, _mm512_maskz_compress_epi8(mask, upper));
      }
      place += static_cast<int32_t>(__builtin_popcountll(mask));
    }
    // Later steps read what is chosen: so soon after it is written, a processor waits.
    const auto units = load_vector<Four>(queries.units.data() + first);
    const Four top = reduce_four(products) * units * (1.0f / 256), unit = units * tile.unit[i];
    std::memcpy(tile.units[i], &unit, sizeof(unit));
    std::memcpy(tile.tops + i * tile.stride() + done, &top, sizeof(top));
  }
  chosen = tile.chosen.data();
  for (int32_t i = 0; i < count; ++i, chosen += kQueries * stride, levels += places) {
    Floats middles[kQueries] = {};
    for (int32_t at = 0; at < places; at += kPlaces) {
      const auto level = load_vector<Bytes>(levels + at);
      for (int g = 0; g < G; ++g) {
        const auto own = load_vector<Bytes>(chosen + g * stride + at);
        middles[g] += __builtin_convertvector(dot_bytes(Ints{}, level, own), Floats);
      }
    }
    const auto unit = load_vector<Four>(tile.units[i]);
    float* top = tile.tops + i * tile.stride() + done;
    const Four whole = load_vector<Four>(top) - reduce_four(middles) * unit * 1.5f;
    std::memcpy(top, &whole, sizeof(whole));
  }
}

}  // namespace hisparse

#endif
