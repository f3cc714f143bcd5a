// The calls of CUDA's runtime that launch code makes.
#pragma once

#include <set>
#include <utility>

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrComputeCapabilityMajor,
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization
};
union cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
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
inline int max_cluster = kMaxCluster;  // blocks; 1: the device is older than clusters
// If set, a launch is told to it and does not run: kernel, blocks, threads, parameters, their bytes
// and those of shared memory, and the blocks of a cluster.
inline void (*recorder)(const void*, const unsigned*, unsigned, const void*, size_t, size_t,
                        unsigned) = nullptr;
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

// Blocks of a cluster.
inline unsigned cluster_of(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& each = config.attrs[i];
    if (each.id == cudaLaunchAttributeClusterDimension) return each.val.clusterDim.x;
  }
  return 1;
}

// The launch may begin before those in front of it have ended.
inline bool begins_early(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& each = config.attrs[i];
    if (each.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      return each.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  return false;
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
  *value = which == cudaDevAttrMaxSharedMemoryPerBlockOptin
               ? static_cast<int>(fibers::shared_limit)
           : which == cudaDevAttrComputeCapabilityMajor ? (fibers::max_cluster > 1 ? 9 : 8)
                                                        : fibers::max_blocks;
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* at) {
  const bool pinned = fibers::unpinned.count(at) == 0;
  attributes->type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
using cudaHostFn_t = void (*)(void*);
// Stands in for CUDA's, whose driver has a thread for it: here the caller is that thread.
inline cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* argument) {
  function(argument);
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

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel*,
                                           const cudaLaunchConfig_t* config) {
  *clusters = fibers::cluster_of(*config) <= static_cast<unsigned>(fibers::max_cluster);
  return cudaSuccess;
}

template <typename Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params),
                               Params params) {
  const dim3 grid = config->gridDim, threads = config->blockDim;
  const unsigned each = fibers::cluster_of(*config);
  fibers::failure.clear();
  if (threads.x == 0 || threads.x > fibers::kMaxThreads || threads.x % fibers::kWarpSize != 0) {
    return fibers::fault("a block of " + std::to_string(threads.x) + " threads");
  }
  if (grid.x == 0 || grid.y == 0) return fibers::fault("an empty grid");
  if (each == 0 || each > static_cast<unsigned>(fibers::max_cluster) || grid.x % each != 0) {
    return fibers::fault("a cluster of " + std::to_string(each) + " blocks");
  }
  if (config->numAttrs > 0 && fibers::max_cluster == 1) {
    return fibers::fault("an attribute that this device does not know");
  }
  if (config->dynamicSmemBytes >
      std::max<size_t>(48 * 1024, std::exchange(fibers::shared_granted, 0))) {
    return fibers::fault("more shared memory than was granted");
  }
  if (fibers::recorder) {
    const unsigned blocks[] = {grid.x, grid.y, grid.z};
    fibers::recorder(reinterpret_cast<const void*>(kernel), blocks, threads.x, &params,
                     sizeof(Params), config->dynamicSmemBytes, each);
    return cudaSuccess;
  }
  std::vector<unsigned> order(grid.x / each * grid.y);
  for (unsigned i = 0; i < order.size(); ++i) {
    const size_t other = fibers::random_below(i + 1);
    order[i] = order[other];
    order[other] = i;
  }
  fibers::Cluster& cluster = fibers::cluster();
  cluster.grid_size = {grid.x, grid.y, 1};
  cluster.block_size = {threads.x, 1, 1};
  cluster.shared_bytes = config->dynamicSmemBytes;
  cluster.begins_early = fibers::begins_early(*config);
  fibers::forget_accesses();
  for (const unsigned i : order) {
    const fibers::Index first{i % (grid.x / each) * each, i / (grid.x / each), 0};
    if (!cluster.run(first, static_cast<int>(each), [&] { kernel(params); })) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}
