// Callers on several threads use csrc/cpu/parallel.cpp. Items sleep, so that helpers join on one core
// too. Each item must be called once, and its writes be seen by its caller. Calls for fewer threads
// must not end the others: libgomp does, and makes new ones, where a team's size changes.
#include "parallel.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace {

constexpr int kCallers = 3, kJobs = 60, kItems = 9, kThreads = 4;
std::atomic<int> helped{0}, wrong{0};
std::mutex mutex;
std::set<pid_t> threads;  // guarded by mutex

void call_jobs() {
  const pid_t caller = gettid();
  for (int job = 0; job < kJobs; ++job) {
    int calls[kItems] = {};
    hisparse::parallel_for(kItems, job % 2 == 0 ? kThreads : kThreads / 2, [&](int64_t item) {
      std::this_thread::sleep_for(std::chrono::microseconds(500));
      ++calls[item];
      helped += gettid() != caller;
      const std::lock_guard<std::mutex> lock(mutex);
      threads.insert(gettid());
    });
    for (const int count : calls) wrong += count != 1;
  }
}

}  // namespace

int main() {
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) callers.emplace_back(call_jobs);
  for (std::thread& caller : callers) caller.join();
  std::printf("%d of %d items by helpers, %d not called once, %zu threads\n", helped.load(),
              kCallers * kJobs * kItems, wrong.load(), threads.size());
  return wrong != 0 || helped == 0 || threads.size() > kCallers * kThreads;
}
