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
#include <type_traits>
#include <utility>
#include <vector>

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

#define HISPARSE_NOINLINE __attribute__((noinline))
#define HISPARSE_INLINE inline __attribute__((always_inline))
// The same for a lambda, between its parameters and its body.
#define HISPARSE_INLINED __attribute__((always_inline))

// Calls body(0) to body(N - 1), as constants. GCC keeps an array of vectors in registers only if all
// its indices are constants early on; a loop that it unrolls itself is too late.
template <typename Body, int... I>
HISPARSE_INLINE void unroll_over(std::integer_sequence<int, I...>, Body&& body) {
  (body(std::integral_constant<int, I>()), ...);
}

template <int N, typename Body>
HISPARSE_INLINE void unroll(Body&& body) {
  unroll_over(std::make_integer_sequence<int, N>(), body);
}

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

// x in a register. GCC would rather read memory again for each use.
HISPARSE_INLINE Floats in_register(Floats x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__SSE2__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

template <typename V>
HISPARSE_INLINE V load_vector(const void* p) {
  V x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

// Zeros that begin at a whole register, which makes access twice as fast.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count = 0) { resize(count); }
  void resize(size_t count) { registers_.resize(count * sizeof(T) / sizeof(Floats) + 1); }
  T* data() { return reinterpret_cast<T*>(registers_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(registers_.data()); }

 private:
  std::vector<Floats> registers_;
};

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

#ifdef __AVX2__
HISPARSE_INLINE Vec<int16_t> widen_to_16(const void* p) {
#ifdef __AVX512F__
  const auto x = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return bit_cast<Vec<int16_t>>(_mm256_cvtepi8_epi16(x));
#else
  const auto x = _mm_loadl_epi64(static_cast<const __m128i*>(p));
  return bit_cast<Vec<int16_t>>(_mm_cvtepi8_epi16(x));
#endif
}
#endif

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

// Integers that fit 16 or 8 bits, narrowed.
HISPARSE_INLINE void store_halves(uint16_t* p, Words x) {
#if defined(__AVX512F__)
  const __m256i narrow = _mm512_cvtepi32_epi16(bit_cast<__m512i>(x));
#elif defined(__AVX2__)
  struct Halves { __m128i low, high; };
  const auto [low, high] = bit_cast<Halves>(x);
  const __m128i narrow = _mm_packus_epi32(low, high);
#elif defined(__aarch64__)
  const uint16x4_t narrow = vmovn_u32(bit_cast<uint32x4_t>(x));
#else
  const auto narrow = __builtin_convertvector(x, Vec<uint16_t>);
#endif
  std::memcpy(p, &narrow, sizeof(narrow));
}

HISPARSE_INLINE void store_bytes(uint8_t* p, Words x) {
#if defined(__AVX512F__)
  const __m128i narrow = _mm512_cvtepi32_epi8(bit_cast<__m512i>(x));
#elif defined(__AVX2__)
  struct Halves { __m128i low, high; };
  const auto [low, high] = bit_cast<Halves>(x);
  const __m128i halves = _mm_packus_epi32(low, high), narrow = _mm_packus_epi16(halves, halves);
#elif defined(__aarch64__)
  const uint16x4_t halves = vmovn_u32(bit_cast<uint32x4_t>(x));
  const uint8x8_t narrow = vmovn_u16(vcombine_u16(halves, halves));
#else
  const auto narrow = __builtin_convertvector(x, Vec<uint8_t>);
#endif
  std::memcpy(p, &narrow, kLanes);
}

// Vectors of float16 need F16C on x86, which all processors with AVX2 have.
#if defined(__F16C__) || defined(__aarch64__)
#define HISPARSE_HAS_FLOAT16
using Halves = Vec<uint16_t>;

HISPARSE_INLINE Floats widen_float16(Halves x) {
#if defined(__AVX512F__)
  return bit_cast<Floats>(_mm512_cvtph_ps(bit_cast<__m256i>(x)));
#elif defined(__AVX2__)
  return bit_cast<Floats>(_mm256_cvtph_ps(bit_cast<__m128i>(x)));
#elif defined(__F16C__)
  return bit_cast<Floats>(_mm_cvtph_ps(_mm_set1_epi64x(bit_cast<int64_t>(x))));
#else
  return bit_cast<Floats>(vcvt_f32_f16(bit_cast<float16x4_t>(x)));
#endif
}
#endif

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

#ifdef HISPARSE_HAS_FLOAT16
struct Float16 {
  using Raw = uint16_t;
  static HISPARSE_INLINE float one(Raw x) { return widen_float16(Halves{x})[0]; }
  static HISPARSE_INLINE Floats load(const Raw* p) {
    return widen_float16(load_vector<Halves>(p));
  }
};
#endif

// e4m3fn. NaN reads as a number; no kernel here stores NaN.
struct Float8 {
  using Raw = uint8_t;
  // Exponent and fraction in a float's place are the number times 2^-120, subnormal ones too.
  static constexpr float kScale = 0x1p120f;
  static HISPARSE_INLINE float one_unscaled(Raw x) {
    return bit_cast<float>((x & 0x80u) << 24 | (x & 0x7fu) << 20);
  }
  static HISPARSE_INLINE Floats load_unscaled(const Raw* p) {
    // Sign-extended, so that the shift moves the sign to a float's sign bit.
    const Words bits = bit_cast<Words>(load_signed_bytes(p));
    return bit_cast<Floats>(bits << 20 & 0x87f00000u);
  }
  static HISPARSE_INLINE float one(Raw x) { return one_unscaled(x) * kScale; }
  static HISPARSE_INLINE Floats load(const Raw* p) {
#ifdef __AVX2__
    // As float16 times 2^-8: x86 takes 100 cycles to multiply a float that is subnormal.
    const auto bits = bit_cast<Halves>(widen_to_16(p));
    return widen_float16(bits << 7 & 0xbf80) * 256.0f;
#else
    return load_unscaled(p) * kScale;
#endif
  }
};

struct Int8 {
  using Raw = int8_t;
  static HISPARSE_INLINE float one(Raw x) { return x; }
  static HISPARSE_INLINE Floats load(const Raw* p) {
    return __builtin_convertvector(load_signed_bytes(p), Floats);
  }
};

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

// Brings a line into the second cache: the first is too small for what is read that much later.
HISPARSE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Joins two vectors, of which each half of 2 * Step lanes holds half of a sum: adds those of `a` in the
// first half, and those of `b` in the second one. A blend and one shuffle, where two shuffles would
// wait for each other.
template <int Step, int... I>
HISPARSE_INLINE Floats join_halves(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return __builtin_shuffle(a, b, Ints{(I & Step ? I + kLanes : I)...}) +
         __builtin_shuffle(a, b, Ints{(I & Step ? I + kLanes - Step : I + Step)...});
}

// The sums of N vectors, every one what `sum` gives, to the bit, in the lanes that are multiples of
// kLanes / N.
template <int N, int Step = kLanes / 2>
HISPARSE_INLINE Floats join_sums(const Floats* x) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
  if constexpr (Step == 0) {
    return *x;
  } else if constexpr (N == 1) {
    const Floats sums = join_halves<Step>(*x, *x, lanes);
    return join_sums<1, Step / 2>(&sums);
  } else {
    Floats joined[N / 2];
    unroll<N / 2>([&](auto i) HISPARSE_INLINED {
      joined[i] = join_halves<Step>(x[i], x[i + N / 2], lanes);
    });
    return join_sums<N / 2, Step / 2>(joined);
  }
}

template <typename V>
HISPARSE_INLINE V maximum(V a, V b) {
  return a > b ? a : b;
}

// 2^x for x <= 0, relative error about 2e-7; at least 2^-126, which adds nothing to a sum of 1.
HISPARSE_INLINE Floats exp2_of_nonpositive(Floats x) {
  // With the constant first, GCC 12 makes it one instruction.
  x = maximum(Floats{} - 126.0f, x);
  // Adding this constant leaves no bits for a fraction, which rounds to the nearest integer.
  const Floats shifted = x + 12582912.0f;
  const Floats f = x - (shifted - 12582912.0f);
  Floats poly = f * 1.3264727e-3f + 9.671513e-3f;
  poly = poly * f + 5.5507336e-2f;
  poly = poly * f + 2.4022242e-1f;
  poly = poly * f + 6.93147e-1f;
  poly = poly * f + 1.0f;
  // The integer stands in the low bits, and is added to the exponent.
  return bit_cast<Floats>(bit_cast<Ints>(poly) + (bit_cast<Ints>(shifted) << 23));
}

// Turns logits [count, G] into weights e^(logit - top), where top [G] is the maximum, and 0 below
// 2^-126; sums them in total [G]. `logits` is padded to whole vectors; G divides kLanes.
template <int G = 1>
inline void exponentiate(float* logits, int64_t count, float* top, float* total) {
  static_assert(kLanes % G == 0);
  const int64_t whole = (count * G + kLanes - 1) / kLanes * kLanes;
  std::fill(logits + count * G, logits + whole, -INFINITY);
  Floats highest = splat(-INFINITY), sums = {};
  for (int64_t i = 0; i < whole; i += kLanes) highest = maximum(highest, Float32::load(logits + i));
  for (int g = 0; g < G; ++g) {
    top[g] = highest[g];
    for (int lane = g + G; lane < kLanes; lane += G) top[g] = std::max(top[g], highest[lane]);
  }
  for (int lane = 0; lane < kLanes; ++lane) highest[lane] = top[lane % G];
  for (int64_t i = 0; i < whole; i += kLanes) {
    constexpr float kLog2E = 1.44269504f;
    const Floats power = (Float32::load(logits + i) - highest) * kLog2E;
    const Floats weight = power < -126.0f ? Floats{} : exp2_of_nonpositive(power);
    store(logits + i, weight);
    sums += weight;
  }
  for (int g = 0; g < G; ++g) {
    total[g] = 0;
    for (int lane = g; lane < kLanes; lane += G) total[g] += sums[lane];
  }
}

// Bit i is set if lane i is negative, as it is where a comparison holds.
HISPARSE_INLINE uint32_t signs(Ints x) {
#if defined(__AVX512F__)
  return _mm512_cmplt_epi32_mask(bit_cast<__m512i>(x), _mm512_setzero_si512());
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(bit_cast<__m256>(x)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(bit_cast<__m128>(x)));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= (x[lane] < 0) << lane;
  return bits;
#endif
}

// The natural logarithm of positive numbers that are not subnormal, to about 1e-6.
HISPARSE_INLINE Floats log_of(Floats x) {
  // x = 2^n * m with m in [2/3, 4/3), and log m by its odd series in (m - 1) / (m + 1).
  const Ints bits = bit_cast<Ints>(x) - 0x3f2aaaab;
  const Ints n = bits >> 23;
  const Floats m = bit_cast<Floats>((bits & 0x007fffff) + 0x3f2aaaab);
  const Floats z = (m - 1.0f) / (m + 1.0f), square = z * z;
  Floats poly = splat(2.0f / 9);
  poly = poly * square + 2.0f / 7;
  poly = poly * square + 2.0f / 5;
  poly = poly * square + 2.0f / 3;
  poly = poly * square + 2.0f;
  return __builtin_convertvector(n, Floats) * 0.693147181f + poly * z;
}

}  // namespace hisparse
