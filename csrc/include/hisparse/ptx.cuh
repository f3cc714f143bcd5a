// What C++ has no name for: a block's shared memory and that of its neighbours, the order of launches,
// matrix products of a warp, copies to shared memory that a warp does not wait for, arithmetic on two
// float16 numbers in a register, and writes of a number that others write meanwhile.
//
// tests/kernels/fibers/hisparse/ptx.cuh has the same functions in C++.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace hisparse {

__device__ inline char* dynamic_shared() {
  extern __shared__ __align__(16) char dynamic_shared_memory[];
  return dynamic_shared_memory;
}

__device__ inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Every thread of every kernel calls it before anything else, since a launch may begin before the ones
// in front of it have ended (launch.h). Returns when they have ended and what they wrote is visible.
// Then the next launch may begin, and do nothing but wait in turn.
__device__ inline void wait_for_earlier_launches() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A barrier of all threads of the blocks of a cluster, and so of this block's: what they wrote to
// shared memory before it is visible after it. Before sm_90 a block has no cluster.
__device__ inline void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// A barrier too, whose two halves are apart and which makes nothing visible.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// What block `block` of the cluster has in its shared memory where this one has `own`: 4 or 8 bytes.
template <typename T>
__device__ inline T of_block(const T& own, int block) {
#if __CUDA_ARCH__ >= 900
  uint32_t at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(at)
               : "r"(shared_address(&own)), "r"(block));
  uint32_t words[2];
  if constexpr (sizeof(T) == 8) {
    asm volatile("ld.shared::cluster.v2.b32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(words[0]) : "r"(at) : "memory");
  }
  T out;
  memcpy(&out, words, sizeof(T));
  return out;
#else
  return own;
#endif
}

// Writes a number that other threads of the block may write meanwhile: one of them stays.
__device__ inline void store_relaxed(int32_t* at, int32_t value) {
  asm volatile("st.relaxed.cta.b32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Row `number` of rows that are `each` bytes apart: one instruction.
__device__ inline const void* row_at(const void* first, uint32_t number, uint32_t each) {
  const void* out;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(out) : "r"(number), "r"(each), "l"(first));
  return out;
}

// Bytes a and b of `low` (0 to 3) and `high` (4 to 7), as the four nibbles of `which` say.
__device__ inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t which) {
  return __byte_perm(low, high, which);
}

// Two float16 numbers each.
__device__ inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ inline uint32_t multiply_add_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}
// The nearest float16 number.
__device__ inline uint16_t to_half_bits(float x) {
  uint16_t out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
  return out;
}

// 2^x and log2(x), to about 2^-22.
__device__ inline float power_of_two(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
__device__ inline float log_of_two(float x) {
  float out;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// Matrices of 8 x 8 float16 numbers, transposed: lane i gives the address of row i % 8, 16 bytes, of
// matrix i / 8, and gets the numbers (2 * (i % 4), i / 4) and (2 * (i % 4) + 1, i / 4) of each.
__device__ inline void load_matrices(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row)));
}
// c += a b of float16 numbers: a is 16 x 16, b 16 x 8. With g = lane / 4 and t = lane % 4, a lane has
//   a: (g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..), two numbers each
//   b: (2t.., g), (2t + 8.., g), two numbers each
//   c: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same where a is 16 x 8, its first two registers, and b 8 x 8.
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
}

// Copies of this thread, from global to shared memory; one that is not `there` does not happen, and is
// no branch. wait_for_copies<N> waits for all but the last N groups of them; other lanes see what is
// copied after a barrier.
template <int kBytes>
__device__ inline void copy_async(void* shared, const void* global, bool there = true) {
  if constexpr (kBytes == 16) {  // past the first cache
    asm volatile(
        "{\n\t.reg .pred there;\n\tsetp.ne.u32 there, %2, 0;\n\t"
        "@there cp.async.cg.shared.global [%0], [%1], 16;\n\t}" ::"r"(shared_address(shared)),
        "l"(global), "r"(static_cast<uint32_t>(there))
        : "memory");
  } else {
    asm volatile(
        "{\n\t.reg .pred there;\n\tsetp.ne.u32 there, %3, 0;\n\t"
        "@there cp.async.ca.shared.global [%0], [%1], %2;\n\t}" ::"r"(shared_address(shared)),
        "l"(global), "n"(kBytes), "r"(static_cast<uint32_t>(there))
        : "memory");
  }
}
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace hisparse
