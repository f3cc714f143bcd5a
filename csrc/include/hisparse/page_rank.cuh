// What select makes of a score: a number of any dtype as float32, its rank, and its share in the
// softmax of its head. No function here waits for other warps.
#pragma once

#include "hisparse/block.cuh"

#include <cfloat>
#include <cmath>

namespace hisparse {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(BFloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
__device__ inline float to_float(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, digits = (x.bits & 0x7fffu) << 13;
  // The product moves the exponent to float32's bias, and makes a number of a subnormal one.
  const uint32_t number = __float_as_uint(__uint_as_float(digits) * 0x1p112f);
  return __uint_as_float(sign | ((x.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u | digits : number));
}

__device__ inline bool is_invalid(float score) { return !(score <= FLT_MAX); }

// NaN as -inf, and inf as the largest number, so that a difference of scores is no NaN.
__device__ inline float finite(float score) {
  return score == score ? fminf(score, FLT_MAX) : -INFINITY;
}

// The rank of a forced page: that of inf, which no score has.
constexpr uint32_t kForcedRank = 0xff800000u;

__device__ inline uint32_t rank_of(float score) {
  // The sum makes -0 a 0. Negative floats have integers in the opposite order.
  const uint32_t bits = __float_as_uint(fmaxf(score, -FLT_MAX) + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The sum of exp(score - top) over some scores of a head, the largest of which is `top`.
struct Mass {
  float top = -INFINITY, total = 0.0f;

  // -inf everywhere: there is no maximum to subtract.
  __device__ static float subtracted(float top) { return top == -INFINITY ? 0.0f : top; }

  __device__ void add(const Mass& other) {
    const float highest = fmaxf(top, other.top), base = subtracted(highest);
    total = total * expf(top - base) + other.total * expf(other.top - base);
    top = highest;
  }

  // Adds the masses of a warp's lanes; all of them get the sum.
  __device__ void add_lanes() {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      Mass other;
      other.top = __shfl_xor_sync(kAllLanes, top, distance);
      other.total = __shfl_xor_sync(kAllLanes, total, distance);
      add(other);
    }
  }
};

// A page's share of a head's softmax is exp(score - base) * scale.
struct Shares {
  float base, scale;
};

}  // namespace hisparse
