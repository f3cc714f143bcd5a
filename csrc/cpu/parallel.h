// Threads for the CPU operations: OpenMP's, which PyTorch's operators use too. Threads of our own
// would wake beside OpenMP's, which poll for work, and push them or the caller off their cores.
//
// Items are claimed one by one. OpenMP's join waits for every thread of the team, which costs
// milliseconds where another process keeps one from running: after such a wait callers work alone.
#pragma once

#include <cstdint>

namespace hisparse {

// Threads worth using for `items` independent pieces of `total_ns` of work: waking a thread costs
// more than a small call takes. Never more than torch.set_num_threads allows.
int num_threads(int64_t items, double total_ns);

// Calls `body(context, item)` for every item from 0 on, in any order, on `threads` threads at most.
// `body` must not throw.
void parallel_for(int64_t items, int threads, void (*body)(void*, int64_t), void* context);

template <typename Body>
void parallel_for(int64_t items, int threads, Body&& body) {
  auto call = [](void* context, int64_t item) { (*static_cast<Body*>(context))(item); };
  parallel_for(items, threads, call, &body);
}

// Holds OpenMP's teams that the calling thread starts to one thread. Returns the number before.
int64_t hold_openmp();

// Ends a hold, given the number before it.
void release_openmp(int64_t before);

}  // namespace hisparse
