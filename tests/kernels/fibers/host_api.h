// The calls of CUDA's runtime that launch code makes.
#pragma once

#include <set>
#include <utility>

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaMemcpyKind { cudaMemcpyDefault };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost };
struct cudaPointerAttributes {
  cudaMemoryType type;
};

namespace fibers {

inline std::set<const void*> unpinned;  // addresses that tests say are not pinned
inline size_t shared_limit = kSharedBytes;
inline size_t shared_granted = 0;  // by the last cudaFuncSetAttribute
inline uintptr_t piece_bytes = 0;  // pieces of page-locked memory end at multiples; 0: one piece

// CUDA refuses a copy that begins in one registration and ends in another.
inline bool in_one_piece(const void* at, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(at);
  return piece_bytes == 0 || first / piece_bytes == (first + bytes - 1) / piece_bytes;
}

inline cudaError_t fault(const std::string& what) {
  if (failure.empty()) failure = what;
  return cudaErrorLaunchFailure;
}

// Poisons what is asked for and guards what is behind it.
inline void poison(size_t bytes) {
  std::memset(hisparse::dynamic_shared_memory, kPoison, bytes + kGuardBytes);
  forget_shared_accesses();
}

inline bool guard_is_whole(size_t bytes) {
  const char* guard = hisparse::dynamic_shared_memory + bytes;
  return std::all_of(guard, guard + kGuardBytes,
                     [](char c) { return static_cast<unsigned char>(c) == kPoison; });
}

}  // namespace fibers

inline const char* cudaGetErrorString(cudaError_t) { return fibers::failure.c_str(); }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const bool shared = which == cudaDevAttrMaxSharedMemoryPerBlockOptin;
  *value = shared ? static_cast<int>(fibers::shared_limit) : fibers::max_blocks;
  return cudaSuccess;
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* at) {
  const bool pinned = fibers::unpinned.count(at) == 0;
  attributes->type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  if (!fibers::in_one_piece(dst, bytes) || !fibers::in_one_piece(src, bytes)) {
    return cudaErrorInvalidValue;
  }
  std::memcpy(dst, src, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src,
                                     size_t src_pitch, size_t bytes, size_t rows, cudaMemcpyKind,
                                     cudaStream_t) {
  if (dst_pitch < bytes || src_pitch < bytes) return cudaErrorInvalidValue;
  if (!fibers::in_one_piece(dst, (rows - 1) * dst_pitch + bytes) ||
      !fibers::in_one_piece(src, (rows - 1) * src_pitch + bytes)) {
    return cudaErrorInvalidValue;
  }
  for (size_t i = 0; i < rows; ++i) {
    std::memcpy(static_cast<char*>(dst) + i * dst_pitch,
                static_cast<const char*>(src) + i * src_pitch, bytes);
  }
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int bytes) {
  fibers::shared_granted = static_cast<size_t>(bytes);
  return fibers::shared_granted <= fibers::shared_limit ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename Params>
cudaError_t cudaLaunchKernel(void (*kernel)(Params), dim3 grid, dim3 threads, void** arguments,
                             size_t shared_bytes, cudaStream_t) {
  fibers::failure.clear();
  if (threads.x == 0 || threads.x > fibers::kMaxThreads || threads.x % fibers::kWarpSize != 0) {
    return fibers::fault("a block of " + std::to_string(threads.x) + " threads");
  }
  if (grid.x == 0 || grid.y == 0) return fibers::fault("an empty grid");
  if (shared_bytes > std::max<size_t>(48 * 1024, std::exchange(fibers::shared_granted, 0))) {
    return fibers::fault("more shared memory than was granted");
  }
  const Params params = *static_cast<const Params*>(arguments[0]);
  std::vector<unsigned> order(grid.x * grid.y);
  for (unsigned i = 0; i < order.size(); ++i) {
    const size_t other = fibers::random_below(i + 1);
    order[i] = order[other];
    order[other] = i;
  }
  fibers::Block& block = fibers::block();
  block.grid_size = {grid.x, grid.y, 1};
  block.block_size = {threads.x, 1, 1};
  fibers::forget_accesses();
  for (const unsigned i : order) {
    fibers::poison(shared_bytes);
    block.block = {i % grid.x, i / grid.x, 0};
    if (!block.run(static_cast<int>(threads.x), [&] { kernel(params); })) {
      return cudaErrorLaunchFailure;
    }
    if (!fibers::guard_is_whole(shared_bytes)) {
      return fibers::fault("shared memory is written behind its end");
    }
  }
  return cudaSuccess;
}
