#include "parallel.h"

#include <omp.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>

namespace hisparse {
namespace {

using Clock = std::chrono::steady_clock;
// After a wait for a thread that another process kept from running, callers work alone: as long as
// they waited, and twice as long after each further wait, up to this many times. So where another
// process needs a core all the time, waits take a twentieth of the kernels' time at most.
constexpr int kMostAlonePerWait = 20;
// Waits follow each other if the time between two is less than this many times the second one. A
// host that takes a core for a millisecond now and then costs little more than these milliseconds.
constexpr int kQuietPerWait = 10;
// A thread that runs has one item left at most. A wait of this much more than twice its time is a
// stall: the scheduler gives another process some milliseconds.
#ifndef HISPARSE_STALL_MS
#define HISPARSE_STALL_MS 1
#endif
constexpr auto kStall = std::chrono::milliseconds(HISPARSE_STALL_MS);
// A longer wait is a pause of the whole process.
constexpr Clock::duration kLongestStall = std::chrono::milliseconds(100);

// Threads that the calling thread's kernels may use while it holds OpenMP to one; 0: it does not.
thread_local int threads_while_held = 0;

int max_threads() { return threads_while_held > 0 ? threads_while_held : omp_get_max_threads(); }

struct Job {
  void (*body)(void*, int64_t);
  void* context;
  int64_t items;
  int threads;
  std::atomic<int64_t> claimed{0}, from_end{0};
  std::atomic<int> left{0};  // how many threads have left the team

  // The caller claims items from the first one on, helpers from the last one back. So an item stays
  // with a core from call to call, and its data in that core's cache.
  int64_t call_items() {
    int64_t i = 0;
    for (; claimed.fetch_add(1) < items; ++i) body(context, i);
    return i;
  }
  void help() {
    while (claimed.fetch_add(1) < items) body(context, items - 1 - from_end.fetch_add(1));
  }
};

std::mutex owner_mutex;
// Guarded by owner_mutex. The region below captures no variable, and its threads meet in atomics
// too: ThreadSanitizer does not see OpenMP's own order.
std::atomic<Job*> shared_job;
int64_t own_items;
Clock::time_point begin_of_own, end_of_own;
Clock::duration alone{0};     // how long callers have still to work alone
// How long teams have worked since the last wait; before the first, long enough.
Clock::duration together = std::chrono::hours(1);
int alone_per_wait = 1;

// Serves one caller at a time; a second caller works alone.
void run(Job& job) {
  std::unique_lock<std::mutex> owner(owner_mutex, std::try_to_lock);
  const auto begin = Clock::now();
  if (!owner || alone > Clock::duration::zero()) {
    job.call_items();
    if (owner) alone -= Clock::now() - begin;
    return;
  }
  shared_job = &job;
  // Always the whole team, as PyTorch does: libgomp ends and makes threads where its size changes.
#pragma omp parallel num_threads(max_threads())
  {
    Job& shared = *shared_job;
    if (omp_get_thread_num() == 0) {
      begin_of_own = Clock::now();
      own_items = shared.call_items();
      end_of_own = Clock::now();
    } else if (omp_get_thread_num() < shared.threads) {
      shared.help();
    }
    ++shared.left;
  }
  job.left.load();  // What they wrote is seen from here on.
  // A team starts when all of its threads have left the one before.
  const auto own = end_of_own - begin_of_own;
  const auto waited = Clock::now() - begin - own;
  const auto per_item = own / std::max<int64_t>(own_items, 1);
  together += own;
  if (waited <= 2 * per_item + kStall) return;
  const auto wait = std::min(waited, kLongestStall);
  const bool follows = together < kQuietPerWait * wait;
  alone_per_wait = follows ? std::min(2 * alone_per_wait, kMostAlonePerWait) : 1;
  alone = alone_per_wait * wait;
  together = Clock::duration::zero();
}

}  // namespace

int64_t hold_openmp() {
  const int before = omp_get_max_threads();
  if (before > 1) {
    threads_while_held = before;
    omp_set_num_threads(1);
  }
  return before;
}

void release_openmp(int64_t before) {
  if (before <= 1) return;  // An outer hold goes on.
  omp_set_num_threads(static_cast<int>(before));
  threads_while_held = 0;
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hold_openmp, hold_openmp);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(release_openmp, release_openmp);

int num_threads(int64_t items, double total_ns) {
#ifdef HISPARSE_WORTH_A_THREAD_NS
  constexpr double kWorthAThreadNs = HISPARSE_WORTH_A_THREAD_NS;
#else
  constexpr double kWorthAThreadNs = 6000;
#endif
  const auto useful = std::min<int64_t>(items, static_cast<int64_t>(total_ns / kWorthAThreadNs));
  return static_cast<int>(std::clamp<int64_t>(useful, 1, max_threads()));
}

void parallel_for(int64_t items, int threads, void (*body)(void*, int64_t), void* context) {
  if (threads <= 1) {
    for (int64_t i = 0; i < items; ++i) body(context, i);
    return;
  }
  Job job{body, context, items, threads};
  run(job);
}

}  // namespace hisparse
