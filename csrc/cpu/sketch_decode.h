// Sketches decoded for sketch_score, a tile of them at a time.
#pragma once

#include "simd.h"
#include "sketch.h"
#include "sketch_dot.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace hisparse {

// Separate functions: in a single one the compiler keeps loop counters on the stack.
#define HISPARSE_NOINLINE __attribute__((noinline))

// Sketches that are scored together, step by step: the steps of one alone wait for each other.
constexpr int32_t kTile = 8;
constexpr int32_t kQueries = 4;  // of a group, at a time
constexpr float kLog2E = 1.44269504f;
#ifdef HISPARSE_SKETCH_AVX512
constexpr int32_t kChannels = 64, kPlaces = 64;  // of queries, and of what is chosen, in a register
#else
constexpr int32_t kChannels = 32, kPlaces = kLanes;
#endif

constexpr int32_t round_up(int32_t count, int32_t unit) { return (count + unit - 1) / unit * unit; }

// What is decoded of each sketch, and scratch for kQueries queries. Rows end in zeros.
template <typename Layout>
struct Tile {
  // How much later are the sketches that a step fetches. With four bits, those of a head in as many
  // pages have queries of their own.
  static constexpr int32_t kAhead = Layout::kBits == 4 ? 2 * kTile : kTile;

  Layout of_layout;
  int32_t group;      // queries of a KV head
  int32_t count;      // sketches that are there
  const uint8_t* const* sketches;      // and after them the next ones
  bool last;                           // whether these queries are the last of their groups
  int64_t heads[kTile];                // the KV head, counted over requests
  float *tops, *totals;                // [count, apart], of the head's queries
  int32_t apart;
  float unit[kTile];                   // times `levels`, and with them `chosen`, the scales
  float units[kTile][kQueries];        // times `sums` the logits
  Buffer<uint8_t> levels;         // [kTile, places]: scales of detailed channels, with AVX-512
  // [kTile, places, 4]: levels times 0 to 3 or, without AVX-512, each four levels four times
  Buffer<uint8_t> multiples;
  Buffer<uint8_t> chosen;         // [kTile, chosen_stride], signed: see start_scores
  Buffer<Ints> sums;              // [kTile, registers, kQueries]
  // With four bits, in whole registers:
  Buffer<uint8_t> tops_of_scales;  // [width], codes
  Buffer<float> product;           // [width], of these and a query
  Buffer<int16_t> scaled;          // [group, width]: such products
  Buffer<float> scaled_units;      // [group]: times `rows`
  Buffer<uint8_t> rows;            // [kTile, kQueries, width], signed: for each sketch its part

  Tile(const Layout& layout, int32_t group)
      : Tile(layout, group, Layout::kBits == 4 ? round_up(layout.get().dim, sizeof(Bytes)) : 0) {}
  Tile(const Layout& layout, int32_t group, int32_t whole)
      : of_layout(layout), group(group), levels(kTile * places()),
        multiples(kTile * places() * 4), chosen(kTile * chosen_stride()),
        sums(kTile * registers() * kQueries), tops_of_scales(whole), product(whole),
        scaled(group * whole), scaled_units(group), rows(kTile * kQueries * whole) {}

  SketchLayout layout() const { return of_layout.get(); }
  // Queries of a KV head, in whole blocks.
  int32_t stride() const { return round_up(group, kQueries); }
  // Channels, padded.
  int32_t width() const { return round_up(layout().dim, kChannels); }
  // For detailed channels, in whole registers of `chosen`.
  int32_t places() const { return round_up(layout().num_channels, kPlaces); }
  // Of detailed channels.
  int32_t quads() const { return (layout().num_channels + kQuad - 1) / kQuad; }
  // That hold a number for each token.
  int32_t registers() const { return (layout().page_size + kTokens - 1) / kTokens * kVectors; }
  // Brings a third of a sketch that comes later into the cache, in the order in which steps need
  // them. Each step does so while it computes: a processor waits if many reads are under way.
  HISPARSE_INLINE void fetch_next(int32_t i, int32_t third) const {
    if (!last) return;
    // It begins within a line, so it ends in one more.
    const int32_t end = layout().num_bytes() - 1, lines = end / 64 + 2, part = (third + 2) % 3;
    for (int32_t line = lines * part / 3; line < lines * (part + 1) / 3; ++line) {
      __builtin_prefetch(sketches[i + kAhead] + std::min(64 * line, end), 0, 3);
    }
  }
  // Room for the last register that is written, wherever it begins.
  int32_t chosen_stride() const { return kQueries * (places() + kPlaces); }
};

HISPARSE_INLINE Floats scales_at(const uint8_t* codes) {
  const Words words = bit_cast<Words>(load_signed_bytes(codes)) & 255u;
  return bit_cast<Floats>((words + static_cast<uint32_t>(kScaleOffset)) << 20);
}

// The largest of `count` bytes.
HISPARSE_INLINE uint8_t largest(const uint8_t* bytes, int32_t count) {
  if (count < 16) return count == 0 ? uint8_t{0} : *std::max_element(bytes, bytes + count);
  const auto larger = [](Sixteen a, Sixteen b) { return a > b ? a : b; };
  Sixteen top = load_vector<Sixteen>(bytes + count - 16);
  for (int32_t i = 0; i + 16 <= count; i += 16) top = larger(top, load_vector<Sixteen>(bytes + i));
#ifdef __SSE4_1__
  // The least of eight 16-bit numbers is one instruction.
  const auto rest = bit_cast<__m128i>(~top);
  const __m128i least = _mm_minpos_epu16(_mm_min_epu8(rest, _mm_srli_epi16(rest, 8)));
  return static_cast<uint8_t>(~_mm_cvtsi128_si32(least));
#else
  top = larger(top, __builtin_shuffle(top, Sixteen{8, 9, 10, 11, 12, 13, 14, 15}));
  top = larger(top, __builtin_shuffle(top, Sixteen{4, 5, 6, 7}));
  top = larger(top, __builtin_shuffle(top, Sixteen{2, 3}));
  return std::max(top[0], top[1]);
#endif
}

#ifdef HISPARSE_SKETCH_AVX512
// The level of each scale, by how many codes it is below the least one that is a larger power of
// two: beyond 56 none. Halves are rounded to even numbers.
constexpr auto make_levels() {
  struct Levels { uint8_t of[64]; } levels{};
  for (int32_t below = 1; below < 64; ++below) {
    const int32_t power = (below + 7) / 8, unit = kBlock << power;
    const int32_t twice = 2 * kTopLevel * (kBlock + kBlock * power - below);
    const int32_t whole = (twice + unit) / (2 * unit);
    const bool tie = (twice + unit) % (2 * unit) == 0;
    levels.of[below] = static_cast<uint8_t>(whole - (tie ? whole % 2 : 0));
  }
  return levels;
}
constexpr auto kLevels = make_levels();
static_assert(kBlock == 8, "codes of scales in a power of two");

// The scales of the detailed channels as levels: whole numbers, of which kTopLevel stands for the
// power of two above the largest scale.
template <typename Layout>
HISPARSE_NOINLINE void decode_levels(Tile<Layout>& tile) {
  const int32_t channels = tile.layout().num_channels, count = tile.count, places = tile.places();
  uint8_t *levels = tile.levels.data(), *all = tile.multiples.data();
  const __m512i table = _mm512_loadu_si512(kLevels.of);
  Bytes lanes;  // of each lane's four bytes, the lane
  for (int i = 0; i < 64; ++i) lanes[i] = static_cast<uint8_t>(i / 4);
  constexpr __mmask64 once = 0xaaaaaaaaaaaaaaaa, twice = 0xcccccccccccccccc;  // of 0, 1, 2, 3 times
  for (int32_t i = 0; i < count; ++i, levels += places, all += 4 * places) {
    const uint8_t* codes = tile.sketches[i] + tile.layout().channel_scales();
    const uint32_t power = largest(codes, channels) / 8u + 1;
    tile.unit[i] = bit_cast<float>((power + kScaleOffset / 8) << 23) / kTopLevel;
    const __m512i above = _mm512_set1_epi8(static_cast<char>(8 * power));
    for (int32_t at = 0; at < channels; at += 64) {
      const int32_t left = channels - at;
      const __mmask64 some = left < 64 ? (1ull << left) - 1 : ~0ull;
      const __m512i below = _mm512_sub_epi8(above, _mm512_maskz_loadu_epi8(some, codes + at));
      const __m512i index = _mm512_min_epu8(below, _mm512_set1_epi8(63));
      const __m512i level = _mm512_maskz_permutexvar_epi8(some, index, table);
      const __m512i doubled = _mm512_add_epi8(level, level);
      _mm512_store_si512(levels + at, level);
      for (int32_t lane = 0; lane < std::min(left, 64); lane += kLanes) {
        const auto which = bit_cast<__m512i>(lanes + static_cast<uint8_t>(lane));
        const __m512i odd = _mm512_maskz_permutexvar_epi8(once, which, level);
        const __m512i more = _mm512_permutexvar_epi8(which, doubled);
        _mm512_store_si512(all + 4 * (at + lane), _mm512_mask_add_epi8(odd, twice, odd, more));
      }
    }
  }
}
#else
// The scales of the detailed channels as levels: whole numbers, of which kTopLevel stands for the
// power of two above the largest scale.
template <typename Layout>
HISPARSE_NOINLINE void decode_levels(Tile<Layout>& tile) {
  const int32_t channels = tile.layout().num_channels, count = tile.count, places = tile.places();
  uint8_t* all = tile.multiples.data();
  for (int32_t i = 0; i < count; ++i, all += 4 * places) {
    const uint8_t* codes = tile.sketches[i] + tile.layout().channel_scales();
    const uint32_t top = largest(codes, channels) + static_cast<uint32_t>(kScaleOffset);
    const uint32_t exponent = top / 8 + 1;
    // Products with levels lose eight bits.
    tile.unit[i] = bit_cast<float>(exponent << 23) * (256.0f / kTopLevel);
    const float inverse = bit_cast<float>((254 - exponent) << 23) * kTopLevel;
    for (int32_t at = 0; at < channels; at += kLanes) {
      uint8_t copy[kLanes] = {};
      const uint8_t* own = codes + at;
      if (at + kLanes > channels) {
        std::copy_n(own, channels - at, copy);
        own = copy;
      }
      // Adding this constant leaves the nearest integer in the low bits.
      const Floats level = scales_at(own) * inverse + 8388608.0f;
      const Bytes some = first_bytes(bit_cast<Bytes>(level));
      std::memcpy(all + 4 * at, &some, sizeof(some));
    }
  }
}
#endif

// Four bytes for each of up to four channels.
HISPARSE_INLINE void copy_codes(const uint8_t* packed, int32_t row, int32_t channels, int32_t left,
                                uint8_t* out) {
  std::memset(out, 0, 4 * kQuad);
  for (int32_t c = 0; c < channels; ++c) {
    std::copy_n(packed + c * row, std::min(4, left), out + 4 * c);
  }
}

}  // namespace hisparse
