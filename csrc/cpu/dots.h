// Inner products of the queries of a group with vectors: keys, or the summaries of pages.
#pragma once

#include "simd.h"

#include <type_traits>

namespace hisparse {

// Vectors that are multiplied at once, so that a loaded query serves all of them. The sums take
// half of the registers.
constexpr int kVectors = kRegisters / 8;

// q [G, dim] times vectors x [R], each [dim] from `offset` on -> out [R, G]. Never inlined: loops
// around it would take its registers.
template <typename T, int G, int R>
HISPARSE_NOINLINE void dots_of(const float* q, const typename T::Raw* const* vectors,
                               int64_t offset, int32_t dim, float* out) {
  const typename T::Raw* x[R];
  unroll<R>([&](auto r) HISPARSE_INLINED { x[r] = vectors[r] + offset; });
  Floats sums[R][G] = {};
  int32_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    Floats part[R];
    unroll<R>([&](auto r) HISPARSE_INLINED { part[r] = T::load(x[r] + d); });
    unroll<G>([&](auto g) HISPARSE_INLINED {
      const Floats own = in_register(Float32::load(q + g * dim + d));
      unroll<R>([&](auto r) HISPARSE_INLINED { sums[r][g] += own * part[r]; });
    });
  }
  unroll<R>([&](auto r) HISPARSE_INLINED {
    if constexpr (G == 4) {
      store(out + r * G, sums_of_four(sums[r]));
    } else {
      unroll<G>([&](auto g) HISPARSE_INLINED { out[r * G + g] = sum(sums[r][g]); });
    }
  });
  for (; d < dim; ++d) {
    for (int r = 0; r < R; ++r) {
      for (int g = 0; g < G; ++g) out[r * G + g] += q[g * dim + d] * T::one(x[r][d]);
    }
  }
}

// Calls `body` with the number of queries of a block, and the first of them: four at a time.
template <typename Body>
HISPARSE_INLINE void for_blocks(int32_t group, Body&& body) {
  int32_t g = 0;
  for (; g + 4 <= group; g += 4) body(std::integral_constant<int, 4>(), g);
  for (; g + 2 <= group; g += 2) body(std::integral_constant<int, 2>(), g);
  if (g < group) body(std::integral_constant<int, 1>(), g);
}

HISPARSE_INLINE void prefetch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch(static_cast<const char*>(from) + at);
  }
}

// q [group, dim] times the tokens of a page, `stride` apart. The products of a block of G queries,
// g to g + G - 1, are [tokens, G] at out + g * room, from token `first` on. Pages lie scattered, so
// `ahead`, a later one, is prefetched.
template <typename T>
HISPARSE_INLINE void page_dots(const float* q, int32_t group, const typename T::Raw* page,
                               const typename T::Raw* ahead, int64_t stride, int32_t tokens,
                               int32_t dim, float* out, int64_t room, int64_t first) {
  const int64_t bytes = dim * static_cast<int64_t>(sizeof(typename T::Raw));
  const auto take = [&](auto count, int32_t t) {
    constexpr int R = decltype(count)::value;
    const typename T::Raw* x[R];
    for (int r = 0; r < R; ++r) {
      x[r] = page + (t + r) * stride;
      prefetch(ahead + (t + r) * stride, bytes);
    }
    for_blocks(group, [&](auto queries, int32_t g) {
      constexpr int G = decltype(queries)::value;
      dots_of<T, G, R>(q + g * dim, x, 0, dim, out + g * room + (first + t) * G);
    });
  };
  int32_t t = 0;
  for (; t + kVectors <= tokens; t += kVectors) take(std::integral_constant<int, kVectors>(), t);
  for (; t < tokens; ++t) take(std::integral_constant<int, 1>(), t);
}

}  // namespace hisparse
