// Vectors as wide as a register of the processor, as vector extensions of GCC and Clang.
//
// One source serves AVX-512 (16 floats), AVX2 (8), and SSE and NEON (4). Vectors of more than a
// register would work too, but GCC splits them, and shuffles and comparisons into single numbers.
#pragma once

#ifdef __SSE2__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace hisparse {

#if defined(__AVX512F__)
constexpr int32_t kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int32_t kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int32_t kLanes = 4, kRegisters = 32;
#else
constexpr int32_t kLanes = 4, kRegisters = 16;
#endif

template <typename T, int N>
struct VectorOf {
  typedef T Type __attribute__((vector_size(sizeof(T) * N)));
};

// N numbers of type T.
template <typename T, int N = kLanes>
using Vec = typename VectorOf<T, N>::Type;

using Floats = Vec<float>;
using Ints = Vec<int32_t>;
using Words = Vec<uint32_t>;

#define HISPARSE_INLINE inline __attribute__((always_inline))

template <typename To, typename From>
HISPARSE_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// x - 0 is x, -0 too, so that the compiler drops the subtraction.
template <typename V = Floats>
HISPARSE_INLINE V splat(float x) {
  return x - V{};
}

template <typename V>
HISPARSE_INLINE V load_vector(const void* p) {
  V x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

// Integers widened to 32 bits. Where GCC 12 converts a vector to another width by itself, it goes
// through halves or single numbers.
HISPARSE_INLINE Ints load_signed_bytes(const void* p) {
#if defined(__AVX512F__)
  return bit_cast<Ints>(_mm512_cvtepi8_epi32(bit_cast<__m128i>(load_vector<Vec<int8_t>>(p))));
#elif defined(__AVX2__)
  return bit_cast<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
#elif defined(__aarch64__)
  const int8x8_t x = bit_cast<int8x8_t>(vdup_n_s32(load_vector<int32_t>(p)));
  return bit_cast<Ints>(vmovl_s16(vget_low_s16(vmovl_s8(x))));
#else
  const auto wider = __builtin_convertvector(load_vector<Vec<int8_t>>(p), Vec<int16_t>);
  return __builtin_convertvector(wider, Ints);
#endif
}

HISPARSE_INLINE Words load_halves(const void* p) {
  const auto x = load_vector<Vec<uint16_t>>(p);
#if defined(__AVX512F__)
  return bit_cast<Words>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(x)));
#elif defined(__AVX2__)
  return bit_cast<Words>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(x)));
#elif defined(__aarch64__)
  return bit_cast<Words>(vmovl_u16(bit_cast<uint16x4_t>(x)));
#else
  return __builtin_convertvector(x, Words);
#endif
}

// Element types of K, V and summaries; arithmetic is in float32.
struct Float32 {
  using Raw = float;
  static HISPARSE_INLINE float one(Raw x) { return x; }
  static HISPARSE_INLINE Floats load(const Raw* p) { return load_vector<Floats>(p); }
};

struct BFloat16 {
  using Raw = uint16_t;
  static HISPARSE_INLINE float one(Raw x) {
    return bit_cast<float>(static_cast<uint32_t>(x) << 16);
  }
  static HISPARSE_INLINE Floats load(const Raw* p) {
    return bit_cast<Floats>(load_halves(p) << 16);
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
    // Sign-extended, so that the shift moves the sign to a float's sign bit.
    const Words bits = bit_cast<Words>(load_signed_bytes(p));
    return bit_cast<Floats>(bits << 20 & 0x87f00000u) * kScale;
  }
};

#if defined(__F16C__)
#define HISPARSE_HAS_FLOAT16
struct Float16 {
  using Raw = uint16_t;
  static HISPARSE_INLINE float one(Raw x) { return _cvtsh_ss(x); }
  static HISPARSE_INLINE Floats load(const Raw* p) {
    const auto x = load_vector<Vec<uint16_t>>(p);
#if defined(__AVX512F__)
    return bit_cast<Floats>(_mm512_cvtph_ps(bit_cast<__m256i>(x)));
#elif defined(__AVX2__)
    return bit_cast<Floats>(_mm256_cvtph_ps(bit_cast<__m128i>(x)));
#else
    return bit_cast<Floats>(_mm_cvtph_ps(_mm_set1_epi64x(bit_cast<int64_t>(x))));
#endif
  }
};
#elif defined(__aarch64__)
#define HISPARSE_HAS_FLOAT16
struct Float16 {
  using Raw = uint16_t;
  static HISPARSE_INLINE float one(Raw x) { return bit_cast<__fp16>(x); }
  static HISPARSE_INLINE Floats load(const Raw* p) {
    return bit_cast<Floats>(vcvt_f32_f16(load_vector<float16x4_t>(p)));
  }
};
#endif

template <typename V>
HISPARSE_INLINE void store(float* p, V x) {
  std::memcpy(p, &x, sizeof(x));
}

// Halves are joined, then their halves: few steps, and as precise as a sum in pairs.
template <int N>
HISPARSE_INLINE float sum_of(Vec<float, N> x) {
  if constexpr (N == 2) {
    return x[0] + x[1];
  } else {
    struct Halves { Vec<float, N / 2> low, high; };
    const auto [low, high] = bit_cast<Halves>(x);
    return sum_of<N / 2>(low + high);
  }
}

HISPARSE_INLINE float sum(Floats x) { return sum_of<kLanes>(x); }

template <typename V>
HISPARSE_INLINE V maximum(V a, V b) {
  return a > b ? a : b;
}

// e^x for x <= 0, relative error about 2e-7: 2^n * 2^f with a polynomial in f. 0 below -87.
template <typename V>
HISPARSE_INLINE V exp_of_nonpositive(V x) {
  using Whole = decltype(x < x);  // integers of the same width
  const V least = splat<V>(-87.0f);
  const V scaled = maximum(x, least) * 1.44269504f;
  // Adding this constant leaves no bits for a fraction, which rounds to the nearest integer.
  const V magic = splat<V>(12582912.0f);
  const V shifted = scaled + magic;
  const V f = (scaled - (shifted - magic)) * 0.693147181f;
  V poly = splat<V>(1.0f / 5040);
  poly = poly * f + 1.0f / 720;
  poly = poly * f + 1.0f / 120;
  poly = poly * f + 1.0f / 24;
  poly = poly * f + 1.0f / 6;
  poly = poly * f + 0.5f;
  poly = poly * f + 1.0f;
  poly = poly * f + 1.0f;
  // The integer stands in the low bits; the shift drops the constant's own.
  const Whole power = (bit_cast<Whole>(shifted) + 127) << 23;
  return x < least ? V{} : poly * bit_cast<V>(power);
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
