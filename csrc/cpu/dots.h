// Inner products of the queries of a group with vectors: keys, or the summaries of pages. And sums of
// vectors, values, by weights of a group.
#pragma once

#include "simd.h"

#include <algorithm>
#include <type_traits>

namespace hisparse {

// Vectors that are multiplied at once, so that a loaded query serves all of them. The sums take
// half of the registers.
constexpr int kVectors = kRegisters / 8;

// Elements in parts: of kCount * kLanes elements, part<V> holds first(V), first(V) + kStep, and so
// on. Elements that are narrower than a float are unpacked with fewer instructions in parts than in
// order. Here they are in order: one part.
template <typename T>
struct InOrder {
  static constexpr int kCount = 1, kStep = 1;
  static constexpr int first(int) { return 0; }
  template <int V>
  static HISPARSE_INLINE Floats part(const typename T::Raw* p) {
    return T::load(p);
  }
};

// Parts of which the first half has the even elements, and the others the odd ones.
template <int Count>
struct EvenAndOdd {
  static constexpr int kCount = Count, kStep = 2;
  static constexpr int first(int v) {
    return v % (Count / 2) * 2 * kLanes + v / (Count / 2);
  }
};

// The parts that suit a type best.
template <typename T>
struct Parts : InOrder<T> {};

template <>
struct Parts<BFloat16> : EvenAndOdd<2> {
  template <int V>
  static HISPARSE_INLINE Floats part(const BFloat16::Raw* p) {
    const Words pairs = load_vector<Words>(p);
    return bit_cast<Floats>(V == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
};

#ifdef __AVX2__
// Float8 as float16 has it: times 1 / kFactor, which queries and sums take in.
struct Float8AsHalf : Float8 {
  static constexpr float kFactor = 256;
  static HISPARSE_INLINE float one(Raw x) { return Float8::one(x) / kFactor; }
  static HISPARSE_INLINE Floats load(const Raw* p) { return Float8::load(p) / kFactor; }
};

template <>
struct Parts<Float8AsHalf> : EvenAndOdd<4> {
  template <int V>
  static HISPARSE_INLINE Floats part(const uint8_t* p) {
    using Shorts = Vec<int16_t, 2 * kLanes>;
    Shorts bytes = load_vector<Shorts>(p);
    if constexpr (V < 2) bytes <<= 8;
    struct Each { Halves halves[2]; };
    // The shift to the right repeats the sign, which the mask drops.
    const Shorts kept = Shorts{} + static_cast<int16_t>(0xbf80);
    return widen_float16(bit_cast<Each>(bytes >> 1 & kept).halves[V % 2]);
  }
};
#endif

// Calls body(pairs, evens, odds) for every 2 * kLanes elements of EvenAndOdd parts: where they begin in
// order, and where the even and the odd ones begin part by part. Returns where the rest begins.
template <typename P, typename Body>
HISPARSE_INLINE int32_t for_pairs(int32_t dim, Body&& body) {
  constexpr int kHalf = P::kCount / 2 * kLanes;
  int32_t d = 0;
  for (; P::kStep == 2 && d + 2 * kHalf <= dim; d += 2 * kHalf) {
    for (int32_t at = 0; at < kHalf; at += kLanes) body(d + 2 * at, d + at, d + at + kHalf);
  }
  return d;
}

// Copies rows [count, dim], times `factor`, with their elements part by part.
template <typename P>
void split_in_parts(const float* rows, int64_t count, int32_t dim, float factor, float* out) {
  Ints even;
  for (int lane = 0; lane < kLanes; ++lane) even[lane] = 2 * lane;
  for (; count > 0; --count, rows += dim, out += dim) {
    int32_t d = for_pairs<P>(dim, [&](int32_t pairs, int32_t evens, int32_t odds) {
      const Floats x = Float32::load(rows + pairs), y = Float32::load(rows + pairs + kLanes);
      store(out + evens, __builtin_shuffle(x, y, even) * factor);
      store(out + odds, __builtin_shuffle(x, y, even + 1) * factor);
    });
    for (; P::kStep > 2 && d + P::kCount * kLanes <= dim; d += P::kCount * kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int v = 0; v < P::kCount; ++v) {
          out[d + v * kLanes + lane] = rows[d + lane * P::kStep + P::first(v)] * factor;
        }
      }
    }
    for (; d < dim; ++d) out[d] = rows[d] * factor;
  }
}

// Copies a row that lies part by part, times `factor`, in order.
template <typename P>
HISPARSE_INLINE void join_parts(const float* row, int32_t dim, float factor, float* out) {
  static_assert(P::kStep <= 2);
  Ints low;
  for (int lane = 0; lane < kLanes; ++lane) low[lane] = lane / 2 + lane % 2 * kLanes;
  int32_t d = for_pairs<P>(dim, [&](int32_t pairs, int32_t evens, int32_t odds) {
    const Floats x = Float32::load(row + evens), y = Float32::load(row + odds);
    store(out + pairs, __builtin_shuffle(x, y, low) * factor);
    store(out + pairs + kLanes, __builtin_shuffle(x, y, low + kLanes / 2) * factor);
  });
  for (; d < dim; ++d) out[d] = row[d] * factor;
}

// q [G, dim], part by part, times vectors x [R], each [dim] from `offset` on -> out [R, G]. Vectors
// `ahead` [R], to be read later, or none, are brought into the second cache meanwhile: a few lines at
// a time, as more would wait for each other, one vector after the other. Never inlined: loops around
// it would take its registers, and with more than one query a pointer for each of `ahead` too many.
template <typename T, int G, int R, typename P = Parts<T>>
HISPARSE_NOINLINE void dots_of(const float* q, const typename T::Raw* const* vectors,
                               const typename T::Raw* const* ahead, int64_t offset, int32_t dim,
                               float* out) {
  const typename T::Raw *x[R], *later[R];
  unroll<R>([&](auto r) HISPARSE_INLINED {
    x[r] = vectors[r] + offset;
    if (G == 1 && ahead != nullptr) later[r] = ahead[r] + offset;
  });
  int32_t line = 0;
  Floats sums[R][G] = {};
  int32_t d = 0;
  for (; d + P::kCount * kLanes <= dim; d += P::kCount * kLanes) {
    constexpr int32_t kLine = 64 / sizeof(typename T::Raw);
    if (ahead != nullptr && (P::kCount * kLanes >= kLine || d % kLine == 0)) {
      if constexpr (G == 1) {
        unroll<R>([&](auto r) HISPARSE_INLINED { prefetch(later[r] + d); });
      } else {
        unroll<R>([&](auto) HISPARSE_INLINED {
          prefetch(*ahead + offset + line);
          line += kLine;
          if (line >= dim) ++ahead, line = 0;
        });
      }
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
  constexpr int N = std::min(R * G, kLanes);
  unroll<R * G / N>([&](auto i) HISPARSE_INLINED {
    const Floats all = join_sums<N>(&sums[0][0] + i * N);
    if constexpr (N == kLanes) {
      store(out + i * N, all);
    } else {
      unroll<N>([&](auto j) HISPARSE_INLINED { out[i * N + j] = all[j * (kLanes / N)]; });
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
  dots_of<T, G, R, InOrder<T>>(q, vectors, nullptr, offset, dim, out);
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
      const auto* ahead = g == 0 && distance > 0 ? vectors + t + distance : nullptr;
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
      const auto* later = g == 0 ? vectors + kVectors : nullptr;
      if (count == kVectors) {
        dots_of<T, G, kVectors, InOrder<T>>(q + g * dim, vectors, later, 0, dim, products);
      } else {
        for (int32_t i = 0; i < count; ++i) {
          dots_of<T, G, 1, InOrder<T>>(q + g * dim, vectors + i, later ? later + i : nullptr, 0, dim,
                                       products + i * G);
        }
      }
    });
  }
}

// out [G, width] += weights [tokens, G] times C vectors of columns of `values`, from `offset` on, which
// are parts First and on. As large a share of the tokens that come `distance` later is brought into
// the cache meanwhile, line by line in order: the processor then fetches more by itself.
template <typename T, int G, int C, typename P, int First = 0>
HISPARSE_NOINLINE void add_columns(const float* weights, const typename T::Raw* const* values,
                                   int64_t distance, int32_t tokens, int32_t offset, int32_t width,
                                   float* out) {
  constexpr int kParts = std::min(C, P::kCount);
  static_assert(C % kParts == 0 && First + kParts <= P::kCount);
  Floats sums[G][C];
  unroll<G>([&](auto g) HISPARSE_INLINED {
    unroll<C>([&](auto c) HISPARSE_INLINED {
      sums[g][c] = Float32::load(out + g * width + c * kLanes);
    });
  });
  constexpr int32_t kLine = 64 / sizeof(typename T::Raw), kColumns = C * kLanes;
  const auto* ahead = values + distance + offset * tokens / width;
  int32_t column = offset * tokens % width;
  for (int32_t t = 0; t < tokens; ++t, weights += G) {
    const typename T::Raw* value = values[t] + offset - First * kLanes;
    for (int32_t at = 0; at < kColumns; at += kLine) {
      prefetch(*ahead + column);
      column += std::min(kLine, kColumns);
      if (column >= width) ++ahead, column = 0;
    }
    Floats x[C];
    unroll<C>([&](auto c) HISPARSE_INLINED {
      constexpr int kPart = First + c.value % kParts;
      x[c] = P::template part<kPart>(value + c / kParts * kParts * kLanes);
    });
    unroll<G>([&](auto g) HISPARSE_INLINED {
      const Floats weight = splat(weights[g]);
      unroll<C>([&](auto c) HISPARSE_INLINED { sums[g][c] += weight * x[c]; });
    });
  }
  unroll<G>([&](auto g) HISPARSE_INLINED {
    unroll<C>([&](auto c) HISPARSE_INLINED {
      store(out + g * width + c * kLanes, sums[g][c]);
    });
  });
}

// The same for all columns.
template <typename T, int G>
void add_tokens(const float* weights, const typename T::Raw* const* values, int64_t distance,
                int32_t tokens, int32_t width, float* out) {
  using P = Parts<T>;
  // Columns whose sums take half of the registers, and columns that are read together.
  constexpr int C = kRegisters / 2 / G, kTogether = std::max(C, P::kCount);
  int32_t d = 0;
  for (; d + kTogether * kLanes <= width; d += kTogether * kLanes) {
    unroll<kTogether / C>([&](auto i) HISPARSE_INLINED {
      const int32_t first = d + i * C * kLanes;
      add_columns<T, G, C, P, i * C>(weights, values, distance, tokens, first, width, out + first);
    });
  }
  for (; d + P::kCount * kLanes <= width; d += P::kCount * kLanes) {
    add_columns<T, G, P::kCount, P>(weights, values, distance, tokens, d, width, out + d);
  }
  for (; d + kLanes <= width; d += kLanes) {
    add_columns<T, G, 1, InOrder<T>>(weights, values, distance, tokens, d, width, out + d);
  }
  for (; d < width; ++d) {
    for (int32_t t = 0; t < tokens; ++t) {
      const float x = T::one(values[t][d]);
      for (int j = 0; j < G; ++j) out[j * width + d] += weights[t * G + j] * x;
    }
  }
}

}  // namespace hisparse
