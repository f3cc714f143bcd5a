// The functions of csrc/include/hisparse/ptx.cuh in C++, for fibers.
//
// A copy happens when it is waited for, or never: whoever reads before that reads poison. For races it
// writes when it begins, too.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace hisparse {

inline char* dynamic_shared() { return fibers::shared_of(fibers::running->own_block()); }

// Launches run one after the other; what is checked is that every thread calls it.
inline void wait_for_earlier_launches() { fibers::running->begin(); }

#define cluster_sync() (::fibers::running->cluster_barrier(FIBERS_HERE))
inline void cluster_arrive() {}
#define cluster_wait() cluster_sync()

template <typename T>
T of_block(const T& own, int block) {
  // Another block may run on before this read.
  fibers::perhaps_yield();
  fibers::Recording off(false);
  const char* const at = fibers::shared_of(block) +
                         (reinterpret_cast<const char*>(&own) - dynamic_shared());
  fibers::accessed(at, sizeof(T), fibers::AccessKind::kRead);
  T out;
  std::memcpy(&out, at, sizeof(T));
  return out;
}

inline void store_relaxed(int32_t* at, int32_t value) { atomicExch(at, value); }

inline const void* row_at(const void* first, uint32_t number, uint32_t each) {
  return static_cast<const char*>(first) + uint64_t{number} * each;
}

inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t which) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = both >> 8 * (which >> 4 * i & 7) & 255;
    out |= (which >> 4 * i & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return out;
}

inline double half_value(uint32_t bits) {
  const int exponent = bits >> 10 & 31, digits = bits & 1023;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return digits ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024 + digits, exponent - 25) : std::ldexp(digits, -24));
}

// Rounded to the nearest, of two to the even one.
inline uint16_t half_bits(double x) {
  if (std::isnan(x)) return 0x7fff;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  x = std::abs(x);
  if (x >= 65520) return sign | 0x7c00;
  const int exponent = x < 0x1p-14 ? -14 : std::ilogb(x);
  const auto digits = static_cast<int>(std::nearbyint(std::ldexp(x, 10 - exponent)));
  // A digit too many carries into the exponent.
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + digits);
}

inline uint32_t halves(double low, double high) {
  return half_bits(low) | static_cast<uint32_t>(half_bits(high)) << 16;
}
inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
  return halves(half_value(a) * half_value(b), half_value(a >> 16) * half_value(b >> 16));
}
inline uint32_t multiply_add_halves(uint32_t a, uint32_t b, uint32_t c) {
  return halves(half_value(a) * half_value(b) + half_value(c),
                half_value(a >> 16) * half_value(b >> 16) + half_value(c >> 16));
}
inline uint16_t to_half_bits(float x) { return half_bits(x); }
inline float power_of_two(float x) { return std::exp2(x); }
inline float log_of_two(float x) { return std::log2(x); }

// What all lanes of the warp bring.
inline std::array<uint64_t, fibers::kWarpSize> of_lanes(uint64_t value, const char* where) {
  fibers::Recording off(false);
  std::array<uint64_t, fibers::kWarpSize> out;
  std::memcpy(out.data(), fibers::running->meet(~0u, value, where), sizeof(out));
  return out;
}

inline void load_matrices(uint32_t (&out)[4], const void* row) {
  const auto rows = of_lanes(reinterpret_cast<uint64_t>(row), "load_matrices");
  const int g = fibers::running->lane() / 4, t = fibers::running->lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const auto number = [&](int r) {
      return static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(rows[8 * i + r])[g]);
    };
    out[i] = number(2 * t) | number(2 * t + 1) << 16;
  }
}

inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto pair = [](uint32_t x, uint32_t y) { return static_cast<uint64_t>(y) << 32 | x; };
  const auto upper = of_lanes(pair(a[0], a[2]), "multiply_add a"),
             lower = of_lanes(pair(a[1], a[3]), "multiply_add a + 8"),
             right = of_lanes(pair(b0, b1), "multiply_add b");
  const int g = fibers::running->lane() / 4, t = fibers::running->lane() % 4;
  for (int i = 0; i < 4; ++i) {
    double sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int own = k % 8 / 2, shift = 32 * (k / 8) + 16 * (k % 2);
      const double x = half_value((i < 2 ? upper : lower)[4 * g + own] >> shift & 0xffff);
      sum += x * half_value(right[4 * (2 * t + i % 2) + own] >> shift & 0xffff);
    }
    c[i] += static_cast<float>(sum);
  }
}
inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0) {
  multiply_add(c, {a[0], a[1], 0, 0}, b0, 0);
}

struct Copy {
  void* to;
  const void* from;
  int bytes;
};
struct Copies {
  std::vector<std::vector<Copy>> groups{1};
  unsigned num_failures = 0;
};
// Of the thread that runs: groups of copies under way, the last one still open. Those that a thread
// left behind when it ended are still made, by the next one; not those of a cluster that failed.
inline std::vector<std::vector<Copy>>& copies() {
  static Copies of_threads[fibers::kMaxCluster * fibers::kMaxThreads];
  Copies& own = of_threads[fibers::running->current()];
  if (own.num_failures != fibers::num_failures) own = Copies{{{}}, fibers::num_failures};
  return own.groups;
}

template <int kBytes>
void copy_async(void* shared, const void* global, bool there = true) {
  if (!there) return;
  fibers::Recording off(false);
  fibers::accessed(shared, kBytes, fibers::AccessKind::kWrite);
  const auto bits = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global);
  if (bits % kBytes != 0 && fibers::failure.empty()) fibers::failure = "an unaligned copy";
  copies().back().push_back({shared, global, kBytes});
}
inline void end_copies() {
  fibers::Recording off(false);
  copies().emplace_back();
}
template <int kLeft>
void wait_for_copies() {
  fibers::Recording off(false);
  auto& groups = copies();
  while (groups.size() > kLeft + 1) {
    for (const Copy& copy : groups.front()) {
      fibers::accessed(copy.from, copy.bytes, fibers::AccessKind::kRead);
      fibers::accessed(copy.to, copy.bytes, fibers::AccessKind::kWrite);
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace hisparse
