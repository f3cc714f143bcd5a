// Latents in eight bits: rows of e4m3 codes, float32 scales and bfloat16, and how to decode them.
#pragma once

#include "simd.h"

#include <cstdint>
#include <cstring>

namespace hisparse {

// The order of bytes in a row: LatentRow in hisparse/kernels/quantize/op.py.
struct LatentRow {
  int32_t rank, tile, scales_at, rope_at, rope;
};

HISPARSE_INLINE void put(float* out, Floats x) { store(out, x); }
HISPARSE_INLINE void put(float* out, float x) { *out = x; }
HISPARSE_INLINE void put(uint16_t* out, Floats x) { store_halves(out, bit_cast<Words>(x) >> 16); }
HISPARSE_INLINE void put(uint16_t* out, float x) { *out = bit_cast<uint32_t>(x) >> 16; }

// Every number is exact in both types: a code times a power of two, or a bfloat16.
template <typename Out>
void decode_row(const uint8_t* x, const LatentRow& row, Out* out) {
  for (int32_t first = 0, tile = 0; first < row.rank; first += row.tile, ++tile) {
    float scale;
    std::memcpy(&scale, x + row.scales_at + 4 * tile, 4);
    int32_t d = first;
    for (; d + kLanes <= first + row.tile; d += kLanes) {
      put(out + d, Float8::load(x + d) * splat(scale));
    }
    for (; d < first + row.tile; ++d) put(out + d, Float8::one(x[d]) * scale);
  }
  for (int32_t d = 0; d < row.rope; ++d) {
    uint16_t bits;
    std::memcpy(&bits, x + row.rope_at + 2 * d, 2);
    put(out + row.rank + d, bit_cast<float>(static_cast<uint32_t>(bits) << 16));
  }
}

}  // namespace hisparse
