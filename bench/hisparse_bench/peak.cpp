// What a processor can do at most: multiply-adds in registers, and a plain read of memory.
//
// Threads are those of the kernels (csrc/cpu/parallel.h), so that a busy core slows all alike.
#include "parallel.h"
#include "simd.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

using tvm::ffi::TensorView;

using hisparse::Floats, hisparse::kLanes, hisparse::kRegisters;

// Enough to hide the latency of a multiply-add; two registers hold the factors.
constexpr int kAccumulators = kRegisters - 4;

using Words = hisparse::Vec<int64_t, kLanes / 2>;
constexpr int64_t kVectorBytes = sizeof(Words);

// Multiply-adds of float32 in one round of one thread.
int64_t multiply_adds_per_round() { return kAccumulators * kLanes; }

// Runs `items` times `rounds`; the result only keeps the compiler from leaving them out.
int64_t multiply_add(int64_t items, int64_t rounds, int64_t threads) {
  std::atomic<int64_t> total{0};
  hisparse::parallel_for(items, static_cast<int>(threads), [&](int64_t) {
    const Floats factor = Floats{} + 0.999f, addend = Floats{} + 0.001f;
    Floats sums[kAccumulators];
#pragma GCC unroll 32
    for (int i = 0; i < kAccumulators; ++i) sums[i] = Floats{} + static_cast<float>(i);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
      for (int i = 0; i < kAccumulators; ++i) sums[i] = sums[i] * factor + addend;
    }
    float sum = 0;
#pragma GCC unroll 32
    for (int i = 0; i < kAccumulators; ++i) sum += sums[i][0];
    total += static_cast<int64_t>(sum);
  });
  return total;
}

// Reads a contiguous tensor in blocks that the threads claim, four parts of a block at a time: the
// fastest way found, in cache and out of it. Returns the exclusive or of all words.
int64_t read(const TensorView& data, int64_t threads) {
  constexpr int kStreams = 4, kVectors = 2;
  constexpr int64_t kBlock = 1 << 17, kStep = kVectors * kVectorBytes;
  const auto* bytes = static_cast<const char*>(data.data_ptr());
  constexpr int64_t kRound = kStreams * kStep;
  const int64_t size = data.numel() * data.dtype().bits / 8 / kRound * kRound;
  std::atomic<int64_t> total{0};
  const int64_t blocks = (size + kBlock - 1) / kBlock;
  hisparse::parallel_for(blocks, static_cast<int>(threads), [&](int64_t block) {
    const char* first = bytes + block * kBlock;
    const int64_t part = std::min(kBlock, size - block * kBlock) / kStreams;
    Words found[kStreams * kVectors] = {};
    for (int64_t at = 0; at < part; at += kStep) {
#pragma GCC unroll 8
      for (int i = 0; i < kStreams * kVectors; ++i) {
        Words x;
        std::memcpy(&x, first + i / kVectors * part + at + i % kVectors * kVectorBytes, sizeof(x));
        found[i] ^= x;
      }
    }
    for (const Words& x : found) total ^= x[0];
  });
  return total;
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(multiply_adds_per_round, multiply_adds_per_round);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(multiply_add, multiply_add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(read, read);

}  // namespace
