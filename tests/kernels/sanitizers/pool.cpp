// Callers on several threads use csrc/cpu/parallel.cpp. Items sleep, so that helpers join on one core
// too. Each item must be called once, and its writes be seen by its caller.
#include "parallel.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

namespace {

constexpr int kCallers = 3, kJobs = 60, kItems = 9, kThreads = 4;
std::atomic<int> helped{0}, wrong{0};

void call_jobs() {
  const auto caller = std::this_thread::get_id();
  for (int job = 0; job < kJobs; ++job) {
    int calls[kItems] = {};
    hisparse::parallel_for(kItems, kThreads, [&](int64_t item) {
      std::this_thread::sleep_for(std::chrono::microseconds(500));
      ++calls[item];
      helped += std::this_thread::get_id() != caller;
    });
    for (const int count : calls) wrong += count != 1;
  }
}

}  // namespace

int main() {
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) callers.emplace_back(call_jobs);
  for (std::thread& caller : callers) caller.join();
  std::printf("%d of %d items by helpers, %d not called once\n", helped.load(),
              kCallers * kJobs * kItems, wrong.load());
  return wrong != 0 || helped == 0;
}
