// Inner products of the queries of a group with one vector: a key, or the summary of a page.
#pragma once

#include "simd.h"

namespace hisparse {

template <typename T, int G>
HISPARSE_INLINE void dots_of(const float* q, const typename T::Raw* vector,
                             const typename T::Raw* ahead, int32_t dim, float* out,
                             int64_t stride) {
  Floats sums[G] = {};
  int32_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    __builtin_prefetch(ahead + d);
    const Floats x = T::load(vector + d);
    for (int g = 0; g < G; ++g) sums[g] += Float32::load(q + g * dim + d) * x;
  }
  for (int g = 0; g < G; ++g) {
    float total = sum(sums[g]);
    for (int32_t rest = d; rest < dim; ++rest) total += q[g * dim + rest] * T::one(vector[rest]);
    out[g * stride] = total;
  }
}

// q [group, dim] times vector [dim] -> out [group], `stride` apart. Vectors lie scattered, so
// `ahead`, a later vector, is prefetched.
template <typename T>
HISPARSE_INLINE void dots(const float* q, int32_t group, const typename T::Raw* vector,
                          const typename T::Raw* ahead, int32_t dim, float* out, int64_t stride) {
  int32_t left = group;
  for (; left >= 4; left -= 4, q += 4 * dim, out += 4 * stride) {
    dots_of<T, 4>(q, vector, ahead, dim, out, stride);
  }
  for (; left >= 2; left -= 2, q += 2 * dim, out += 2 * stride) {
    dots_of<T, 2>(q, vector, ahead, dim, out, stride);
  }
  if (left > 0) dots_of<T, 1>(q, vector, ahead, dim, out, stride);
}

}  // namespace hisparse
