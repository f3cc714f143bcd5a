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

// All queries of a call, as floats and as bytes, padded with zeros.
struct Queries {
  int32_t width;
  int32_t blocks;               // of kQueries queries that share a KV head
  Buffer<float>      floats;    // [count, width]
  Buffer<int8_t>      rows;     // [KV heads of all requests, blocks, width, kQueries]
  Buffer<float>      units;     // [KV heads of all requests, blocks, kQueries]: times `rows` the query

  // queries [heads * group, dim]
  Queries(const float* queries, int64_t heads, int32_t group, int32_t dim)
      : width(round_up(dim, kChosen)), blocks(round_up(group, kQueries) / kQueries),
        floats(heads * group * width), rows(heads * blocks * width * kQueries),
        units(heads * blocks * kQueries) {
    for (int64_t i = 0; i < heads * group; ++i) {
      const float* query = queries + i * dim;
      std::copy_n(query, dim, floats.data() + i * width);
      float top = 0;
      for (int32_t d = 0; d < dim; ++d) top = std::max(top, std::abs(query[d]));
      const int64_t block = i / group * blocks + i % group / kQueries, own = i % group % kQueries;
      units.data()[block * kQueries + own] = top / 127;
      const float scale = top > 0 ? 127 / top : 0;
      int8_t* row = rows.data() + block * width * kQueries + own;
      for (int32_t d = 0; d < dim; ++d, row += kQueries) {
        const float whole = query[d] * scale;
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

}  // namespace hisparse
