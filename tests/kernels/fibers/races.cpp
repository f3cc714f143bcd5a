// Finds races between the threads of a launch: two accesses to a byte, one of them a write and not
// both atomic, that no barrier orders. No order of threads has to show them.
//
// GCC's -fsanitize=thread makes the kernels call a function at each access. These functions take the
// place of its library.
#include "fibers.h"

#include <algorithm>
#include <array>
#include <dlfcn.h>
#include <sstream>
#include <unordered_map>

// The library's own memory, which holds its statics: none of them belongs to a kernel.
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[], _end[];

namespace fibers {
namespace {

constexpr uintptr_t kWordBytes = 4, kPageBytes = 4096;

struct Access {
  const void* code = nullptr;  // null: there is none
  Place by;
};

// Accesses of one kind to the same bytes of a word: the last one, and by level the last one before it
// that another unit made and nothing orders. A new access that is ordered behind these is ordered
// behind all of them.
struct History {
  AccessKind kind;
  unsigned bytes;  // a bit for each
  int next;        // of the same word; -1: none
  Access last;
  std::array<Access, kLevels> others;
};

// By word: 1 plus the first history; 0: none.
using Heads = std::array<int, kPageBytes / kWordBytes>;

std::vector<History> histories;
std::vector<int> unused;  // in `histories`
std::unordered_map<uintptr_t, Heads> pages;
std::pair<uintptr_t, Heads*> last_page;  // of `pages`

int& head_of(uintptr_t word) {
  const uintptr_t page = word / (kPageBytes / kWordBytes);
  if (last_page.second == nullptr || last_page.first != page) {
    last_page = {page, &pages.try_emplace(page).first->second};
  }
  return (*last_page.second)[word % (kPageBytes / kWordBytes)];
}

bool ordered(const Place& before, const Place& now) {
  for (int level = 0; level < kLevels; ++level) {
    if (before.epoch[level] != now.epoch[level]) return true;
    if (before.unit[level] != now.unit[level]) return false;
  }
  return true;  // It is the same thread.
}

void add(History& history, const Access& now) {
  int level = 0;
  for (; level < kLevels && history.last.by.epoch[level] == now.by.epoch[level]; ++level) {
    if (history.last.by.unit[level] == now.by.unit[level]) continue;
    history.others[level++] = history.last;
    break;
  }
  for (; level < kLevels; ++level) history.others[level] = {};
  history.last = now;
}

const char* name_of(AccessKind kind) {
  return kind == AccessKind::kRead ? "read" : kind == AccessKind::kWrite ? "write" : "atomic";
}

void report(const History& history, const Access& before, AccessKind kind, const Access& now) {
  std::ostringstream text, places;
  Dl_info library;
  dladdr(now.code, &library);
  const auto say = [&](AccessKind of, const Access& access) {
    text << name_of(of) << " by thread " << access.by.thread();
    places << " 0x" << std::hex
           << reinterpret_cast<uintptr_t>(access.code) -
                  reinterpret_cast<uintptr_t>(library.dli_fbase) - 1;
  };
  text << "a race: a ";
  say(kind, now);
  text << " of block " << now.by.block() << " and a ";
  say(history.kind, before);
  text << " of block " << before.by.block() << ", no barrier between them; addr2line -Cpife "
       << library.dli_fname << places.str() << " says where";
  failure = text.str();
}

void access_word(uintptr_t word, unsigned bytes, AccessKind kind, const Access& now) {
  int& head = head_of(word);
  History* same = nullptr;
  for (int at = head - 1; at >= 0; at = histories[at].next) {
    History& history = histories[at];
    if (history.kind == kind && history.bytes == bytes) same = &history;
    const bool conflicts = kind != history.kind || kind == AccessKind::kWrite;
    if (!conflicts || (history.bytes & bytes) == 0) continue;
    if (!ordered(history.last.by, now.by)) report(history, history.last, kind, now);
    for (const Access& other : history.others) {
      if (other.code != nullptr && !ordered(other.by, now.by)) report(history, other, kind, now);
    }
  }
  if (same != nullptr) {
    add(*same, now);
    return;
  }
  int at = static_cast<int>(histories.size());
  if (unused.empty()) {
    histories.emplace_back();
  } else {
    at = unused.back();
    unused.pop_back();
  }
  histories[at] = {kind, bytes, head - 1, now, {}};
  head = at + 1;
}

void access(const void* at, size_t bytes, AccessKind kind, const void* code) {
  const char* const address = static_cast<const char*>(at);
  if (!failure.empty() || running->is_own(address)) return;
  const char* const shared = shared_of(0);
  const bool is_shared = address >= shared && address < shared + sizeof(shared_memory);
  if (!is_shared && address >= __ehdr_start && address < _end) return;
  const Access now{code, running->place()};
  for (auto first = reinterpret_cast<uintptr_t>(at), end = first + bytes; first < end;) {
    const uintptr_t word = first / kWordBytes, stop = std::min((word + 1) * kWordBytes, end);
    access_word(word, ((1u << (stop - first)) - 1) << first % kWordBytes, kind, now);
    first = stop;
  }
}

// What the compiled code calls.
void seen(const void* at, size_t bytes, AccessKind kind, const void* code) {
  if (!recording) return;
  recording = false;  // What is called from here may be the compiled code's copy of a function.
  access(at, bytes, kind, code);
  recording = true;
}

}  // namespace

__attribute__((noinline)) void accessed(const void* at, size_t bytes, AccessKind kind) {
  Recording on(records_races);
  seen(at, bytes, kind, __builtin_return_address(0));
}

void forget_accesses() {
  last_page = {};
  pages.clear();
  histories.clear();
  histories.shrink_to_fit();
  unused.clear();
}

// Shared memory is that of other blocks now, of which there may be many.
void forget_shared_accesses() {
  last_page = {};
  const auto first = reinterpret_cast<uintptr_t>(shared_of(0)) / kPageBytes;
  for (uintptr_t page = first; page <= first + sizeof(shared_memory) / kPageBytes + 1; ++page) {
    const auto found = pages.find(page);
    if (found == pages.end()) continue;
    for (int head : found->second) {
      for (int at = head - 1; at >= 0; at = histories[at].next) unused.push_back(at);
    }
    pages.erase(found);
  }
}

}  // namespace fibers

// Names and types are GCC's.
#define FIBERS_SEEN(name, bytes, kind)                                              \
  void __tsan_##name(const void* at) {                                              \
    fibers::seen(at, bytes, fibers::AccessKind::kind, __builtin_return_address(0)); \
  }
#define FIBERS_SEEN_BOTH(bytes)                        \
  FIBERS_SEEN(read##bytes, bytes, kRead)               \
  FIBERS_SEEN(unaligned_read##bytes, bytes, kRead)     \
  FIBERS_SEEN(write##bytes, bytes, kWrite)             \
  FIBERS_SEEN(unaligned_write##bytes, bytes, kWrite)
// Atomics of the host's code; the kernels' are CUDA's.
#define FIBERS_ATOMIC(bits, T)                                                            \
  T __tsan_atomic##bits##_load(const T* at, int) { return __atomic_load_n(at, 5); }       \
  void __tsan_atomic##bits##_store(T* at, T x, int) { __atomic_store_n(at, x, 5); }       \
  T __tsan_atomic##bits##_fetch_add(T* at, T x, int) { return __atomic_fetch_add(at, x, 5); } \
  T __tsan_atomic##bits##_fetch_sub(T* at, T x, int) { return __atomic_fetch_sub(at, x, 5); } \
  bool __tsan_atomic##bits##_compare_exchange_strong(T* at, T* old, T x, int, int) {      \
    return __atomic_compare_exchange_n(at, old, x, false, 5, 5);                          \
  }                                                                                       \
  bool __tsan_atomic##bits##_compare_exchange_weak(T* at, T* old, T x, int, int) {        \
    return __atomic_compare_exchange_n(at, old, x, false, 5, 5);                          \
  }

extern "C" {
FIBERS_SEEN_BOTH(1)
FIBERS_SEEN_BOTH(2)
FIBERS_SEEN_BOTH(4)
FIBERS_SEEN_BOTH(8)
FIBERS_SEEN_BOTH(16)
FIBERS_ATOMIC(8, uint8_t)
FIBERS_ATOMIC(32, uint32_t)
FIBERS_ATOMIC(64, uint64_t)
void __tsan_read_range(const void* at, size_t bytes) {
  fibers::seen(at, bytes, fibers::AccessKind::kRead, __builtin_return_address(0));
}
void __tsan_write_range(const void* at, size_t bytes) {
  fibers::seen(at, bytes, fibers::AccessKind::kWrite, __builtin_return_address(0));
}
void __tsan_atomic_thread_fence(int) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_init() {}
}
