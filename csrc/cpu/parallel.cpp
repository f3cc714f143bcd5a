#include "parallel.h"

#include <omp.h>

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

struct Job {
  void (*body)(void*, int64_t);
  void* context;
  int64_t items;
  int helpers;                  // how many more threads may join; guarded by Pool::mutex
  std::atomic<int> active{0};   // helpers that have joined and not left; set under Pool::mutex
  std::atomic<int64_t> claimed{0}, from_end{0};

  // The caller claims items from the first one on, helpers from the last one back. So an item stays
  // with a core from call to call, and its data in that core's cache.
  void call_items() {
    for (int64_t i = 0; claimed.fetch_add(1) < items; ++i) body(context, i);
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
    if (!owner) {
      job.call_items();
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (; num_workers_ < job.helpers; ++num_workers_) {
        std::thread([this] { serve(); }).detach();
      }
      job_ = &job;
    }
    wake_.notify_all();
    job.call_items();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = nullptr;
    }
    // A helper has one item left at most: to sleep and be woken takes longer than most items.
    const auto give_up = Clock::now() + kSpin;
    while (job.active != 0 && Clock::now() < give_up) {
    }
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return job.active == 0; });
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return job_ != nullptr && job_->helpers > 0; });
      Job& job = *job_;
      --job.helpers;
      ++job.active;
      lock.unlock();
      job.help();
      lock.lock();
      if (--job.active == 0) done_.notify_one();
    }
  }

  std::mutex owner_, mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int num_workers_ = 0;
};

}  // namespace

int num_threads(int64_t items, double total_ns) {
  constexpr double kWorthAThreadNs = 25000;
  const auto useful = std::min<int64_t>(items, static_cast<int64_t>(total_ns / kWorthAThreadNs));
  return static_cast<int>(std::clamp<int64_t>(useful, 1, omp_get_max_threads()));
}

void parallel_for(int64_t items, int threads, void (*body)(void*, int64_t), void* context) {
  if (threads <= 1) {
    for (int64_t i = 0; i < items; ++i) body(context, i);
    return;
  }
  // Never destroyed: its threads run until the process ends.
  static Pool& pool = *new Pool;
  Job job{body, context, items, threads - 1};
  pool.run(job);
}

}  // namespace hisparse
