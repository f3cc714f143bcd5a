// The steps of sketch_score for sketches with four bits of every number.
//
// Integers of 8 bits multiply the codes: queries times the scales of a page's channels. Channels
// differ by more than 8 bits can tell, so a run of pages first takes the largest scale of each channel
// into its queries, of 16 bits, and a page's scales are parts of it, its levels.
#pragma once

#include "simd.h"
#include "sketch_decode.h"
#include "sketch_dot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace hisparse {

constexpr int32_t kWidth = sizeof(Bytes);  // channels of a register of levels
constexpr float kMostWhole = 32767, kMostLevel = 127;

// Of every kWidth channels those come first that `unpack` gives first.
constexpr int32_t unpacked_place(int32_t d) {
  return d / kWidth * kWidth + d % kWidth / 16 * 8 + d % 16 / 8 * (kWidth / 2) + d % 8;
}

// Parts of kMostLevel, by how many codes of scales they are below the whole, a power of two. The last
// stands for all that are further below: none, or one page of huge numbers would change all others.
constexpr auto make_parts() {
  std::array<uint8_t, 64> parts{};
  for (int32_t below = 0; below < 63; ++below) {
    const int32_t power = (below + 7) / 8, eighths = 8 + 8 * power - below;
    parts[below] = static_cast<uint8_t>(kMostLevel * eighths / (8 << power) + 0.5f);
  }
  return parts;
}
alignas(64) constexpr auto kParts = make_parts();

// Levels of scales with these codes, at most `tops`.
HISPARSE_INLINE Bytes levels_below(Bytes tops, Bytes codes) {
  Bytes below = tops - codes;
  below = below < 63 ? below : Bytes{} + 63;
#if defined(__AVX512VBMI__)
  return bit_cast<Bytes>(
      _mm512_permutexvar_epi8(bit_cast<__m512i>(below), _mm512_load_si512(kParts.data())));
#else
  const Bytes place = below & 15, part = below & 48;
  Bytes levels = {};
  for (int i = 0; i < 64; i += 16) {
    const Bytes found = look_up(repeat_sixteen(&kParts[i]), place);
    levels |= part == static_cast<uint8_t>(i) ? found : Bytes{};
  }
  return levels;
#endif
}

// Queries in 16 bits, unpacked, times levels / 2^15, rounded.
HISPARSE_INLINE Bytes times_levels(const int16_t* query, Bytes levels) {
#if defined(__AVX512BW__)
  const auto x = bit_cast<__m512i>(levels), zero = _mm512_setzero_si512();
  const __m512i low = _mm512_unpacklo_epi8(x, zero), high = _mm512_unpackhi_epi8(x, zero);
  return bit_cast<Bytes>(
      _mm512_packs_epi16(_mm512_mulhrs_epi16(_mm512_loadu_si512(query), low),
                         _mm512_mulhrs_epi16(_mm512_loadu_si512(query + 32), high)));
#elif defined(__AVX2__)
  const auto x = bit_cast<__m256i>(levels), zero = _mm256_setzero_si256();
  const __m256i low = _mm256_unpacklo_epi8(x, zero), high = _mm256_unpackhi_epi8(x, zero);
  const auto* q = reinterpret_cast<const __m256i*>(query);
  return bit_cast<Bytes>(_mm256_packs_epi16(_mm256_mulhrs_epi16(_mm256_loadu_si256(q), low),
                                            _mm256_mulhrs_epi16(_mm256_loadu_si256(q + 1), high)));
#else
  Bytes out;
  for (int i = 0; i < kWidth; ++i) {
    out[i] = static_cast<uint8_t>((query[i] * levels[i] + (1 << 14)) >> 15);
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

// Writes rows in 16 bits of which `unit` is one; returns that.
template <typename Place>
HISPARSE_INLINE float to_whole(const float* row, int32_t width, int16_t* out, Place&& place) {
  Floats most = {};
  for (int32_t d = 0; d < width; d += kLanes) {
    const Floats x = Float32::load(row + d);
    most = maximum(most, x < 0.0f ? -x : x);
  }
  float top = 0;
  for (int i = 0; i < kLanes; ++i) top = std::max(top, most[i]);
  const float inverse = top > 0 ? kMostWhole / top : 0;
  for (int32_t d = 0; d < width; d += kLanes) {
    // Adding this constant leaves the nearest integer in the low bits.
    const Floats shifted = Float32::load(row + d) * inverse + 12582912.0f;
    const auto whole = __builtin_convertvector(bit_cast<Ints>(shifted), Vec<int16_t>);
    constexpr int32_t kPart = std::min(8, kLanes);
    for (int32_t i = 0; i < kLanes; i += kPart) {
      std::memcpy(out + place(d + i), reinterpret_cast<const int16_t*>(&whole) + i, 2 * kPart);
    }
  }
  return top / kMostWhole;
}

// All queries of a call, padded with zeros.
struct WholeQueries {
  int32_t width, group;
  Buffer<float> floats;   // [count, width]
  Buffer<int16_t> whole;  // [count, width]
  Buffer<float> units;    // [count]: times `whole` the query

  // queries [heads * group, dim], to be multiplied by `factor`
  WholeQueries(const float* queries, float factor, int64_t heads, int32_t group, int32_t dim)
      : width(round_up(dim, kWidth)), group(group), floats(heads * group * width),
        whole(heads * group * width), units(heads * group) {
    for (int64_t i = 0; i < heads * group; ++i) {
      float* row = floats.data() + i * width;
      for (int32_t d = 0; d < dim; ++d) row[d] = queries[i * dim + d] * factor;
      units.data()[i] = to_whole(row, width, whole.data() + i * width, [](int32_t d) { return d; });
    }
  }
};

// Queries of one request times the largest scales in a run of pages.
struct RunQueries {
  const WholeQueries* all;
  int64_t first;           // KV head of the call
  Buffer<uint8_t> tops;    // [KV heads, width]: codes of the powers of two above the scales, at most 255
  Buffer<int16_t> rows;    // [KV heads * group, width], unpacked
  Buffer<float> units;     // [KV heads * group]: times levels and `rows` the query times scales

  RunQueries(const WholeQueries& queries, const SketchLayout& l, int64_t first, int32_t heads,
             const uint8_t* const* sketches, int32_t count)
      : all(&queries), first(first), tops(heads * queries.width),
        rows(heads * queries.group * queries.width), units(heads * queries.group) {
    const int32_t width = queries.width, group = queries.group;
    for (int32_t i = 0; i < count; ++i) {
      const uint8_t* codes = sketches[i] + l.channel_scales();
      const uint8_t* later = sketches[std::min(i + kTile, count - 1)] + l.channel_scales();
      for (int32_t d = 0; d < l.dim; d += 64) __builtin_prefetch(later + d, 0, 3);
      for (int32_t d = 0; d < width; d += kWidth) {
        // Codes follow, enough for a whole register.
        uint8_t* own = tops.data() + i % heads * width + d;
        const auto x = load_vector<Bytes>(codes + d), y = load_vector<Bytes>(own);
        const Bytes top = x > y ? x : y;
        std::memcpy(own, &top, sizeof(top));
      }
    }
    Buffer<float> product(width);
    for (int32_t h = 0; h < heads; ++h) {
      uint8_t* top = tops.data() + h * width;
      for (int32_t d = 0; d < width; ++d) {
        top[d] = static_cast<uint8_t>(std::min(top[d] / 8 * 8 + 8, 255));
      }
      for (int32_t i = h * group; i < (h + 1) * group; ++i) {
        const float* query = queries.floats.data() + (first * group + i) * width;
        for (int32_t d = 0; d < width; d += kLanes) {
          store(product.data() + d, scales_at(top + d) * Float32::load(query + d));
        }
        units.data()[i] = kMostWhole / kMostLevel *
                          to_whole(product.data(), width, rows.data() + i * width, unpacked_place);
      }
    }
  }
};

// Values of G queries times levels, and tops: the scores of the base values, less 7.5 times those
// values, because codes stand for numbers around 0.
template <int G, typename Layout>
HISPARSE_NOINLINE void start_scores(const RunQueries& queries, Tile<Layout>& tile, int32_t done) {
  const SketchLayout l = tile.layout();
  const int32_t width = round_up(l.dim, kWidth), count = tile.count;
  uint8_t* rows = tile.rows.data();
  for (int32_t i = 0; i < count; ++i, rows += kQueries * width) {
    tile.fetch_next(i, 0);
    const uint8_t* sketch = tile.sketches[i];
    const int64_t head = tile.heads[i] - queries.first, own = head * tile.group + done;
    const int64_t place = tile.heads[i] * tile.group + done;
    const uint8_t* tops = queries.tops.data() + head * width;
    const int16_t* x = queries.rows.data() + own * width;
    const int16_t* whole = queries.all->whole.data() + place * width;
    Floats sums[kQueries] = {};
    Ints totals[G] = {};
    for (int32_t d = 0; d < width; d += kWidth) {
      const Bytes levels = levels_below(load_vector<Bytes>(tops + d),
                                        load_vector<Bytes>(sketch + l.channel_scales() + d));
      unroll<G>([&](auto g) HISPARSE_INLINED {
        const Bytes product = times_levels(x + g * width + d, levels);
        std::memcpy(rows + g * width + d, &product, sizeof(product));
        totals[g] = dot_bytes(totals[g], Bytes{} + 1, product);
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
      const float unit = queries.units.data()[own + g];
      tile.units[i][g] = unit;
      sums[g] = sums[g] * queries.all->units.data()[place + g] -
                __builtin_convertvector(totals[g], Floats) * (7.5f * unit);
    });
    const auto top = reduce_four(sums);
    std::memcpy(tile.tops + i * tile.stride() + done, &top, sizeof(top));
  }
}

// Sums of products of bytes, the first at most 15. Without an instruction for four products they
// are kept in 16 bits, which hold those of kFlush blocks of channels.
#if (defined(__AVX512BW__) && !defined(__AVX512VNNI__)) || \
    (defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__))
using Partial = Vec<int16_t, 2 * kLanes>;
HISPARSE_INLINE Partial add_products(Partial sum, Bytes codes, Bytes x) {
#if defined(__AVX512BW__)
  return sum + bit_cast<Partial>(
                   _mm512_maddubs_epi16(bit_cast<__m512i>(codes), bit_cast<__m512i>(x)));
#else
  return sum + bit_cast<Partial>(
                   _mm256_maddubs_epi16(bit_cast<__m256i>(codes), bit_cast<__m256i>(x)));
#endif
}
HISPARSE_INLINE Ints add_partial(Ints sum, Partial part) {
#if defined(__AVX512BW__)
  return sum + bit_cast<Ints>(_mm512_madd_epi16(bit_cast<__m512i>(part), _mm512_set1_epi16(1)));
#else
  return sum + bit_cast<Ints>(_mm256_madd_epi16(bit_cast<__m256i>(part), _mm256_set1_epi16(1)));
#endif
}
#else
using Partial = Ints;
HISPARSE_INLINE Partial add_products(Partial sum, Bytes codes, Bytes x) {
  return dot_bytes(sum, codes, x);
}
HISPARSE_INLINE Ints add_partial(Ints sum, Partial part) { return sum + part; }
#endif
constexpr int32_t kFlush = 4;
static_assert(kFlush * 4 * 15 * 127 <= 32767, "sums of 16 bits");

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
      Ints sums[kVectors][G] = {};
      Partial parts[kVectors][G] = {};
      const auto add = [&](int32_t block) HISPARSE_INLINED {
        Bytes low[kVectors], high[kVectors];
        unroll<kVectors>([&](auto v) HISPARSE_INLINED {
          const auto x = load_vector<Words>(codes + block * 64 + v * kWidth);
          low[v] = bit_cast<Bytes>(x & 0x0f0f0f0fu);
          high[v] = bit_cast<Bytes>(x >> 4 & 0x0f0f0f0fu);
        });
        unroll<G>([&](auto g) HISPARSE_INLINED {
          const uint8_t* own = rows + g * width + block * kBlock;
          const Bytes first = repeat_four(own), last = repeat_four(own + 4);
          unroll<kVectors>([&](auto v) HISPARSE_INLINED {
            parts[v][g] = add_products(parts[v][g], low[v], first);
            parts[v][g] = add_products(parts[v][g], high[v], last);
          });
        });
      };
      for (int32_t block = 0; block < blocks; block += kFlush) {
        if (block + kFlush <= blocks) {
          unroll<kFlush>([&](auto more) HISPARSE_INLINED { add(block + more); });
        } else {
          for (int32_t last = block; last < blocks; ++last) add(last);
        }
        unroll<kVectors>([&](auto v) HISPARSE_INLINED {
          unroll<G>([&](auto g) HISPARSE_INLINED {
            sums[v][g] = add_partial(sums[v][g], parts[v][g]);
            parts[v][g] = Partial{};
          });
        });
      }
      codes += l.code_bytes();
      unroll<kVectors>([&](auto v) HISPARSE_INLINED {
        unroll<G>([&](auto g) HISPARSE_INLINED { out[v * kQueries + g] = sums[v][g]; });
      });
    }
  }
}

}  // namespace hisparse
