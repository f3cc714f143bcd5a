// Runs the threads of a cluster of blocks, of one block as a rule, as fibers on one CPU thread, in an
// order drawn from a seed.
//
// A fiber runs until it waits: at a barrier of its cluster, its block or its warp, or, by chance, at an
// atomic. Then any fiber that can run is next; in half of the clusters one warp lags behind the others,
// or one block. A cluster that can never go on is an error, as are threads that wait at different
// barriers, and writes behind the shared memory that was asked for.
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
constexpr int kMaxCluster = 8;
constexpr size_t kSharedBytes = 227 * 1024;
constexpr size_t kGuardBytes = 1024;
constexpr unsigned char kPoison = 0xA5;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// Who makes an access, and when. From the grid down to a warp, a level has units, which are clusters,
// blocks, warps and lanes, and an epoch, which grows whenever all of its units meet: what they did
// before is then ordered before what they do next.
constexpr int kLevels = 4;
struct Place {
  unsigned unit[kLevels] = {0, 0, 0, 0}, epoch[kLevels] = {0, 0, 0, 0};

  unsigned block() const { return unit[1]; }
  unsigned thread() const { return unit[3]; }
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
void forget_shared_accesses();  // before a cluster

struct Fiber {
  ucontext_t first_entry;
  jmp_buf resume;
  std::unique_ptr<char[]> stack;
  bool started = false, done = false;
  const char* where = nullptr;  // the barrier at which it waits
};

// Threads that meet, of a block or of a cluster, and how many of them brought true.
struct Barrier {
  int size = 0, waiting = 0, turn = 0;
  int votes[2] = {0, 0};
  unsigned epoch = 0;
  const char* where = nullptr;
  std::vector<int> blocked;
};

// Lanes that meet, and what they bring. Two sets take turns: a lane that is ahead by one meeting does
// not overwrite what another still reads, and none can be ahead by two.
struct Warp {
  uint64_t values[2][kWarpSize];
  int arrived[2] = {0, 0};
  unsigned epoch = 0;
  const char* where = nullptr;
};

class Cluster;
inline Cluster* running = nullptr;  // the cluster that runs
inline uint64_t random_state = 1;  // set by the tests
inline std::string failure;        // of the last launch
inline unsigned num_failures = 0;  // clusters that did not end
constexpr int kProcessors = 4;
inline int max_blocks = kProcessors;  // multiprocessors that the device says it has

inline uint64_t random_below(uint64_t bound) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (random_state >> 11) % bound;
}

inline void entry();
inline char* shared_of(int block);
inline void poison(int block, size_t bytes);

class Cluster {
 public:
  Index thread, block, grid_size, block_size;
  size_t shared_bytes = 0;  // of a block
  bool begins_early = false;  // Every thread has to wait for the launches before.

  int lane() const { return current_ % kWarpSize; }
  int current() const { return current_; }  // number of the thread in the cluster
  int own_block() const { return current_ / static_cast<int>(block_size.x); }  // the same of a block
  bool is_own(const char* address) const {
    const char* const stack = fibers_[current_]->stack.get();
    return address >= stack && address < stack + kStackBytes;
  }
  Place place() const {
    const auto warp = static_cast<unsigned>(current_ / kWarpSize);
    const unsigned number = block.y * grid_size.x + block.x;
    return {{number - own_block(), number, warp, thread.x},
            {0, whole_.epoch, blocks_[own_block()].epoch, warps_[warp].epoch}};
  }

  // Runs `num_blocks` blocks, of which the first is `first`; false, and a `failure`, if they cannot end.
  bool run(Index first, int num_blocks, const std::function<void()>& body) {
    body_ = &body;
    running = this;
    const int each = static_cast<int>(block_size.x);
    num_threads_ = num_blocks * each;
    while (fibers_.size() < static_cast<size_t>(num_threads_)) {
      fibers_.push_back(std::make_unique<Fiber>());
    }
    num_done_ = 0;
    whole_ = Barrier();
    whole_.size = num_threads_;
    blocks_.assign(num_blocks, Barrier());
    for (Barrier& of_block : blocks_) of_block.size = each;
    left_.assign(num_blocks, each);
    warps_.assign(num_threads_ / kWarpSize, Warp());
    turns_.assign(num_threads_, 0);
    ready_.clear();
    // Threads that lag: those of a warp, or of a block.
    const int of_one = num_blocks > 1 && random_below(2) == 0 ? each : kWarpSize;
    const int lagging = random_below(2) == 0 ? random_below(num_threads_ / of_one) : -1;
    for (int i = 0; i < num_threads_; ++i) {
      fibers_[i]->done = began_[i] = false;
      ready_.push_back(i);
    }
    for (int i = 0; i < num_blocks; ++i) poison(i, shared_bytes);
    forget_shared_accesses();
    while (!ready_.empty() && failure.empty()) {
      size_t pick = random_below(ready_.size());
      for (int i = 0; i < 64 && ready_[pick] / of_one == lagging; ++i) {
        pick = random_below(ready_.size());
      }
      current_ = ready_[pick];
      ready_[pick] = ready_.back();
      ready_.pop_back();
      thread = {static_cast<unsigned>(current_ % each), 0, 0};
      block = {first.x + current_ / each, first.y, 0};
      switch_in(self());
    }
    if (failure.empty() && num_done_ < num_threads_) describe_deadlock();
    if (failure.empty()) return true;
    ++num_failures;
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
    return meet_at(blocks_[own_block()], vote, where);
  }
  void cluster_barrier(const char* where) {
    Recording off(false);
    meet_at(whole_, false, where);
  }

  // This thread has waited for the launches before its own.
  void begin() { began_[current_] = true; }

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
      if (begins_early && !began_[current_]) {
        fail("a thread ends without having waited for the launches before its own");
      }
      self().done = true;
      ++num_done_;
      if (--left_[own_block()] == 0) end_block(own_block());
      switch_out();
    }
  }

 private:
  Fiber& self() { return *fibers_[current_]; }

  int meet_at(Barrier& at, bool vote, const char* where) {
    if (at.where == nullptr) at.where = where;
    if (std::strcmp(at.where, where) != 0) {
      fail(std::string("threads wait at ") + at.where + " and at " + where);
      switch_out();
    }
    const int turn = at.turn;
    at.votes[turn] += vote;
    self().where = where;
    if (++at.waiting < at.size) {
      at.blocked.push_back(current_);
      switch_out();
    } else {
      ready_.insert(ready_.end(), at.blocked.begin(), at.blocked.end());
      at.blocked.clear();
      at.waiting = 0;
      at.where = nullptr;
      at.turn = 1 - turn;
      at.votes[1 - turn] = 0;
      ++at.epoch;
      yield();
    }
    self().where = nullptr;
    return at.votes[turn];
  }

  // Another block of the cluster that still reads this one's shared memory finds poison.
  void end_block(int number) {
    const char* const guard = shared_of(number) + shared_bytes;
    for (size_t i = 0; i < kGuardBytes; ++i) {
      if (static_cast<unsigned char>(guard[i]) == kPoison) continue;
      fail("shared memory is written behind its end");
      return;
    }
    poison(number, shared_bytes);
  }

  __attribute__((noinline)) void switch_in(Fiber& fiber) {
    if (_setjmp(scheduler_) != 0) return;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    fiber.stack.reset(new char[kStackBytes]);  // Not zeroed: few fibers use all of it.
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
  std::vector<int> ready_, turns_;
  std::vector<int> left_;  // by block: threads that have not ended
  std::vector<Warp> warps_;
  std::vector<Barrier> blocks_;
  Barrier whole_;
  bool began_[kMaxCluster * kMaxThreads];  // in the library's own memory, which is not recorded
  const std::function<void()>* body_ = nullptr;
  jmp_buf scheduler_;
  int current_ = 0, num_threads_ = 0, num_done_ = 0;
};

inline void entry() { running->run_fiber(); }

inline Cluster& cluster() {
  static Cluster it;
  return it;
}

// Shared memory of the blocks of a cluster, poisoned before they begin. Variables that are `__shared__`
// in another way than dynamic_shared() are not: every thread would have its own.
alignas(16) inline char shared_memory[kMaxCluster][kSharedBytes + kGuardBytes];

inline char* shared_of(int block) { return shared_memory[block]; }

// Poisons what a block asked for and guards what is behind it.
inline void poison(int block, size_t bytes) {
  std::memset(shared_of(block), kPoison, bytes + kGuardBytes);
}

}  // namespace fibers
