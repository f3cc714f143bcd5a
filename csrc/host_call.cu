// launch_host_call: a function of the CPU library in the order of a stream.
#include "launch.h"

namespace hisparse {

// On the current stream of a tensor's device. A graph that captures it calls the function at each
// replay. The function must not call CUDA.
void launch_host_call(Arguments& in) {
  const OnDevice on(in.tensor());
  const auto function = in.number<int64_t>(), argument = in.number<int64_t>();
  require_success(cudaLaunchHostFunc(on.stream(), reinterpret_cast<cudaHostFn_t>(function),
                                     reinterpret_cast<void*>(argument)),
                  "cudaLaunchHostFunc");
}

HISPARSE_EXPORT_KERNEL(launch_host_call)

}  // namespace hisparse
