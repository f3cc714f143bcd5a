// The queries of a sketch_score, and their values in the channels that a sketch has in detail.
#pragma once

#include "simd.h"
#include "sketch_decode.h"
#include "sketch_dot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

namespace hisparse {

// All queries of a call, as floats and as shorts, padded with zeros.
struct Queries {
  int32_t width;
  std::vector<float> floats;    // [count, width]
  std::vector<int16_t> shorts;  // [count, width]: times `units` the query
  std::vector<float> units;     // [count], and room for a vector

  // queries [count, dim]
  Queries(const float* queries, int64_t count, int32_t dim) : width(round_up(dim, kChosen)) {
    floats.resize(count * width);
    shorts.resize(count * width);
    units.resize(count + kQueries);
    for (int64_t i = 0; i < count; ++i) {
      const float* query = queries + i * dim;
      float top = 0;
      for (int32_t d = 0; d < dim; ++d) top = std::max(top, std::abs(query[d]));
      units[i] = top / 32767;
      const float scale = top > 0 ? 32767 / top : 0;
      for (int32_t d = 0; d < dim; ++d) {
        floats[i * width + d] = query[d];
        const float whole = query[d] * scale;
        shorts[i * width + d] = static_cast<int16_t>(whole + (whole < 0 ? -0.5f : 0.5f));
      }
    }
  }
};

#if !defined(__AVX512VBMI2__)
// Indexes that move the halves whose bits are set to the front.
constexpr std::array<std::array<uint8_t, 16>, 256> make_fronts() {
  std::array<std::array<uint8_t, 16>, 256> fronts{};
  for (int mask = 0; mask < 256; ++mask) {
    int place = 0;
    for (int bit = 0; bit < 8; ++bit) {
      if (!(mask >> bit & 1)) continue;
      fronts[mask][place++] = static_cast<uint8_t>(2 * bit);
      fronts[mask][place++] = static_cast<uint8_t>(2 * bit + 1);
    }
  }
  return fronts;
}
alignas(64) constexpr auto kFronts = make_fronts();
#endif

// The queries' values in the channels that a mask of `count` bytes names, ascending.
template <int G>
HISPARSE_INLINE void choose(const uint8_t* mask, int32_t count, const int16_t* queries,
                            int32_t width, int16_t* chosen, int32_t stride) {
#if defined(__AVX512VBMI2__)
  for (int32_t byte = 0; byte < count; byte += 4, queries += kChosen) {
    uint32_t bits = 0;
    if (count - byte >= 4) {
      std::memcpy(&bits, mask + byte, 4);
    } else {
      for (int32_t i = byte; i < count; ++i) bits |= uint32_t{mask[i]} << (i - byte) * 8;
    }
    for (int g = 0; g < G; ++g) {
      const auto x = bit_cast<__m512i>(load_vector<Shorts>(queries + g * width));
      const auto front = bit_cast<Shorts>(_mm512_maskz_compress_epi16(bits, x));
      std::memcpy(chosen + g * stride, &front, sizeof(front));
    }
    chosen += __builtin_popcount(bits);
  }
#else
  for (int32_t byte = 0; byte < count; ++byte, queries += 8) {
    const auto front = load_vector<Sixteen>(kFronts[mask[byte]].data());
    for (int g = 0; g < G; ++g) {
      const Sixteen x = look_up(load_vector<Sixteen>(queries + g * width), front);
      std::memcpy(chosen + g * stride, &x, sizeof(x));
    }
    chosen += __builtin_popcount(mask[byte]);
  }
#endif
}

}  // namespace hisparse
