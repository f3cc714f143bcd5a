// What a lane reads of a page's detailed channels: its parts of the factors of matrix products. It has
// channels of kEights matrices of eight, four of them or what is left.
#pragma once

#include "hisparse/ptx.cuh"
#include "hisparse/sketch_layout.h"

namespace hisparse {

// Two channels' codes of each eight, for the tokens of rows g = lane / 4 and g + 8 of a left factor. A
// code is two bits that are used where they are: as a subnormal float16 number, which tensor cores
// take exactly (https://doi.org/10.7717/peerj-cs.330). Its last bit is 2^(kLow - 24), in the rows from
// 8 on four times that.
template <int kEights, int kLow>
struct LaneCodes {
  uint32_t words[kEights == 4 ? 1 : kEights];

  // From slot `first` on, for the tokens of a word.
  __device__ void read(const SketchLayout& l, const uint8_t* sketch, int32_t first, int32_t word) {
    const uint8_t* at = sketch + l.codes() + word * l.code_bytes() + first * 4;
    if constexpr (kEights == 4) {
      words[0] = reinterpret_cast<const uint32_t*>(at)[lane_id()];
    } else {
      // The second channel's codes in the upper half.
#pragma unroll
      for (int e = 0; e < kEights; ++e) words[e] = at[32 * e + lane_id()] * (0x1001u << kLow);
    }
  }

  // Of eight `e`, as pairs of numbers: those of row g, and of row g + 8.
  __device__ void expand(int e, uint32_t& upper, uint32_t& lower) const {
    uint32_t word = words[kEights == 4 ? 0 : e];
    if constexpr (kEights == 4) word = 4 * e < kLow ? word << kLow : word >> (4 * e - kLow);
    upper = word & 0x00030003u << kLow;
    lower = word & 0x000c000cu << kLow;
  }
};

// The scales of the same channels; 0 beyond the last one.
template <int kEights>
struct LaneScales {
  uint32_t words[kEights == 4 ? 2 : kEights];

  __device__ void read(const SketchLayout& l, const uint8_t* sketch, int32_t first) {
    const uint8_t* at = sketch + l.channel_scales();
    const int32_t t = lane_id() % 4;
    if constexpr (kEights == 4) {
      first += 8 * t;
      const uint2 both = *reinterpret_cast<const uint2*>(at + first);
      words[0] = both.x, words[1] = both.y;
    }
#pragma unroll
    for (int i = 0; i < (kEights == 4 ? 2 : kEights); ++i) {
      const int32_t slot = first + (kEights == 4 ? 4 * i : 8 * i + 2 * t);
      if constexpr (kEights != 4) words[i] = *reinterpret_cast<const uint16_t*>(at + slot);
      if (l.num_channels == l.slots()) continue;
      const int32_t there = min(max(l.num_channels - slot, 0), 4);
      words[i] &= there == 4 ? ~0u : (1u << 8 * there) - 1;
    }
  }

  // Of eight `e`, as float16 numbers, times 2^5. Codes below 8 stand for scales under 2^-19: they
  // become less.
  __device__ uint32_t of(int e) const {
    const uint32_t word = words[kEights == 4 ? e / 2 : e];
    return permute_bytes(word, 0u, kEights == 4 && e % 2 == 1 ? 0x4342u : 0x4140u) << 7;
  }
};

}  // namespace hisparse
