// Runs the threads of a block as fibers on one CPU thread, in an order drawn from a seed.
//
// A fiber runs until it waits: at a barrier of its block or its warp, or, by chance, at an atomic.
// Then any fiber that can run is next; in half of the blocks one warp lags behind the others. A block that can never go on is an error, as are threads that
// wait at different barriers, and writes behind the shared memory that was asked for.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <ucontext.h>
#include <vector>

namespace fibers {

constexpr int kMaxThreads = 1024;
constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kSharedBytes = 227 * 1024;
constexpr size_t kGuardBytes = 1024;
constexpr unsigned char kPoison = 0xA5;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// Who makes an access, and when. From the grid down to a warp, a level has units, which are blocks,
// warps and lanes, and an epoch, which grows whenever all of its units meet: what they did before is
// then ordered before what they do next.
constexpr int kLevels = 3;
struct Place {
  unsigned unit[kLevels] = {0, 0, 0}, epoch[kLevels] = {0, 0, 0};
};
enum class AccessKind { kRead, kWrite, kAtomic };

inline bool records_races = true;  // set by the tests
inline bool recording = false;     // whether what runs is a kernel's own code

// Switches `recording` while it lives: off in what stands for CUDA, which runs on the threads' stacks.
class Recording {
 public:
  explicit Recording(bool on) : before_(recording) { recording = on; }
  ~Recording() { recording = before_; }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  const bool before_;
};

// races.cpp has these. An access by what stands for CUDA, in a kernel's name:
void accessed(const void* at, size_t bytes, AccessKind kind);
void forget_accesses();         // before a launch
void forget_shared_accesses();  // before a block

struct Fiber {
  ucontext_t first_entry;
  jmp_buf resume;
  std::unique_ptr<char[]> stack;
  bool started = false, done = false;
  const char* where = nullptr;  // the barrier at which it waits
};

// Lanes that meet, and what they bring. Two sets take turns: a lane that is ahead by one meeting does
// not overwrite what another still reads, and none can be ahead by two.
struct Warp {
  uint64_t values[2][kWarpSize];
  int arrived[2] = {0, 0};
  unsigned epoch = 0;
  const char* where = nullptr;
};

class Block;
inline Block* running = nullptr;   // the block that runs
inline uint64_t random_state = 1;  // set by the tests
inline std::string failure;        // of the last launch
inline int max_blocks = 4;         // multiprocessors that the device says it has

inline uint64_t random_below(uint64_t bound) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (random_state >> 11) % bound;
}

inline void entry();

class Block {
 public:
  Index thread, block, grid_size, block_size;

  int lane() const { return current_ % kWarpSize; }
  bool is_own(const char* address) const {
    const char* const stack = fibers_[current_]->stack.get();
    return address >= stack && address < stack + kStackBytes;
  }
  Place place() const {
    const auto current = static_cast<unsigned>(current_);
    const unsigned number = block.y * grid_size.x + block.x;
    return {{number, current / kWarpSize, current}, {0, epoch_, warps_[current / kWarpSize].epoch}};
  }

  // Runs one block; false, and a `failure`, if it cannot end.
  bool run(int num_threads, const std::function<void()>& body) {
    body_ = &body;
    running = this;
    while (fibers_.size() < static_cast<size_t>(num_threads)) {
      fibers_.push_back(std::make_unique<Fiber>());
    }
    num_threads_ = num_threads;
    waiting_ = num_done_ = block_turn_ = 0;
    epoch_ = 0;
    votes_[0] = votes_[1] = 0;
    blocked_.clear();
    block_where_ = nullptr;
    warps_.assign((num_threads + kWarpSize - 1) / kWarpSize, Warp());
    turns_.assign(num_threads, 0);
    ready_.clear();
    const int lagging = random_below(2) == 0 ? random_below(warps_.size()) : -1;
    for (int i = 0; i < num_threads; ++i) {
      fibers_[i]->done = false;
      ready_.push_back(i);
    }
    while (!ready_.empty() && failure.empty()) {
      size_t pick = random_below(ready_.size());
      for (int i = 0; i < 64 && ready_[pick] / kWarpSize == lagging; ++i) {
        pick = random_below(ready_.size());
      }
      current_ = ready_[pick];
      ready_[pick] = ready_.back();
      ready_.pop_back();
      thread = {static_cast<unsigned>(current_), 0, 0};
      switch_in(self());
    }
    if (failure.empty() && num_done_ < num_threads) describe_deadlock();
    if (failure.empty()) return true;
    fibers_.clear();  // Their stacks are in the middle of a kernel.
    return false;
  }

  void yield() {
    Recording off(false);
    ready_.push_back(current_);
    switch_out();
  }

  // __syncthreads, and the votes that are one: returns how many threads brought true.
  int barrier(bool vote, const char* where) {
    Recording off(false);
    if (block_where_ == nullptr) block_where_ = where;
    if (std::strcmp(block_where_, where) != 0) {
      fail(std::string("threads wait at ") + block_where_ + " and at " + where);
      switch_out();
    }
    const int turn = block_turn_;
    votes_[turn] += vote;
    self().where = where;
    if (++waiting_ < num_threads_) {
      blocked_.push_back(current_);
      switch_out();
    } else {
      ready_.insert(ready_.end(), blocked_.begin(), blocked_.end());
      blocked_.clear();
      waiting_ = 0;
      block_where_ = nullptr;
      block_turn_ = 1 - turn;
      votes_[1 - turn] = 0;
      ++epoch_;
      yield();
    }
    self().where = nullptr;
    return votes_[turn];
  }

  // The lanes of a warp meet; returns what each of them brought. CUDA orders what they did before and
  // do next at a __syncwarp alone.
  const uint64_t* meet(unsigned mask, uint64_t value, const char* where, bool orders = false) {
    Recording off(false);
    Warp& warp = warps_[current_ / kWarpSize];
    if (mask != 0xffffffffu) fail(std::string("a mask of some lanes only, at ") + where);
    if (warp.where == nullptr) warp.where = where;
    if (std::strcmp(warp.where, where) != 0) {
      fail(std::string("lanes of a warp wait at ") + warp.where + " and at " + where);
    }
    if (!failure.empty()) switch_out();
    const int turn = turns_[current_];
    turns_[current_] = 1 - turn;
    warp.values[turn][lane()] = value;
    self().where = where;
    const int first = current_ - lane();
    if (++warp.arrived[turn] < kWarpSize) {
      switch_out();
    } else {
      for (int i = first; i < first + kWarpSize; ++i) {
        if (i != current_) ready_.push_back(i);
      }
      warp.arrived[turn] = 0;
      warp.where = nullptr;
      warp.epoch += orders;
      yield();
    }
    self().where = nullptr;
    return warps_[current_ / kWarpSize].values[turn];
  }

  void run_fiber() {
    for (;;) {
      {
        Recording on(records_races);
        (*body_)();
      }
      self().done = true;
      ++num_done_;
      switch_out();
    }
  }

 private:
  Fiber& self() { return *fibers_[current_]; }

  __attribute__((noinline)) void switch_in(Fiber& fiber) {
    if (_setjmp(scheduler_) != 0) return;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    fiber.stack = std::make_unique<char[]>(kStackBytes);
    getcontext(&fiber.first_entry);
    fiber.first_entry.uc_stack.ss_sp = fiber.stack.get();
    fiber.first_entry.uc_stack.ss_size = kStackBytes;
    fiber.first_entry.uc_link = nullptr;
    makecontext(&fiber.first_entry, reinterpret_cast<void (*)()>(entry), 0);
    setcontext(&fiber.first_entry);
  }

  __attribute__((noinline)) void switch_out() {
    if (_setjmp(self().resume) == 0) _longjmp(scheduler_, 1);
  }

  void fail(const std::string& what) {
    if (failure.empty()) failure = what + ", in block " + std::to_string(block.x);
  }

  void describe_deadlock() {
    std::string where = "an unknown place";
    int count = 0;
    for (int i = 0; i < num_threads_; ++i) {
      if (fibers_[i]->done || fibers_[i]->where == nullptr) continue;
      where = fibers_[i]->where;
      ++count;
    }
    fail(std::to_string(count) + " of " + std::to_string(num_threads_) +
         " threads wait for the others at " + where);
  }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<int> ready_, blocked_, turns_;
  std::vector<Warp> warps_;
  const std::function<void()>* body_ = nullptr;
  jmp_buf scheduler_;
  const char* block_where_ = nullptr;
  int current_ = 0, num_threads_ = 0, num_done_ = 0, waiting_ = 0;
  int votes_[2] = {0, 0}, block_turn_ = 0;
  unsigned epoch_ = 0;
};

inline void entry() { running->run_fiber(); }

inline Block& block() {
  static Block it;
  return it;
}

}  // namespace fibers

// The array that the kernels' `extern __shared__` names, poisoned before each block. Variables that are
// `__shared__` in another way are not: every thread would have its own.
namespace hisparse {
alignas(16) inline char dynamic_shared_memory[fibers::kSharedBytes + fibers::kGuardBytes];
}
