// The steps of sketch_score for sketches with four bits of every number.
//
// Integers of 8 bits multiply the codes: queries times the scales of a page's channels. Channels
// differ by more than 8 bits can tell. So queries of 16 bits first take in the largest scale that
// a channel has in some pages, and a page's scales are parts of these, its levels.
#pragma once

#include "simd.h"
#include "sketch_decode.h"
#include "sketch_dot.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace hisparse {

constexpr int32_t kWidth = sizeof(Bytes);  // channels of a register of levels
using Wholes = Vec<int16_t, 2 * kLanes>;
// Of queries in 16 bits, of those that levels multiply, and of the products.
constexpr int32_t kTogether = 128;  // channels whose products are summed in 16 bits
constexpr float kMostWhole = 32767, kMostScaled = 2032, kMostProduct = 127;

// Of every kWidth channels those come first that `unpack` gives first.
constexpr int32_t unpacked_place(int32_t d) {
  return d / kWidth * kWidth + d % kWidth / 16 * 8 + d % 16 / 8 * (kWidth / 2) + d % 8;
}

// Levels of kWidth scales, as `unpack` gives them.
struct Levels {
  Wholes low, high;
};

// Of scales with these codes: 8 to 15 times a power of two, where those of `tops` would be 2^11.
// Less than a 2^8th of these has none: a page of huge numbers would change all others.
HISPARSE_INLINE Levels levels_below(Bytes tops, Bytes codes) {
  constexpr Sixteen powers = {0, 128, 64, 32, 16, 8, 4, 2, 1};
  Bytes below = tops - (codes & 0xf8);
  below = below < 120 ? below : Bytes{} + 120;
  const auto place = bit_cast<Bytes>(bit_cast<Words>(below) >> 3);
  const Bytes power = look_up(repeat_sixteen(&powers), place);
  const Bytes eighths = (codes & 7) | 8;
#if defined(__AVX512BW__)
  const auto x = bit_cast<__m512i>(power), y = bit_cast<__m512i>(eighths);
  const __m512i zero = _mm512_setzero_si512();
  const __m512i low = _mm512_unpacklo_epi8(x, zero), high = _mm512_unpackhi_epi8(x, zero);
  return {bit_cast<Wholes>(_mm512_maddubs_epi16(low, _mm512_unpacklo_epi8(y, zero))),
          bit_cast<Wholes>(_mm512_maddubs_epi16(high, _mm512_unpackhi_epi8(y, zero)))};
#elif defined(__AVX2__)
  const auto x = bit_cast<__m256i>(power), y = bit_cast<__m256i>(eighths);
  const __m256i zero = _mm256_setzero_si256();
  const __m256i low = _mm256_unpacklo_epi8(x, zero), high = _mm256_unpackhi_epi8(x, zero);
  return {bit_cast<Wholes>(_mm256_maddubs_epi16(low, _mm256_unpacklo_epi8(y, zero))),
          bit_cast<Wholes>(_mm256_maddubs_epi16(high, _mm256_unpackhi_epi8(y, zero)))};
#else
  Levels levels;
  for (int i = 0; i < kWidth / 2; ++i) {
    levels.low[i] = static_cast<int16_t>(power[i] * eighths[i]);
    levels.high[i] = static_cast<int16_t>(power[i + kWidth / 2] * eighths[i + kWidth / 2]);
  }
  return levels;
#endif
}

// Queries in 16 bits, unpacked, times levels / 2^15, rounded.
HISPARSE_INLINE Bytes times_levels(const int16_t* query, const Levels& levels) {
  const auto x = load_vector<Wholes>(query), y = load_vector<Wholes>(query + kWidth / 2);
#if defined(__AVX512BW__)
  return bit_cast<Bytes>(_mm512_packs_epi16(
      _mm512_mulhrs_epi16(bit_cast<__m512i>(x), bit_cast<__m512i>(levels.low)),
      _mm512_mulhrs_epi16(bit_cast<__m512i>(y), bit_cast<__m512i>(levels.high))));
#elif defined(__AVX2__)
  return bit_cast<Bytes>(_mm256_packs_epi16(
      _mm256_mulhrs_epi16(bit_cast<__m256i>(x), bit_cast<__m256i>(levels.low)),
      _mm256_mulhrs_epi16(bit_cast<__m256i>(y), bit_cast<__m256i>(levels.high))));
#else
  Bytes out;
  for (int i = 0; i < kWidth / 2; ++i) {
    out[i] = static_cast<uint8_t>((x[i] * levels.low[i] + (1 << 14)) >> 15);
    out[i + kWidth / 2] = static_cast<uint8_t>((y[i] * levels.high[i] + (1 << 14)) >> 15);
  }
  return out;
#endif
}

// Products of 2 * kLanes base values with a query in 16 bits, in pairs.
HISPARSE_INLINE Ints base_products(const uint8_t* base, const int16_t* query) {
#if defined(__AVX512BW__)
  const auto x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base));
  return bit_cast<Ints>(_mm512_madd_epi16(_mm512_cvtepi8_epi16(x), _mm512_loadu_si512(query)));
#elif defined(__AVX2__)
  const auto x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(base));
  const auto q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(query));
  return bit_cast<Ints>(_mm256_madd_epi16(_mm256_cvtepi8_epi16(x), q));
#else
  Ints sums;
  for (int i = 0; i < kLanes; ++i) {
    sums[i] = static_cast<int8_t>(base[2 * i]) * query[2 * i] +
              static_cast<int8_t>(base[2 * i + 1]) * query[2 * i + 1];
  }
  return sums;
#endif
}

// The scales of 2 * kLanes channels, for each pair.
HISPARSE_INLINE Floats pair_scales(const uint8_t* codes) {
  Words words;
#if defined(__AVX2__)
  constexpr Sixteen fours = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  uint32_t some = 0;
  std::memcpy(&some, codes, kLanes / 4);
  const __m128i x = _mm_shuffle_epi8(_mm_cvtsi32_si128(static_cast<int32_t>(some)),
                                     bit_cast<__m128i>(fours));
#if defined(__AVX512F__)
  words = bit_cast<Words>(_mm512_cvtepu8_epi32(x));
#else
  words = bit_cast<Words>(_mm256_cvtepu8_epi32(x));
#endif
#else
  for (int i = 0; i < kLanes; ++i) words[i] = codes[i / 4];
#endif
  return bit_cast<Floats>((words + static_cast<uint32_t>(kScaleOffset)) << 20);
}

// Writes a row in 16 bits, `most` of them for `top`.
template <typename Place>
HISPARSE_INLINE void to_whole(const float* row, float top, float most, int32_t width, int16_t* out,
                              Place&& place) {
  const float inverse = top > 0 ? most / top : 0;
  for (int32_t d = 0; d < width; d += kLanes) {
    // Adding this constant leaves the nearest integer in the low bits.
    const Floats shifted = Float32::load(row + d) * inverse + 12582912.0f;
    const auto whole = __builtin_convertvector(bit_cast<Ints>(shifted), Vec<int16_t>);
    constexpr int32_t kPart = std::min(8, kLanes);
    for (int32_t i = 0; i < kLanes; i += kPart) {
      std::memcpy(out + place(d + i), reinterpret_cast<const int16_t*>(&whole) + i, 2 * kPart);
    }
  }
}

// All queries of a call, padded with zeros.
struct WholeQueries {
  int32_t width;
  Buffer<float> floats;   // [count, width]
  Buffer<int16_t> whole;  // [count, width]
  Buffer<float> units;    // [count]: times `whole` the query

  // queries [heads * group, dim], to be multiplied by `factor`
  WholeQueries(const float* queries, float factor, int64_t heads, int32_t group, int32_t dim)
      : width(round_up(dim, kWidth)), floats(heads * group * width), whole(heads * group * width),
        units(heads * group) {
    for (int64_t i = 0; i < heads * group; ++i) {
      float* row = floats.data() + i * width;
      float top = 0;
      for (int32_t d = 0; d < dim; ++d) {
        row[d] = queries[i * dim + d] * factor;
        top = std::max(top, std::abs(row[d]));
      }
      units.data()[i] = top / kMostWhole;
      to_whole(row, top, kMostWhole, width, whole.data() + i * width, [](int32_t d) { return d; });
    }
  }
};

// Queries of a head times the largest scales in `count` sketches, unpacked. They are so small that,
// times levels and the largest code, those of half of kTogether channels add up to 16 bits.
template <typename Layout>
HISPARSE_NOINLINE void scale_queries(const WholeQueries& queries, Tile<Layout>& tile,
                                     int32_t count) {
  const SketchLayout l = tile.layout();
  const int32_t width = queries.width;
  uint8_t* tops = tile.tops_of_scales.data();  // Powers of two above the scales.
  for (int32_t d = 0; d < width; d += kWidth) {
    Bytes top = {};
    for (int32_t i = 0; i < count; ++i) {
      // Codes follow, enough for a whole register.
      const auto x = load_vector<Bytes>(tile.sketches[i] + l.channel_scales() + d);
      top = x > top ? x : top;
    }
    top = ((top < kMostScale ? top : Bytes{} + kMostScale) & 0xf8) + 8;
    std::memcpy(tops + d, &top, sizeof(top));
  }
  // A product may have been rounded up by a half.
  const float most = 32767.0f / 15 - 0.25f * static_cast<float>(std::min(width, kTogether));
  float* product = tile.product.data();
  for (int32_t i = 0; i < tile.group; ++i) {
    const float* query = queries.floats.data() + (tile.heads[0] * tile.group + i) * width;
    Floats largest = {}, totals = {};
    float top = 0;
    for (int32_t d = 0; d < width; d += kLanes) {
      const Floats x = scales_at(tops + d) * Float32::load(query + d), size = x < 0.0f ? -x : x;
      store(product + d, x);
      largest = maximum(largest, size);
      totals += size;
      if ((d + kLanes) % kTogether != 0 && d + kLanes < width) continue;
      const auto sums = join_fours<float, kLanes>(totals) * (kMostProduct / most);
      top = std::max({top, sums[0] + sums[1], sums[2] + sums[3]});
      totals = Floats{};
    }
    const auto larger = [](auto a, auto b) { return a > b ? a : b; };
    const auto four = join_fours<float, kLanes>(largest, larger);
    top = std::max({top, four[0], four[1], four[2], four[3]});
    tile.scaled_units.data()[i] = top / kMostProduct;
    to_whole(product, top, kMostScaled, width, tile.scaled.data() + i * width, unpacked_place);
  }
}

// Values of G queries times levels, and tops: the scores of the base values, less 7.5 times those
// values, because codes stand for numbers around 0.
template <int G, typename Layout>
HISPARSE_NOINLINE void start_scores(const WholeQueries& queries, Tile<Layout>& tile, int32_t done) {
  const SketchLayout l = tile.layout();
  const int32_t width = round_up(l.dim, kWidth), count = tile.count;
  const int64_t first = tile.heads[0] * tile.group + done;
  const int16_t* x = tile.scaled.data() + done * width;
  const int16_t* whole = queries.whole.data() + first * width;
  uint8_t* rows = tile.rows.data();
  for (int32_t i = 0; i < count; ++i, rows += kQueries * width) {
    tile.fetch_next(i, 0);
    const uint8_t* sketch = tile.sketches[i];
    Floats sums[kQueries] = {};
    Sums totals[G] = {};
    for (int32_t d = 0; d < width; d += kWidth) {
      const Levels levels = levels_below(load_vector<Bytes>(tile.tops_of_scales.data() + d),
                                         load_vector<Bytes>(sketch + l.channel_scales() + d));
      unroll<G>([&](auto g) HISPARSE_INLINED {
        const Bytes product = times_levels(x + g * width + d, levels);
        std::memcpy(rows + g * width + d, &product, sizeof(product));
        totals[g] = add_products(totals[g], Bytes{} + 1, product);
      });
    }
    for (int32_t d = 0; d < l.dim; d += 2 * kLanes) {
      const Floats scales = pair_scales(sketch + l.block_scales() + d / kBlock);
      unroll<G>([&](auto g) HISPARSE_INLINED {
        const Ints sum = base_products(sketch + d, whole + g * width + d);
        sums[g] += __builtin_convertvector(sum, Floats) * scales;
      });
    }
    unroll<G>([&](auto g) HISPARSE_INLINED {
      const float unit = tile.scaled_units.data()[done + g];
      tile.units[i][g] = unit;
      sums[g] = sums[g] * queries.units.data()[first + g] -
                __builtin_convertvector(join_pairs(totals[g]), Floats) * (7.5f * unit);
    });
    const auto top = reduce_four(sums);
    std::memcpy(tile.tops + i * tile.apart + done, &top, sizeof(top));
  }
}

// Sums of products of queries and codes.
template <int G, typename Layout>
HISPARSE_NOINLINE void add_nibbles(Tile<Layout>& tile) {
  const SketchLayout l = tile.layout();
  const int32_t width = round_up(l.dim, kWidth), count = tile.count, blocks = l.blocks();
  const uint8_t* rows = tile.rows.data();
  Ints* out = tile.sums.data();
  for (int32_t i = 0; i < count; ++i, rows += kQueries * width) {
    tile.fetch_next(i, 1);
    const uint8_t* codes = tile.sketches[i] + l.codes();
    for (int32_t t = 0; t < l.page_size; t += kTokens, out += kVectors * kQueries) {
      for (int32_t first = 0; first < blocks; first += kTogether / kBlock) {
        // A single register's sums in two, or each product waits for the one before.
        constexpr int kApart = kVectors == 1 ? 1 : 0;
        Sums sums[kVectors + kApart][G] = {};
        const int32_t end = std::min<int32_t>(first + kTogether / kBlock, blocks);
#pragma GCC unroll 4
        for (int32_t block = first; block < end; ++block) {
          Bytes low[kVectors], high[kVectors];
          unroll<kVectors>([&](auto v) HISPARSE_INLINED {
            const auto x = load_vector<Words>(codes + block * 64 + v * kWidth);
            low[v] = bit_cast<Bytes>(x & 0x0f0f0f0fu);
            high[v] = bit_cast<Bytes>(x >> 4 & 0x0f0f0f0fu);
          });
          unroll<G>([&](auto g) HISPARSE_INLINED {
            const uint8_t* own = rows + g * width + block * kBlock;
            const Bytes even = repeat_four(own), odd = repeat_four(own + 4);
            unroll<kVectors>([&](auto v) HISPARSE_INLINED {
              sums[v][g] = add_products(sums[v][g], low[v], even);
              sums[v + kApart][g] = add_products(sums[v + kApart][g], high[v], odd);
            });
          });
        }
        unroll<kVectors>([&](auto v) HISPARSE_INLINED {
          unroll<G>([&](auto g) HISPARSE_INLINED {
            const Ints all =
                join_pairs(kApart == 1 ? sums[v][g] + sums[v + kApart][g] : sums[v][g]);
            Ints& place = out[v * kQueries + g];
            place = first == 0 ? all : place + all;
          });
        });
      }
      codes += l.code_bytes();
    }
  }
}

}  // namespace hisparse
