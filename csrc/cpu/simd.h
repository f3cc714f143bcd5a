// Sixteen floats at a time, as vector extensions of GCC and Clang, for any register width.
#pragma once

#ifdef __F16C__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace hisparse {

constexpr int32_t kLanes = 16;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));

#define HISPARSE_INLINE inline __attribute__((always_inline))

template <typename To, typename From>
HISPARSE_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

HISPARSE_INLINE Floats splat(float x) { return Floats{} + x; }

// GCC 12 converts number by number in one step, and takes four times the instructions in two.
HISPARSE_INLINE Ints widen(SignedBytes x) {
#ifdef __AVX512F__
  return bit_cast<Ints>(_mm512_cvtepi8_epi32(bit_cast<__m128i>(x)));
#else
  return __builtin_convertvector(__builtin_convertvector(x, Shorts), Ints);
#endif
}

// Element types of K, V and summaries; arithmetic is in float32.
struct Float32 {
  using Raw = float;
  static HISPARSE_INLINE float one(Raw x) { return x; }
  static HISPARSE_INLINE Floats load(const Raw* p) {
    Floats x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
};

struct BFloat16 {
  using Raw = uint16_t;
  static HISPARSE_INLINE float one(Raw x) {
    return bit_cast<float>(static_cast<uint32_t>(x) << 16);
  }
  static HISPARSE_INLINE Floats load(const Raw* p) {
    Halves x;
    std::memcpy(&x, p, sizeof(x));
    return bit_cast<Floats>(__builtin_convertvector(x, Words) << 16);
  }
};

// e4m3fn. NaN reads as a number; no kernel here stores NaN.
struct Float8 {
  using Raw = uint8_t;
  // Exponent and fraction in a float's place are the number times 2^-120, subnormal ones too.
  static constexpr float kScale = 0x1p120f;
  static HISPARSE_INLINE float one(Raw x) {
    const uint32_t bits = (x & 0x80u) << 24 | (x & 0x7fu) << 20;
    return bit_cast<float>(bits) * kScale;
  }
  static HISPARSE_INLINE Floats load(const Raw* p) {
    SignedBytes x;
    std::memcpy(&x, p, sizeof(x));
    // Sign-extended, so that the shift moves the sign to a float's sign bit.
    return bit_cast<Floats>((bit_cast<Words>(widen(x)) << 20) & 0x87f00000u) * kScale;
  }
};

#ifdef __F16C__
struct Float16 {
  using Raw = uint16_t;
  static HISPARSE_INLINE float one(Raw x) { return _cvtsh_ss(x); }
  static HISPARSE_INLINE Floats load(const Raw* p) {
    __m256 half[2];
    for (int i = 0; i < 2; ++i) {
      half[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i));
    }
    return bit_cast<Floats>(half);
  }
};
#endif

HISPARSE_INLINE void store(float* p, Floats x) { std::memcpy(p, &x, sizeof(x)); }

HISPARSE_INLINE float sum(Floats x) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  struct Two8 { Eight a, b; };
  struct Two4 { Four a, b; };
  const auto [a, b] = bit_cast<Two8>(x);
  const auto [c, d] = bit_cast<Two4>(a + b);
  const Four e = c + d;
  return (e[0] + e[2]) + (e[1] + e[3]);
}

HISPARSE_INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// e^x for x <= 0, relative error about 2e-7: 2^n * 2^f with a polynomial in f. 0 below -87.
HISPARSE_INLINE Floats exp_of_nonpositive(Floats x) {
  const Floats least = splat(-87.0f);
  const Floats scaled = maximum(x, least) * 1.44269504f;
  // Adding this constant leaves no bits for a fraction, which rounds to the nearest integer.
  const Floats magic = splat(12582912.0f);
  const Floats whole = (scaled + magic) - magic;
  const Floats f = (scaled - whole) * 0.693147181f;
  Floats poly = splat(1.0f / 5040);
  poly = poly * f + 1.0f / 720;
  poly = poly * f + 1.0f / 120;
  poly = poly * f + 1.0f / 24;
  poly = poly * f + 1.0f / 6;
  poly = poly * f + 0.5f;
  poly = poly * f + 1.0f;
  poly = poly * f + 1.0f;
  const Ints bits = (__builtin_convertvector(whole, Ints) + 127) << 23;
  return x < least ? Floats{} : poly * bit_cast<Floats>(bits);
}

// Turns logits into weights that are e^(logit - maximum), returns the maximum, and their sum in
// `total`. `logits` is padded to whole vectors.
inline float exponentiate(float* logits, int64_t count, float* total) {
  const int64_t whole = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(logits + count, logits + whole, -INFINITY);
  Floats highest = splat(-INFINITY);
  for (int64_t i = 0; i < whole; i += kLanes) highest = maximum(highest, Float32::load(logits + i));
  float top = highest[0];
  for (int lane = 1; lane < kLanes; ++lane) top = std::max(top, highest[lane]);
  Floats sums = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats weight = exp_of_nonpositive(Float32::load(logits + i) - top);
    store(logits + i, weight);
    sums += weight;
  }
  *total = sum(sums);
  return top;
}

}  // namespace hisparse
