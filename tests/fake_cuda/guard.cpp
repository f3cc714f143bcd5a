// The CPU build of PyTorch has no guard for CUDA devices, which Python's indexing of a tensor asks
// for. This one does nothing, as PyTorch's own does under fake tensors in a build with CUDA.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>);
}
