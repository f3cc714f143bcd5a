// Inner products of the queries of a group with vectors: keys, or the summaries of pages.
#pragma once

#include "simd.h"

#include <algorithm>
#include <type_traits>

namespace hisparse {

// Vectors that are multiplied at once, so that a loaded query serves all of them. The sums take
// half of the registers.
constexpr int kVectors = kRegisters / 8;

// Elements in parts: of kCount * kLanes elements, part<V> holds first(V), first(V) + kCount, and so
// on. Elements that are narrower than a float are unpacked with fewer instructions in parts than in
// order. Here they are in order: one part.
template <typename T>
struct InOrder {
  static constexpr int kCount = 1;
  static constexpr int first(int) { return 0; }
  template <int V>
  static HISPARSE_INLINE Floats part(const typename T::Raw* p) {
    return T::load(p);
  }
};

// The parts that suit a type best.
template <typename T>
struct Parts : InOrder<T> {};

template <>
struct Parts<BFloat16> {
  static constexpr int kCount = 2;
  static constexpr int first(int v) { return v; }
  template <int V>
  static HISPARSE_INLINE Floats part(const BFloat16::Raw* p) {
    const Words pairs = load_vector<Words>(p);
    return bit_cast<Floats>(V == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
};

// Calls body(place, element) for the elements of a row: `place` counts them part by part.
template <typename P, typename Body>
HISPARSE_INLINE void for_parts(int32_t dim, Body&& body) {
  int32_t d = 0;
  for (; d + P::kCount * kLanes <= dim; d += P::kCount * kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int v = 0; v < P::kCount; ++v) {
        body(d + v * kLanes + lane, d + lane * P::kCount + P::first(v));
      }
    }
  }
  for (; d < dim; ++d) body(d, d);
}

// Copies rows [count, dim], times `factor`, with their elements part by part.
template <typename P>
void split_in_parts(const float* rows, int64_t count, int32_t dim, float factor, float* out) {
  for (; count > 0; --count, rows += dim, out += dim) {
    for_parts<P>(dim, [&](int32_t place, int32_t element) HISPARSE_INLINED {
      out[place] = rows[element] * factor;
    });
  }
}

// q [G, dim], part by part, times vectors x [R], each [dim] from `offset` on -> out [R, G]. Vectors
// `ahead` [R], to be read later, are brought into the second cache meanwhile: a few lines at a
// time, as more would wait for each other. Never inlined: loops around it would take its registers.
template <typename T, int G, int R, typename P = Parts<T>>
HISPARSE_NOINLINE void dots_of(const float* q, const typename T::Raw* const* vectors,
                               const typename T::Raw* const* ahead, int64_t offset, int32_t dim,
                               float* out) {
  const typename T::Raw *x[R], *later[R];
  unroll<R>([&](auto r) HISPARSE_INLINED {
    x[r] = vectors[r] + offset;
    later[r] = ahead[r] + offset;
  });
  Floats sums[R][G] = {};
  int32_t d = 0;
  for (; d + P::kCount * kLanes <= dim; d += P::kCount * kLanes) {
    constexpr int32_t kLine = 64 / sizeof(typename T::Raw);
    if (P::kCount * kLanes >= kLine || d % kLine == 0) {
      unroll<R>([&](auto r) HISPARSE_INLINED { prefetch(later[r] + d); });
    }
    unroll<P::kCount>([&](auto v) HISPARSE_INLINED {
      Floats part[R];
      unroll<R>([&](auto r) HISPARSE_INLINED { part[r] = P::template part<v.value>(x[r] + d); });
      unroll<G>([&](auto g) HISPARSE_INLINED {
        const Floats own = in_register(Float32::load(q + g * dim + d + v * kLanes));
        unroll<R>([&](auto r) HISPARSE_INLINED { sums[r][g] += own * part[r]; });
      });
    });
  }
  if constexpr (P::kCount > 1) {
    for (; d + kLanes <= dim; d += kLanes) {
      unroll<R>([&](auto r) HISPARSE_INLINED {
        const Floats part = T::load(x[r] + d);
        unroll<G>([&](auto g) HISPARSE_INLINED {
          sums[r][g] += Float32::load(q + g * dim + d) * part;
        });
      });
    }
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

// The same for queries in order.
template <typename T, int G, int R>
HISPARSE_INLINE void dots_of(const float* q, const typename T::Raw* const* vectors, int64_t offset,
                             int32_t dim, float* out) {
  dots_of<T, G, R, InOrder<T>>(q, vectors, vectors, offset, dim, out);
}

// Calls `body` with the number of queries of a block, and the first of them: four at a time.
template <typename Body>
HISPARSE_INLINE void for_blocks(int32_t group, Body&& body) {
  int32_t g = 0;
  for (; g + 4 <= group; g += 4) body(std::integral_constant<int, 4>(), g);
  for (; g + 2 <= group; g += 2) body(std::integral_constant<int, 2>(), g);
  if (g < group) body(std::integral_constant<int, 1>(), g);
}

// Queries [group, dim], part by part, times `count` vectors, while those that come `distance` later
// are brought into the cache. The products of a block of G queries, g to g + G - 1, are [count, G]
// at out + g * room.
template <typename T, typename P = Parts<T>>
HISPARSE_INLINE void group_dots(const float* q, int32_t group,
                                const typename T::Raw* const* vectors, int64_t distance,
                                int64_t count, int32_t dim, float* out, int64_t room) {
  const auto take = [&](auto number, int64_t t) {
    constexpr int R = decltype(number)::value;
    for_blocks(group, [&](auto queries, int32_t g) {
      constexpr int G = decltype(queries)::value;
      const auto* ahead = vectors + t + (g == 0 ? distance : 0);
      dots_of<T, G, R, P>(q + g * dim, vectors + t, ahead, 0, dim, out + g * room + t * G);
    });
  };
  int64_t t = 0;
  for (; t + kVectors <= count; t += kVectors) take(std::integral_constant<int, kVectors>(), t);
  for (; t < count; ++t) take(std::integral_constant<int, 1>(), t);
}

// q [group, dim], in order, times the tokens of a page, `stride` apart, while those of a later
// page, `ahead`, are brought into the cache. The products of a block of G queries, g to g + G - 1, are
// [tokens, G] at out + g * room.
template <typename T>
HISPARSE_INLINE void page_dots(const float* q, int32_t group, const typename T::Raw* page,
                               const typename T::Raw* ahead, int64_t stride, int32_t tokens,
                               int32_t dim, float* out, int64_t room) {
  const typename T::Raw* vectors[2 * kVectors];
  for (int32_t t = 0; t < tokens; t += kVectors) {
    const int32_t count = std::min(tokens - t, kVectors);
    for (int32_t i = 0; i < count; ++i) {
      vectors[i] = page + (t + i) * stride;
      vectors[kVectors + i] = ahead + (t + i) * stride;
    }
    for_blocks(group, [&](auto queries, int32_t g) {
      constexpr int G = decltype(queries)::value;
      float* products = out + g * room + t * G;
      const auto* later = vectors + (g == 0 ? kVectors : 0);
      if (count == kVectors) {
        dots_of<T, G, kVectors, InOrder<T>>(q + g * dim, vectors, later, 0, dim, products);
      } else {
        for (int32_t i = 0; i < count; ++i) {
          dots_of<T, G, 1, InOrder<T>>(q + g * dim, vectors + i, later + i, 0, dim,
                                       products + i * G);
        }
      }
    });
  }
}

}  // namespace hisparse
