#include "parallel.h"

#include <omp.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace hisparse {
namespace {

using Clock = std::chrono::steady_clock;
// How long a caller polls for its helpers' end before it sleeps.
constexpr auto kSpin = std::chrono::microseconds(50);
// After a wait for a helper that another process kept from running, callers work alone for this
// many times as long, so that such waits take a twentieth of the time at most.
constexpr int kAlonePerWait = 20;
// A helper that runs has one item left at most. A wait of this much more than twice its time is a
// stall: the scheduler gives another process some milliseconds.
constexpr auto kStall = std::chrono::milliseconds(1);

// While a caller holds OpenMP to one thread, a helper that is done polls this long for more work:
// to wake a processor from its sleep takes as long as a small call.
constexpr auto kLinger = std::chrono::microseconds(300);
// The same without a hold. OpenMP's threads then want the processor; but a step lets go in between.
constexpr auto kLingerUnheld = std::chrono::microseconds(20);

// Threads that hold OpenMP to one thread.
std::atomic<int> holders{0};

// Threads that the calling thread's kernels may use while it holds OpenMP to one; 0: it does not.
thread_local int threads_while_held = 0;

struct Job {
  void (*body)(void*, int64_t);
  void* context;
  int64_t items;
  int helpers;                  // how many more threads may join; guarded by Pool::mutex
  std::atomic<int> active{0};   // helpers that have joined and not left; set under Pool::mutex
  std::atomic<int64_t> claimed{0}, from_end{0};

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

class Pool {
 public:
  // Serves one caller at a time; a second caller works alone.
  void run(Job& job) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    const auto begin = Clock::now();
    if (!owner || begin < alone_until_) {
      job.call_items();
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (; num_workers_ < job.helpers; ++num_workers_) {
        std::thread([this] { serve(); }).detach();
      }
      job_ = &job;
      ++called_;
      is_used_ = true;
    }
    wake_.notify_all();
    const int64_t own_items = job.call_items();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = nullptr;
    }
    const auto end_of_own = Clock::now();
    wait_for_helpers(job, end_of_own + kSpin);
    const auto end = Clock::now();
    const auto waited = end - end_of_own;
    const auto per_item = (end_of_own - begin) / std::max<int64_t>(own_items, 1);
    if (waited > 2 * per_item + kStall) alone_until_ = end + kAlonePerWait * waited;
  }

  // Wakes the helpers, if calls have used them since the last time: the next ones come soon.
  void rouse() {
    if (!is_used_.exchange(false)) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++called_;
    }
    wake_.notify_all();
  }

 private:
  // To sleep and be woken takes longer than most items, so the caller polls until `give_up`.
  void wait_for_helpers(const Job& job, Clock::time_point give_up) {
    while (job.active != 0 && Clock::now() < give_up) {
    }
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return job.active == 0; });
  }

  // Polls for a call after those that were seen, as long as that may save a sleep.
  void linger(int64_t seen) const {
    const auto begin = Clock::now();
    auto held = begin;
    for (auto now = begin; called_ == seen && now < begin + kLinger; now = Clock::now()) {
      if (holders > 0) held = now;
      if (now > held + kLingerUnheld) return;
    }
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (int64_t seen = called_;;) {
      const auto is_wanted = [this] { return job_ != nullptr && job_->helpers > 0; };
      wake_.wait(lock, [&] { return seen != called_ || is_wanted(); });
      seen = called_;
      if (is_wanted()) {
        Job& job = *job_;
        --job.helpers;
        ++job.active;
        lock.unlock();
        job.help();
        lock.lock();
        if (--job.active == 0) done_.notify_one();
      }
      lock.unlock();
      linger(seen);
      lock.lock();
    }
  }

  std::mutex owner_, mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int num_workers_ = 0;
  std::atomic<int64_t> called_{0};    // how often helpers were; set under mutex_
  std::atomic<bool> is_used_{false};  // since the last rouse()
  Clock::time_point alone_until_;  // guarded by owner_
};

Pool& pool() {
  static Pool& only = *new Pool;  // Never destroyed: its threads run until the process ends.
  return only;
}

}  // namespace

int64_t hold_openmp() {
  const int before = omp_get_max_threads();
  if (before > 1) {
    threads_while_held = before;
    ++holders;
    omp_set_num_threads(1);
    pool().rouse();
  }
  return before;
}

void release_openmp(int64_t before) {
  if (before <= 1) return;  // An outer hold goes on.
  omp_set_num_threads(static_cast<int>(before));
  threads_while_held = 0;
  --holders;
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(hold_openmp, hold_openmp);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(release_openmp, release_openmp);

int num_threads(int64_t items, double total_ns) {
#ifdef HISPARSE_WORTH_A_THREAD_NS
  constexpr double kWorthAThreadNs = HISPARSE_WORTH_A_THREAD_NS;
#else
  constexpr double kWorthAThreadNs = 25000;
#endif
  const auto useful = std::min<int64_t>(items, static_cast<int64_t>(total_ns / kWorthAThreadNs));
  const int most = threads_while_held > 0 ? threads_while_held : omp_get_max_threads();
  return static_cast<int>(std::clamp<int64_t>(useful, 1, most));
}

void parallel_for(int64_t items, int threads, void (*body)(void*, int64_t), void* context) {
  if (threads <= 1) {
    for (int64_t i = 0; i < items; ++i) body(context, i);
    return;
  }
  Job job{body, context, items, threads - 1};
  pool().run(job);
}

}  // namespace hisparse
