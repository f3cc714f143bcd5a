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

  // Neither waits nor allocates, so it can be captured in a graph.
  template <typename Params>
  void launch(const char* name, void (*kernel)(Params), dim3 grid, int threads,
              int64_t shared_bytes, Params params) const {
    const size_t shared = static_cast<size_t>(shared_bytes);
    if (shared > kSharedWithoutAsking) {
      require_success(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes)),
                      name);
    }
    void* arguments[] = {&params};
    require_success(cudaLaunchKernel(kernel, grid, dim3(static_cast<unsigned>(threads)), arguments,
                                     shared, stream()),
                    name);
  }

 private:
  static constexpr size_t kSharedWithoutAsking = 48 * 1024;
  int before_ = 0, device_ = 0;
};

// Threads of a block that processes `elements`, `each` per thread: whole warps, two at least.
inline int block_threads(int64_t elements, int64_t each) {
  const int64_t warps = (elements + 32 * each - 1) / (32 * each);
  return static_cast<int>(32 * std::clamp<int64_t>(warps, 2, 32));
}

}  // namespace hisparse
