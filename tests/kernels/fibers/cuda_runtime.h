// Stands in for CUDA's header of this name, so that g++ compiles device and launch code as it is.
// Memory is the host's, streams do nothing, and a launch runs its clusters of blocks one after the
// other as fibers, in random order.
#pragma once

#include "fibers.h"

#include <algorithm>
#include <cmath>
#include <functional>

#define __global__ static
#define __device__
#define __host__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __launch_bounds__(...)
#define __noinline__ __attribute__((noinline))

#define FIBERS_TEXT_(x) #x
#define FIBERS_TEXT(x) FIBERS_TEXT_(x)
#define FIBERS_HERE __FILE__ ":" FIBERS_TEXT(__LINE__)

#define threadIdx (::fibers::running->thread)
#define blockIdx (::fibers::running->block)

inline fibers::Index &gridDim = fibers::cluster().grid_size, &blockDim = fibers::cluster().block_size;

#define __syncthreads() static_cast<void>(::fibers::running->barrier(false, FIBERS_HERE))
#define __syncthreads_count(x) (::fibers::running->barrier((x), FIBERS_HERE))
#define __syncthreads_or(x) (::fibers::running->barrier((x), FIBERS_HERE) > 0)
#define __syncwarp() static_cast<void>(::fibers::running->meet(~0u, 0, FIBERS_HERE, true))
#define __ballot_sync(mask, x) (::fibers::ballot((mask), (x), FIBERS_HERE))
#define __any_sync(mask, x) (::fibers::ballot((mask), (x), FIBERS_HERE) != 0)
#define __all_sync(mask, x) (::fibers::ballot((mask), (x), FIBERS_HERE) == ~0u)
#define __shfl_sync(mask, x, lane) (::fibers::shuffle((mask), (x), (lane), FIBERS_HERE))
#define __reduce_add_sync(mask, x) (::fibers::reduce((mask), (x), std::plus<>(), FIBERS_HERE))
#define __reduce_max_sync(mask, x) \
  (::fibers::reduce((mask), (x), [](auto a, auto b) { return std::max(a, b); }, FIBERS_HERE))
#define __shfl_up_sync(mask, x, by) \
  (::fibers::shuffle((mask), (x), ::fibers::lane_above((by)), FIBERS_HERE))
#define __shfl_xor_sync(mask, x, by) \
  (::fibers::shuffle((mask), (x), ::fibers::running->lane() ^ (by), FIBERS_HERE))

namespace fibers {

inline unsigned ballot(unsigned mask, bool vote, const char* where) {
  const uint64_t* votes = running->meet(mask, vote, where);
  unsigned bits = 0;
  for (int i = 0; i < kWarpSize; ++i) bits |= static_cast<unsigned>(votes[i]) << i;
  return bits;
}

template <typename T>
T shuffle(unsigned mask, T value, int lane, const char* where) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const uint64_t* all = running->meet(mask, bits, where);
  std::memcpy(&value, &all[lane % kWarpSize], sizeof(T));
  return value;
}

template <typename T, typename Combine>
T reduce(unsigned mask, T value, Combine combine, const char* where) {
  const uint64_t* all = running->meet(mask, value, where);
  T out = static_cast<T>(all[0]);
  for (int i = 1; i < kWarpSize; ++i) out = combine(out, static_cast<T>(all[i]));
  return out;
}

inline int lane_above(int by) { return std::max(running->lane() - by, 0); }

// Another thread may come first at any atomic.
inline void perhaps_yield() {
  if (random_below(4) == 0) running->yield();
}

template <typename T, typename Change>
T atomic(T* at, Change change) {
  perhaps_yield();
  Recording off(false);
  accessed(at, sizeof(T), AccessKind::kAtomic);
  const T old = *at;
  *at = change(old);
  return old;
}

}  // namespace fibers

template <typename T>
T atomicAdd(T* at, T value) {
  return fibers::atomic(at, [=](T old) { return old + value; });
}
template <typename T>
T atomicMin(T* at, T value) {
  return fibers::atomic(at, [=](T old) { return std::min(old, value); });
}
template <typename T>
T atomicMax(T* at, T value) {
  return fibers::atomic(at, [=](T old) { return std::max(old, value); });
}
template <typename T>
T atomicOr(T* at, T value) {
  return fibers::atomic(at, [=](T old) { return old | value; });
}
template <typename T>
T atomicExch(T* at, T value) {
  return fibers::atomic(at, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* at, T expected, T value) {
  return fibers::atomic(at, [=](T old) { return old == expected ? value : old; });
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
template <typename T>
T __ldcs(const T* at) {
  return *at;
}
using std::max;
using std::min;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#include "host_api.h"
