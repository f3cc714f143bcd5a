// The same as sketch_start.h where AVX-512 compresses bytes. A query has 16 bits a channel, which
// multiply base values; the high eight alone multiply codes.
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
  // 256 times `high` and what it lacks: 256 / units times the query. Of every 64 channels those of
  // even number come first.
  Buffer<int16_t> whole;
  Buffer<float> units;    // [KV heads of all requests, blocks, kQueries]: times `high` the query

  // queries [heads * group, dim], to be multiplied by `factor`
  Queries(const float* queries, float factor, int64_t heads, int32_t group, int32_t dim)
      : width(round_up(dim, kChannels)), blocks(round_up(group, kQueries) / kQueries),
        high(heads * blocks * kQueries * width), whole(heads * blocks * kQueries * width),
        units(heads * blocks * kQueries) {
    for (int64_t i = 0; i < heads * group; ++i) {
      const float* query = queries + i * dim;
      float top = 0;
      for (int32_t d = 0; d < dim; ++d) top = std::max(top, std::abs(query[d] * factor));
      const int64_t own = i / group * blocks * kQueries + i % group;
      units.data()[own] = top / 127;
      const float scale = top > 0 ? 127 / top : 0;
      const auto rounded = [](float x) { return static_cast<int32_t>(x + (x < 0 ? -0.5f : 0.5f)); };
      int8_t* upper = high.data() + own * width;
      int16_t* both = whole.data() + own * width;
      // The high byte as other processors round it; the rest may then miss by one.
      for (int32_t d = 0; d < dim; ++d) {
        upper[d] = static_cast<int8_t>(rounded(query[d] * factor * scale));
      }
      const auto put = [&](int32_t d, int32_t place) {
        const int32_t more = rounded(query[d] * factor * scale * 256) - 256 * upper[d];
        both[place] = static_cast<int16_t>(256 * upper[d] + std::clamp(more, -128, 127));
      };
      for (int32_t d = 0; d < dim; d += 64) {
        const int32_t left = std::min(64, dim - d);
        for (int32_t i = 0; i < left / 2; ++i) {
          put(d + 2 * i, d + i);
          put(d + 2 * i + 1, d + 32 + i);
        }
        if (left % 2 != 0) put(d + left - 1, d + left / 2);
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
  const uint8_t* levels = tile.levels.data();
  uint8_t* chosen = tile.chosen.data();
  Floats products[kTile][kQueries];
  using Four = Vec<float, kQueries>;
  for (int32_t i = 0; i < count; ++i, chosen += kQueries * stride) {
    tile.fetch_next(i, 0);
    const uint8_t* sketch = tile.sketches[i];
    const int64_t first = (tile.heads[i] * queries.blocks + done / kQueries) * kQueries;
    const int8_t* high = queries.high.data() + first * width;
    const int16_t* whole = queries.whole.data() + first * width;
    Floats sums[G] = {};
    int32_t place = 0;
    for (int32_t d = 0; d < width; d += kChannels) {
      uint64_t mask = 0;
      std::memcpy(&mask, sketch + l.channels() + d / 8, std::min(8, l.blocks() - d / 8));
      // As 16-bit numbers; a 32-bit lane has channels of one block.
      const __m512i base = load_bytes(sketch + d, l.dim - d);
      const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(base, 8), 8);
      const __m512i odd = _mm512_srai_epi16(base, 8);
      const Floats scale = block_scales(sketch + l.block_scales() + d / 8, l.blocks() - d / 8);
      unroll<G>([&](auto g) HISPARSE_INLINED {
        const int16_t* own = whole + g * width + d;
        const __m512i half = _mm512_madd_epi16(even, _mm512_load_si512(own));
        const __m512i sum = _mm512_dpwssd_epi32(half, odd, _mm512_load_si512(own + 32));
        sums[g] += __builtin_convertvector(bit_cast<Ints>(sum), Floats) * scale;
        const __m512i upper = _mm512_load_si512(high + g * width + d);
        _mm512_storeu_si512(chosen + g * stride + place, _mm512_maskz_compress_epi8(mask, upper));
      });
      place += static_cast<int32_t>(__builtin_popcountll(mask));
    }
    unroll<G>([&](auto g) HISPARSE_INLINED { products[i][g] = sums[g]; });
    const Four unit = load_vector<Four>(queries.units.data() + first) * tile.unit[i];
    std::memcpy(tile.units[i], &unit, sizeof(unit));
  }
  // Not at once: so soon after something is written, a processor waits to read it.
  chosen = tile.chosen.data();
  for (int32_t i = 0; i < count; ++i, chosen += kQueries * stride, levels += places) {
    const int64_t first = (tile.heads[i] * queries.blocks + done / kQueries) * kQueries;
    const Floats middle = splat(1.5f * 256 * tile.unit[i]);
    Floats sums[kQueries] = {};
    unroll<G>([&](auto g) HISPARSE_INLINED {
      Ints sum = {};
      for (int32_t at = 0; at < places; at += kPlaces) {
        const auto own = load_vector<Bytes>(chosen + g * stride + at);
        sum = dot_bytes(sum, load_vector<Bytes>(levels + at), own);
      }
      sums[g] = products[i][g] - __builtin_convertvector(sum, Floats) * middle;
    });
    const auto units = load_vector<Four>(queries.units.data() + first);
    const Four top = reduce_four(sums) * units * (1.0f / 256);
    std::memcpy(tile.tops + i * tile.apart + done, &top, sizeof(top));
  }
}

}  // namespace hisparse

#endif
