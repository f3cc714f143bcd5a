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
constexpr int32_t kShorts = 2 * kLanes;
constexpr int32_t kChosen = 32;  // channels that are chosen from at a time

constexpr int32_t round_up(int32_t count, int32_t unit) { return (count + unit - 1) / unit * unit; }

// What is decoded of each sketch, and scratch for kQueries queries. Rows end in zeros.
struct Tile {
  SketchLayout layout;
  int32_t width;      // channels, a multiple of kChosen
  int32_t places;     // for detailed channels, in whole registers
  int32_t quads;      // of detailed channels
  int32_t stride;     // of `chosen`: room for all channels, and for a store behind the last
  int32_t registers;  // that hold a number for each token
  int32_t count = 0;  // sketches that are there
  const uint8_t* sketches[kTile];
  int64_t queries[kTile];              // the head's first query
  float *tops[kTile], *totals[kTile];  // of the head's queries
  float unit[kTile];                   // times `scales` the scales
  float units[kTile][kQueries];        // times `sums` the logits
  std::vector<float> base;             // [kTile, width]
  std::vector<float> block_scales;     // [width / kBlock], of one sketch
  std::vector<int16_t> scales;         // [kTile, places]
  std::vector<Bytes> codes;            // [kTile, registers, quads]
  std::vector<int16_t> chosen;         // [kTile, kQueries, stride], queries in detailed channels
  std::vector<uint8_t> coefficients;   // [kTile, kQueries, 2 * places]
  std::vector<Ints> sums;              // [kTile, registers, kQueries]

  explicit Tile(const SketchLayout& l)
      : layout(l), width(round_up(l.dim, kChosen)), places(round_up(l.num_channels, kShorts)),
        quads((l.num_channels + kQuad - 1) / kQuad), stride(std::max(width, places) + kChosen),
        registers((l.page_size + kTokens - 1) / kTokens * kVectors), base(kTile * width),
        block_scales(round_up(width / kBlock, kLanes)), scales(kTile * places),
        codes(static_cast<size_t>(kTile) * registers * quads), chosen(kTile * kQueries * stride),
        coefficients(kTile * kQueries * 2 * places), sums(kTile * registers * kQueries) {}
};

HISPARSE_INLINE Floats scales_at(const uint8_t* codes) {
  const Words words = bit_cast<Words>(load_signed_bytes(codes)) & 255u;
  return bit_cast<Floats>((words + static_cast<uint32_t>(kScaleOffset)) << 20);
}

// The scales of kLanes channels from d on.
HISPARSE_INLINE Floats spread_scales(const float* block_scales, int32_t d) {
  if constexpr (kLanes > kBlock) {
    Ints half;
    for (int i = 0; i < kLanes; ++i) half[i] = i / kBlock;
    const float* some = block_scales + d / kBlock / kLanes * kLanes;
    return __builtin_shuffle(Float32::load(some), half + d / kBlock % kLanes);
  } else {
    return splat(block_scales[d / kBlock]);
  }
}

HISPARSE_NOINLINE inline void decode_base(Tile& tile) {
  const SketchLayout l = tile.layout;
  const int32_t blocks = l.blocks(), width = tile.width, count = tile.count;
  float *base = tile.base.data(), *scales = tile.block_scales.data();
  // Reads what lies behind the scales, but not behind the sketch.
  const int32_t readable = std::min(blocks, l.num_bytes() - l.block_scales() - kLanes + 1);
  for (int32_t i = 0; i < count; ++i, base += width) {
    const uint8_t *sketch = tile.sketches[i], *codes = sketch + l.block_scales();
    int32_t block = 0, d = 0;
    for (; block < readable; block += kLanes) store(scales + block, scales_at(codes + block));
    for (; block < blocks; ++block) scales[block] = scale_of(codes[block]);
    for (; d + kLanes <= l.dim; d += kLanes) {
      const Floats whole = __builtin_convertvector(load_signed_bytes(sketch + d), Floats);
      store(base + d, whole * spread_scales(scales, d));
    }
    for (; d < l.dim; ++d) base[d] = static_cast<int8_t>(sketch[d]) * scales[d / kBlock];
  }
}

HISPARSE_INLINE Sixteen larger(Sixteen a, Sixteen b) { return a > b ? a : b; }

// The largest of `count` bytes.
HISPARSE_INLINE uint8_t largest(const uint8_t* bytes, int32_t count) {
  if (count < 16) return count == 0 ? uint8_t{0} : *std::max_element(bytes, bytes + count);
  Sixteen top = load_vector<Sixteen>(bytes + count - 16);
  for (int32_t i = 0; i + 16 <= count; i += 16) top = larger(top, load_vector<Sixteen>(bytes + i));
  const Sixteen next8 = {8, 9, 10, 11, 12, 13, 14, 15}, next4 = {4, 5, 6, 7}, next2 = {2, 3};
  top = larger(top, look_up(top, next8));
  top = larger(top, look_up(top, next4));
  top = larger(top, look_up(top, next2));
  return std::max(top[0], top[1]);
}

// The scales of the detailed channels as fractions of a power of two, in 15 bits.
HISPARSE_NOINLINE inline void decode_scales(Tile& tile) {
  const int32_t channels = tile.layout.num_channels, count = tile.count, places = tile.places;
  int16_t* out = tile.scales.data();
  for (int32_t i = 0; i < count; ++i, out += places) {
    const uint8_t* codes = tile.sketches[i] + tile.layout.channel_scales();
    // The power of two above the largest scale.
    const uint32_t top = largest(codes, channels) + static_cast<uint32_t>(kScaleOffset);
    const uint32_t exponent = top / 8 + 1;
    tile.unit[i] = bit_cast<float>(exponent << 23);
    const float inverse = bit_cast<float>((254 + 15 - exponent) << 23);
    int32_t place = 0;
    if (channels >= kLanes) {
      // The last register overlaps with the one before.
      for (; place < channels; place += kLanes) {
        const int32_t at = std::min(place, channels - kLanes);
        const Floats scale = scales_at(codes + at) * inverse;
        store_shorts(out + at, __builtin_convertvector(scale, Ints));
      }
    }
    for (; place < channels; ++place) {
      out[place] = static_cast<int16_t>(scale_of(codes[place]) * inverse);
    }
  }
}

// Four bytes for each of up to four channels.
HISPARSE_INLINE void copy_codes(const uint8_t* packed, int32_t row, int32_t channels, int32_t left,
                                uint8_t* out) {
  std::memset(out, 0, 4 * kQuad);
  for (int32_t c = 0; c < channels; ++c) {
    std::copy_n(packed + c * row, std::min(4, left), out + 4 * c);
  }
}

HISPARSE_NOINLINE inline void decode_codes(Tile& tile) {
  const SketchLayout l = tile.layout;
  const int32_t row = l.code_bytes(), count = tile.count, quads = tile.quads;
  const int32_t whole = row == 4 ? l.num_channels / kQuad : 0;  // quads without gaps
  Bytes* out = tile.codes.data();
  for (int32_t i = 0; i < count; ++i) {
    const uint8_t* packed = tile.sketches[i] + l.dim;
    for (int32_t t = 0; t < row; t += 4, out += kVectors * quads) {
      Bytes codes[kVectors];
      int32_t quad = 0;
      for (; quad < whole; ++quad) {
        unpack_codes(packed + quad * 16, codes);
        for (int v = 0; v < kVectors; ++v) out[v * quads + quad] = codes[v];
      }
      for (; quad < quads; ++quad) {
        uint8_t copy[4 * kQuad];
        const int32_t first = quad * kQuad;
        copy_codes(packed + first * row + t, row, std::min(kQuad, l.num_channels - first), row - t,
                   copy);
        unpack_codes(copy, codes);
        for (int v = 0; v < kVectors; ++v) out[v * quads + quad] = codes[v];
      }
    }
  }
}

}  // namespace hisparse
