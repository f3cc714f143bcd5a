// Products of a sketch's two-bit codes with coefficients of 16 bits, in integers.
//
// A coefficient is split into its low byte, unsigned, and its high byte, signed: processors
// multiply bytes faster than floats.
#pragma once

#include "simd.h"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace hisparse {

constexpr int32_t kQuad = 4;                     // channels that a 32-bit lane holds
constexpr int32_t kTokens = 16;                  // tokens of a block
constexpr int32_t kVectors = kTokens / kLanes;   // registers that hold a block's tokens

using Bytes = Vec<uint8_t, 4 * kLanes>;
using Sixteen = Vec<uint8_t, 16>;

using Shorts = Vec<int16_t, 2 * kLanes>;

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
HISPARSE_INLINE Bytes shuffle_sixteens(Bytes x, Sixteen index) {
#if defined(__AVX512BW__)
  return bit_cast<Bytes>(_mm512_shuffle_epi8(bit_cast<__m512i>(x),
                                             bit_cast<__m512i>(repeat_sixteen(&index))));
#elif defined(__AVX2__)
  return bit_cast<Bytes>(_mm256_shuffle_epi8(bit_cast<__m256i>(x),
                                             bit_cast<__m256i>(repeat_sixteen(&index))));
#else
  return __builtin_shuffle(x, index);
#endif
}

// The codes of four channels, four bytes each, unpacked: lane i of the registers together has a
// byte for each channel, of token i % 4 * 4 + i / 4.
HISPARSE_INLINE void unpack_codes(const uint8_t* packed, Bytes* codes) {
  const Sixteen transpose = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const Words bytes = bit_cast<Words>(shuffle_sixteens(repeat_sixteen(packed), transpose));
  for (int v = 0; v < kVectors; ++v) {
    Words shift;
    for (int lane = 0; lane < kLanes; ++lane) shift[lane] = (v * kLanes + lane) / 4 * 2;
    codes[v] = bit_cast<Bytes>(bytes >> shift & 0x03030303u);
  }
}

// Four bytes from p on, in every lane.
HISPARSE_INLINE Bytes repeat_four(const void* p) {
  uint32_t x;
  std::memcpy(&x, p, sizeof(x));
  return bit_cast<Bytes>(x - Words{});
}

// Which tokens of a block register v holds.
HISPARSE_INLINE Ints token_of(int32_t v) {
  Ints token;
  for (int i = 0; i < kLanes; ++i) token[i] = i % 4 * 4 + (v * kLanes + i) / 4;
  return token;
}

// out[i] = x[index[i]].
HISPARSE_INLINE Sixteen look_up(Sixteen x, Sixteen index) {
#if defined(__SSSE3__)
  return bit_cast<Sixteen>(_mm_shuffle_epi8(bit_cast<__m128i>(x), bit_cast<__m128i>(index)));
#else
  return __builtin_shuffle(x, index);
#endif
}

// Numbers that fit into 16 bits.
HISPARSE_INLINE void store_shorts(int16_t* p, Ints x) {
#if defined(__AVX512BW__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bit_cast<__m512i>(x)));
#elif defined(__AVX2__)
  struct Halves { __m128i low, high; };
  const auto [low, high] = bit_cast<Halves>(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(low, high));
#else
  const auto shorts = __builtin_convertvector(x, Vec<int16_t>);
  std::memcpy(p, &shorts, sizeof(shorts));
#endif
}

// The sum of the parts of four lanes.
template <int N>
HISPARSE_INLINE Vec<float, 4> join_fours(Vec<float, N> x) {
  if constexpr (N == 4) {
    return x;
  } else {
    struct Halves { Vec<float, N / 2> low, high; };
    const auto [low, high] = bit_cast<Halves>(x);
    return join_fours<N / 2>(low + high);
  }
}

// a * b / 2^15, rounded.
HISPARSE_INLINE Shorts multiply_fractions(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return bit_cast<Shorts>(_mm512_mulhrs_epi16(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return bit_cast<Shorts>(_mm256_mulhrs_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#elif defined(__ARM_NEON)
  return bit_cast<Shorts>(vqrdmulhq_s16(bit_cast<int16x8_t>(a), bit_cast<int16x8_t>(b)));
#else
  const auto round = [](Ints x) { return (x + (1 << 14)) >> 15; };
  const Ints both = bit_cast<Ints>(a), other = bit_cast<Ints>(b);
  const Ints even = round((both << 16 >> 16) * (other << 16 >> 16));
  const Ints odd = round((both >> 16) * (other >> 16));
  return bit_cast<Shorts>((odd << 16) | (even & 0xffff));
#endif
}

// The sum of the two halves of each lane.
HISPARSE_INLINE Ints add_pairs(Shorts x) {
#if defined(__AVX512BW__)
  return bit_cast<Ints>(_mm512_madd_epi16(bit_cast<__m512i>(x), _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
  return bit_cast<Ints>(_mm256_madd_epi16(bit_cast<__m256i>(x), _mm256_set1_epi16(1)));
#else
  const Ints both = bit_cast<Ints>(x);
  return (both << 16 >> 16) + (both >> 16);
#endif
}

// Sums of products of codes with the low bytes of coefficients, and with the high ones.
//   CodeSums   what a sum is, one register
//   kMostQuads that one sum can hold
//   add_low    adds the products of a quad with four low bytes
//   add_high   adds those with four high bytes
//   join_sums  both as one
#if defined(__AVX512VNNI__)

using CodeSums = Ints;
constexpr int32_t kMostQuads = 1 << 16;

HISPARSE_INLINE CodeSums dot_fours(CodeSums sum, Bytes a, Bytes b) {
  return bit_cast<CodeSums>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(a),
                                                bit_cast<__m512i>(b)));
}
HISPARSE_INLINE CodeSums add_low(CodeSums sum, Bytes codes, Bytes bytes) {
  return dot_fours(sum, bytes, codes);
}
HISPARSE_INLINE CodeSums add_high(CodeSums sum, Bytes codes, Bytes bytes) {
  return dot_fours(sum, codes, bytes);
}
HISPARSE_INLINE Ints join_sums(CodeSums low, CodeSums high) { return low + (high << 8); }

#elif defined(__AVX2__)

using CodeSums = Shorts;  // of two channels each
constexpr int32_t kMostQuads = 32767 / (2 * 3 * 255);

// Pairs of a * b, added; a is unsigned, b signed.
HISPARSE_INLINE CodeSums dot_pairs(Bytes a, Bytes b) {
#if defined(__AVX512BW__)
  return bit_cast<CodeSums>(_mm512_maddubs_epi16(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#else
  return bit_cast<CodeSums>(_mm256_maddubs_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#endif
}
HISPARSE_INLINE CodeSums add_low(CodeSums sum, Bytes codes, Bytes bytes) {
  return sum + dot_pairs(bytes, codes);
}
HISPARSE_INLINE CodeSums add_high(CodeSums sum, Bytes codes, Bytes bytes) {
  return sum + dot_pairs(codes, bytes);
}
HISPARSE_INLINE Ints join_sums(CodeSums low, CodeSums high) {
  return add_pairs(low) + (add_pairs(high) << 8);
}

#else

using CodeSums = Ints;
constexpr int32_t kMostQuads = 1 << 16;

HISPARSE_INLINE CodeSums add_low(CodeSums sum, Bytes codes, Bytes bytes) {
#if defined(__ARM_FEATURE_DOTPROD)
  return bit_cast<CodeSums>(vdotq_u32(bit_cast<uint32x4_t>(sum), bit_cast<uint8x16_t>(codes),
                                      bit_cast<uint8x16_t>(bytes)));
#else
  const Words x = bit_cast<Words>(codes), y = bit_cast<Words>(bytes);
  for (int i = 0; i < 32; i += 8) sum += bit_cast<Ints>((x >> i & 3u) * (y >> i & 255u));
  return sum;
#endif
}
HISPARSE_INLINE CodeSums add_high(CodeSums sum, Bytes codes, Bytes bytes) {
#if defined(__ARM_FEATURE_DOTPROD)
  return bit_cast<CodeSums>(vdotq_s32(bit_cast<int32x4_t>(sum), bit_cast<int8x16_t>(codes),
                                      bit_cast<int8x16_t>(bytes)));
#else
  const Ints x = bit_cast<Ints>(codes), y = bit_cast<Ints>(bytes);
  for (int i = 0; i < 32; i += 8) sum += (x >> i & 3) * (y << (24 - i) >> 24);
  return sum;
#endif
}
HISPARSE_INLINE Ints join_sums(CodeSums low, CodeSums high) { return low + (high << 8); }

#endif

}  // namespace hisparse
