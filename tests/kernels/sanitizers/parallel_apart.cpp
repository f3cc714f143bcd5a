// Takes the place of csrc/cpu/parallel.cpp where ThreadSanitizer looks for races between the items
// of a kernel. The real threads take their items from one atomic counter, which orders whatever two
// items do at different times: the race would only be seen in items that run at the same instant.
// Here every thread knows its items beforehand and nothing orders two threads, so that a race is
// found however the threads are scheduled.
#include "parallel.h"

#include <tvm/ffi/function.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace hisparse {
namespace {

constexpr int kThreads = 3;

}  // namespace

int64_t hold_openmp() { return 1; }
void release_openmp(int64_t) {}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hold_openmp, hold_openmp);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(release_openmp, release_openmp);

int num_threads(int64_t items, double) {
  return static_cast<int>(std::clamp<int64_t>(items, 1, kThreads));
}

void parallel_for(int64_t items, int threads, void (*body)(void*, int64_t), void* context) {
  std::vector<std::thread> team;
  for (int t = 0; t < threads; ++t) {
    team.emplace_back([=] {
      for (int64_t i = t; i < items; i += threads) body(context, i);
    });
  }
  for (std::thread& thread : team) thread.join();
}

}  // namespace hisparse
