// Shared by the host side of all CUDA operations: views of checked tensors, launches, errors.
//
// The Python wrappers (hisparse/kernels) check shapes, dtypes and devices. This file checks the
// strides that the kernels need.
#pragma once

#include "arguments.h"

#include <cuda_runtime.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <cstdint>

namespace hisparse {

inline void require_success(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(error);
  }
}

inline int32_t size32(const TensorView& tensor, int dim) {
  return static_cast<int32_t>(tensor.size(dim));
}

// Makes a tensor's device the current one while it lives; launches go to the caller's stream there.
class OnDevice {
 public:
  explicit OnDevice(const TensorView& tensor) {
    require_success(cudaGetDevice(&before_), "cudaGetDevice");
    device_ = tensor.device().device_type == kDLCUDA ? tensor.device().device_id : before_;
    if (device_ != before_) require_success(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~OnDevice() {
    if (device_ != before_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  cudaStream_t stream() const {
    return static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device_));
  }

  int64_t attribute(cudaDeviceAttr which) const {
    int value = 0;
    require_success(cudaDeviceGetAttribute(&value, which, device_), "cudaDeviceGetAttribute");
    return value;
  }

  bool has_clusters() const { return attribute(cudaDevAttrComputeCapabilityMajor) >= 9; }

  // Neither waits nor allocates, so it can be captured in a graph. Blocks whose number in x divided by
  // `cluster` is the same form a cluster. False, and nothing is launched, if the device has no place
  // for such a cluster.
  template <typename Params>
  bool launch(const char* name, void (*kernel)(Params), dim3 grid, int threads,
              int64_t shared_bytes, Params params, unsigned cluster = 1) const {
    const size_t shared = static_cast<size_t>(shared_bytes);
    if (shared > kSharedWithoutAsking) {
      require_success(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes)),
                      name);
    }
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared;
    config.stream = stream();
    config.attrs = attributes;
    if (cluster > 1) {
      attributes[0].id = cudaLaunchAttributeClusterDimension;
      attributes[0].val.clusterDim = {cluster, 1, 1};
      config.numAttrs = 1;
      int clusters = 0;  // A part of a GPU (MIG) may be smaller than a cluster.
      require_success(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), name);
      if (clusters == 0) return false;
    }
    if (begins_early()) {
      cudaLaunchAttribute& early = attributes[config.numAttrs++];
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
    }
    require_success(cudaLaunchKernelEx(&config, kernel, params), name);
    return true;
  }

 private:
  // Whether a launch may begin before the one in front of it has ended, to wait there itself:
  // wait_for_earlier_launches(). Graphs capture such launches since CUDA 12.3. Not on GPUs of
  // capability 12, on which capture has failed (https://github.com/sgl-project/sglang/pull/18596).
  bool begins_early() const {
    int driver = 0;
    require_success(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    const int64_t major = attribute(cudaDevAttrComputeCapabilityMajor);
    return driver >= 12030 && (major == 9 || major == 10);
  }

  static constexpr size_t kSharedWithoutAsking = 48 * 1024;
  int before_ = 0, device_ = 0;
};

// Threads of a block that processes `elements`, `each` per thread: whole warps, two at least.
inline int block_threads(int64_t elements, int64_t each) {
  const int64_t warps = (elements + 32 * each - 1) / (32 * each);
  return static_cast<int>(32 * std::clamp<int64_t>(warps, 2, 32));
}

}  // namespace hisparse
