// Numbers in eight bits under a power of two for each vector. Scales are derived as in
// hisparse/kernels/quantize/op.py.
#pragma once

#include "simd.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace hisparse {

constexpr int kFractionBits = 23;

// NaN stays NaN.
template <typename Number>
HISPARSE_INLINE Number within(Number x, Number most) {
  const Number least = -most;
  return x > most ? most : x < least ? least : x;
}

// A stored dtype: the constants of its ScaleRule, and how a scaled number becomes a code in the low
// byte of a word: one number, or a vector.
struct ToE4M3 {
  static constexpr uint32_t kCarry = (1u << kFractionBits) - 0x580000u;
  static constexpr int32_t kExponent = 8, kLeastScale = 112;
  static constexpr float kLargestHalf = 61440.0f;

  // x is below 432, infinite or NaN.
  template <typename Signed, typename Word, typename Number>
  static HISPARSE_INLINE Word code(Number x) {
    const Word bits = bit_cast<Word>(x), sign = bits >> 24 & 0x80u, positive = bits & 0x7fffffffu;
    const Signed magnitude = bit_cast<Signed>(positive);
    // Drops 20 bits of the fraction; 120 is the difference of the exponents' biases.
    const Word normal = (positive - (120u << 23) + 0x7ffffu + (positive >> 20 & 1u)) >> 20;
    // Subnormal ones are multiples of 2^-9: so are all numbers next to 2^14.
    const Word subnormal = bit_cast<Word>(bit_cast<Number>(positive) + 0x1p14f) - (141u << 23);
    const Word number = magnitude < (121 << 23) ? subnormal : normal;
    const Word beyond = magnitude > 0x7f800000 ? Word{} + 0x7fu : Word{} + 0x7eu;  // NaN, infinity
    return sign | (magnitude < 0x7f800000 ? number : beyond);
  }
};

struct ToInt8 {
  static constexpr uint32_t kCarry = (1u << kFractionBits) - 0x7f0000u;
  static constexpr int32_t kExponent = 6, kLeastScale = 103;
  static constexpr float kLargestHalf = 65024.0f;

  template <typename Signed, typename Word, typename Number>
  static HISPARSE_INLINE Word code(Number x) {
    const Number limited = within(x, Number{} + 127.0f);
    // Adding 3 * 2^22 leaves no bits for a fraction; the integer stands in the low bits.
    const Word number = bit_cast<Word>((limited == limited ? limited : Number{}) + 0x1.8p23f);
    return number & 0xffu;
  }
};

// codes and scale of one vector; magnitudes above `most` become `most`.
template <typename To, typename T>
void encode(const typename T::Raw* x, int64_t width, float most, uint8_t* codes, uint8_t* scale) {
  const Floats mosts = splat(most);
  // Bits of floats without their sign are in the order of the numbers.
  Ints largests = {};
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) {
    largests = maximum(largests, bit_cast<Ints>(within(T::load(x + d), mosts)) & 0x7fffffff);
  }
  int32_t largest = 0;
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, largests[lane]);
  for (; d < width; ++d) {
    largest = std::max(largest, bit_cast<int32_t>(within(T::one(x[d]), most)) & 0x7fffffff);
  }
  // A NaN has any fraction; the bits of infinity leave room for the carry.
  const uint32_t bits = std::min(static_cast<uint32_t>(largest), 0x7f800000u);
  const uint32_t carried = (bits + To::kCarry) >> kFractionBits;
  const int32_t found = std::max(static_cast<int32_t>(carried) - To::kExponent, To::kLeastScale);
  *scale = static_cast<uint8_t>(found);
  const float inverse = bit_cast<float>(static_cast<uint32_t>(254 - found) << kFractionBits);
  for (d = 0; d + kLanes <= width; d += kLanes) {
    const Floats scaled = within(T::load(x + d), mosts) * inverse;
    store_bytes(codes + d, To::template code<Ints, Words>(scaled));
  }
  for (; d < width; ++d) {
    const float scaled = within(T::one(x[d]), most) * inverse;
    codes[d] = static_cast<uint8_t>(To::template code<int32_t, uint32_t>(scaled));
  }
}

// The largest magnitude that is encoded, by whether numbers are float16.
template <typename To>
HISPARSE_INLINE float largest_encoded(bool is_half) {
  return is_half ? To::kLargestHalf : std::numeric_limits<float>::infinity();
}

}  // namespace hisparse
