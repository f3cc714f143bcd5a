// Products of a sketch's codes with queries, in integers of 8 bits: processors multiply bytes
// faster than floats.
#pragma once

#include "simd.h"

#include <functional>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace hisparse {

constexpr int32_t kQuad = 4;                     // channels that a 32-bit lane holds
constexpr int32_t kTokens = 16;                  // tokens of a block
constexpr int32_t kVectors = kTokens / kLanes;   // registers that hold a block's tokens

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__AVX512VBMI2__) && \
    defined(__AVX512VL__)
#define HISPARSE_SKETCH_AVX512
#endif

using Bytes = Vec<uint8_t, 4 * kLanes>;
using Sixteen = Vec<uint8_t, 16>;

// Sixteen bytes from p on, in every 16 bytes of a register.
HISPARSE_INLINE Bytes repeat_sixteen(const void* p) {
  const auto x = load_vector<Sixteen>(p);
#if defined(__AVX512BW__)
  return bit_cast<Bytes>(_mm512_broadcast_i32x4(bit_cast<__m128i>(x)));
#elif defined(__AVX2__)
  return bit_cast<Bytes>(_mm256_broadcastsi128_si256(bit_cast<__m128i>(x)));
#else
  return x;
#endif
}

// Within every 16 bytes: out[i] = x[index[i]].
HISPARSE_INLINE Bytes look_up(Bytes x, Bytes index) {
#if defined(__AVX512BW__)
  return bit_cast<Bytes>(_mm512_shuffle_epi8(bit_cast<__m512i>(x), bit_cast<__m512i>(index)));
#elif defined(__AVX2__)
  return bit_cast<Bytes>(_mm256_shuffle_epi8(bit_cast<__m256i>(x), bit_cast<__m256i>(index)));
#elif defined(__SSSE3__)
  return bit_cast<Bytes>(_mm_shuffle_epi8(bit_cast<__m128i>(x), bit_cast<__m128i>(index)));
#else
  return __builtin_shuffle(x, index);
#endif
}

// Rows and columns of every 16 bytes, as 4 x 4, change places.
HISPARSE_INLINE Bytes transpose_sixteens(Bytes x) {
  constexpr Sixteen order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return look_up(x, repeat_sixteen(&order));
}

// Four bytes from p on, in every lane.
HISPARSE_INLINE Bytes repeat_four(const void* p) {
  uint32_t x;
  std::memcpy(&x, p, sizeof(x));
  return bit_cast<Bytes>(x - Words{});
}

#ifdef HISPARSE_SKETCH_AVX512
// The codes of four channels, four bytes each, as the channels' levels [4 channels, 4 codes]. Lane
// i of the registers together has a byte for each channel, of token i % 4 * 4 + i / 4.
HISPARSE_INLINE void decode_quad(const uint8_t* packed, const uint8_t* levels, Bytes* out) {
  const Words bytes = bit_cast<Words>(transpose_sixteens(repeat_sixteen(packed)));
  const Bytes table = repeat_sixteen(levels);
  for (int v = 0; v < kVectors; ++v) {
    Words shift;
    for (int lane = 0; lane < kLanes; ++lane) shift[lane] = (v * kLanes + lane) / 4 * 2;
    const Words index = (bytes >> shift & 0x03030303u) | 0x0c080400u;
    out[v] = look_up(table, bit_cast<Bytes>(index));
  }
}
#else
// Levels, unsigned, times queries, signed, by bytes: the high byte of each product, rounded.
HISPARSE_INLINE Bytes times_levels(Bytes levels, Bytes queries) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  // One of the two products that are added is zero.
  const auto x = bit_cast<__m256i>(levels), y = bit_cast<__m256i>(queries);
  const __m256i low = _mm256_set1_epi16(255), half = _mm256_set1_epi16(128);
  const __m256i even = _mm256_maddubs_epi16(_mm256_and_si256(low, x), y);
  const __m256i odd = _mm256_maddubs_epi16(_mm256_andnot_si256(low, x), y);
  return bit_cast<Bytes>(
      _mm256_or_si256(_mm256_srli_epi16(_mm256_add_epi16(even, half), 8),
                      _mm256_andnot_si256(low, _mm256_add_epi16(odd, half))));
#else
  using Sixteens = Vec<int16_t, 2 * kLanes>;
  using Unsigned = Vec<uint16_t, 2 * kLanes>;
  const auto x = bit_cast<Unsigned>(levels);
  const auto y = bit_cast<Sixteens>(queries);
  const Sixteens even = bit_cast<Sixteens>(x & 255) * (y << 8 >> 8) + 128;
  const Sixteens odd = bit_cast<Sixteens>(x >> 8) * (y >> 8) + 128;
  return bit_cast<Bytes>((bit_cast<Unsigned>(even) >> 8) | (bit_cast<Unsigned>(odd) & 0xff00));
#endif
}

// The first bytes of four lanes, four times.
HISPARSE_INLINE Bytes first_bytes(Bytes x) {
  constexpr Sixteen firsts = {0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12};
  return look_up(x, repeat_sixteen(&firsts));
}

// The codes of four channels, four bytes each. Lane i of the registers together has a byte for each
// channel, of token i % 4 * 4 + i / 4.
HISPARSE_INLINE void decode_quad(const uint8_t* packed, const uint8_t*, Bytes* out) {
  const Words bytes = bit_cast<Words>(transpose_sixteens(repeat_sixteen(packed)));
  for (int v = 0; v < kVectors; ++v) {
    Words shift;
    for (int lane = 0; lane < kLanes; ++lane) shift[lane] = (v * kLanes + lane) / 4 * 2;
    out[v] = bit_cast<Bytes>(bytes >> shift & 0x03030303u);
  }
}
#endif

// Which tokens of a block register v holds.
HISPARSE_INLINE Ints token_of(int32_t v) {
  Ints token;
  for (int i = 0; i < kLanes; ++i) token[i] = i % 4 * 4 + (v * kLanes + i) / 4;
  return token;
}

// The level of the power of two above the largest scale.
#ifdef HISPARSE_SKETCH_AVX512
constexpr int32_t kTopLevel = 42;  // Three times as much has to fit beside a signed byte.
#else
constexpr int32_t kTopLevel = 255;
#endif

// sum + products of bytes, the first unsigned and at most 127, the second signed; four to a lane.
HISPARSE_INLINE Ints dot_bytes(Ints sum, Bytes a, Bytes b) {
#if defined(__AVX512VNNI__)
  return bit_cast<Ints>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(a),
                                            bit_cast<__m512i>(b)));
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16(bit_cast<__m512i>(a), bit_cast<__m512i>(b));
  return sum + bit_cast<Ints>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVXVNNI__)
  return bit_cast<Ints>(_mm256_dpbusd_avx_epi32(bit_cast<__m256i>(sum), bit_cast<__m256i>(a),
                                                bit_cast<__m256i>(b)));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b));
  return sum + bit_cast<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#elif defined(__ARM_FEATURE_DOTPROD)
  return bit_cast<Ints>(
      vdotq_s32(bit_cast<int32x4_t>(sum), bit_cast<int8x16_t>(a), bit_cast<int8x16_t>(b)));
#elif defined(__ARM_NEON)
  const auto x = bit_cast<int8x16_t>(a), y = bit_cast<int8x16_t>(b);
  const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
  return bit_cast<Ints>(vpadalq_s16(bit_cast<int32x4_t>(sum), vpaddq_s16(low, high)));
#else
  const Ints x = bit_cast<Ints>(a), y = bit_cast<Ints>(b);
  for (int i = 0; i < 32; i += 8) sum += (x >> i & 255) * (y << (24 - i) >> 24);
  return sum;
#endif
}

// Sums of products of codes and signed bytes. Without an instruction for four products they are kept
// in 16 bits, in pairs: of how many these are not too large, add_codes and scale_queries know.
#if (defined(__AVX512BW__) && !defined(__AVX512VNNI__)) || \
    (defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__))
using Sums = Vec<int16_t, 2 * kLanes>;
HISPARSE_INLINE Sums add_products(Sums sums, Bytes codes, Bytes x) {
#if defined(__AVX512BW__)
  return sums + bit_cast<Sums>(
                    _mm512_maddubs_epi16(bit_cast<__m512i>(codes), bit_cast<__m512i>(x)));
#else
  return sums + bit_cast<Sums>(
                    _mm256_maddubs_epi16(bit_cast<__m256i>(codes), bit_cast<__m256i>(x)));
#endif
}
HISPARSE_INLINE Ints join_pairs(Sums sums) {
#if defined(__AVX512BW__)
  return bit_cast<Ints>(_mm512_madd_epi16(bit_cast<__m512i>(sums), _mm512_set1_epi16(1)));
#else
  return bit_cast<Ints>(_mm256_madd_epi16(bit_cast<__m256i>(sums), _mm256_set1_epi16(1)));
#endif
}
#else
using Sums = Ints;
HISPARSE_INLINE Sums add_products(Sums sums, Bytes codes, Bytes x) {
  return dot_bytes(sums, codes, x);
}
HISPARSE_INLINE Ints join_pairs(Sums sums) { return sums; }
#endif

// The sum of the parts of four lanes, or how else `join` joins them.
template <typename T, int N, typename Join = std::plus<>>
HISPARSE_INLINE Vec<T, 4> join_fours(Vec<T, N> x, Join join = {}) {
  if constexpr (N == 4) {
    return x;
  } else {
    struct Halves { Vec<T, N / 2> low, high; };
    const auto [low, high] = bit_cast<Halves>(x);
    return join_fours<T, N / 2>(join(low, high), join);
  }
}

// Lanes of four vectors, summed: lane g of the result is the sum of x[g].
HISPARSE_INLINE Vec<float, 4> reduce_four(const Floats* x) {
  Ints low, left;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i / 4 * 4 + i % 4 / 2 + i % 2 * kLanes;
    left[i] = i / 4 * 4 + i % 2 + i % 4 / 2 * kLanes;
  }
  const auto ab = __builtin_shuffle(x[0], x[1], low) + __builtin_shuffle(x[0], x[1], low + 2);
  const auto cd = __builtin_shuffle(x[2], x[3], low) + __builtin_shuffle(x[2], x[3], low + 2);
  const Floats all = __builtin_shuffle(ab, cd, left) + __builtin_shuffle(ab, cd, left + 2);
  return join_fours<float, kLanes>(all);
}

}  // namespace hisparse
