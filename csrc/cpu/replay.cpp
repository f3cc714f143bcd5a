// stack_depths, replay: what caches of many sizes would have held, from recorded selections.
//
// A stream is one row of one layer. Its rows are selections in the order of time. All pages of a
// selection are resident at once: hits are counted before the step, and no page that is selected is
// evicted. Pages that the context completes between two selections enter without being counted.
#include "replay_policies.h"
#include "tensors.h"

#include <algorithm>
#include <vector>

namespace hisparse {
namespace {

// Pages in the order of last use, the hottest at the end.
class Stack {
 public:
  explicit Stack(int64_t num_pages) : present_(num_pages, 0) {}

  void start(int32_t full_pages) {
    for (const int32_t page : order_) present_[page] = 0;
    order_.clear();
    for (int32_t page = 0; page < full_pages; ++page) push(page);
  }

  void push(int32_t page) {
    if (present_[page]) order_.erase(std::find(order_.begin(), order_.end(), page));
    present_[page] = 1;
    order_.push_back(page);
  }

  // Counts the depths of the selected pages and makes them the hottest: new ones in their order,
  // then the others in the order in which they were. histogram: [depth + 1].
  void visit(const std::vector<int32_t>& pages, const Selected& selected, int64_t* histogram,
             int64_t depth) {
    int64_t left = 0;
    for (const int32_t page : pages) left += present_[page];
    const int64_t size = static_cast<int64_t>(order_.size());
    histogram[depth] += static_cast<int64_t>(pages.size()) - left;
    int64_t first = size;
    while (left > 0) left -= selected.holds(order_[--first]);
    again_.clear();
    int64_t kept = first;
    for (int64_t i = first; i < size; ++i) {
      if (selected.holds(order_[i])) {
        ++histogram[std::min(depth, size - 1 - i)];
        again_.push_back(order_[i]);
      } else {
        order_[kept++] = order_[i];
      }
    }
    order_.resize(kept);
    for (const int32_t page : pages) {
      if (!present_[page]) order_.push_back(page);
      present_[page] = 1;
    }
    order_.insert(order_.end(), again_.begin(), again_.end());
  }

 private:
  std::vector<int32_t> order_, again_;
  std::vector<uint8_t> present_;
};

void stack_depths(TensorView pages, TensorView offsets, TensorView streams, TensorView full_pages,
                  TensorView histogram, int64_t num_pages) {
  const Trace trace(pages, offsets, streams, full_pages, num_pages);
  const Rows<int64_t> counts = rows_of<int64_t>(histogram, "histogram");
  Selected selected(num_pages);
  Stack stack(num_pages);
  for (int64_t s = 0; s < trace.num_streams; ++s) {
    int32_t full = trace.full_pages[trace.streams[s]];
    stack.start(full);
    for (int64_t row = trace.streams[s]; row < trace.streams[s + 1]; ++row) {
      for (; full < trace.full_pages[row]; ++full) stack.push(full);
      stack.visit(selected.next(trace, row), selected, counts[s], histogram.size(1) - 1);
    }
  }
}

// A cache of `size` pages.
template <typename Policy>
class Cache {
 public:
  explicit Cache(const Trace& trace)
      : trace_(trace), policy_(trace), selected_(trace.num_pages), resident_(trace.num_pages) {}

  int64_t hits(int64_t stream, int64_t size) {
    std::fill(resident_.begin(), resident_.end(), 0);
    size_ = size;
    count_ = 0;
    const int64_t begin = trace_.streams[stream];
    int32_t full = trace_.full_pages[begin];
    policy_.start(size, stream);
    // As after a prefill: the most recent pages.
    const int32_t oldest = std::max<int32_t>(0, full - static_cast<int32_t>(size));
    for (int32_t page = oldest; page < full; ++page) load(page, begin - 1);
    int64_t found = 0;
    for (int64_t row = begin; row < trace_.streams[stream + 1]; ++row) {
      for (; full < trace_.full_pages[row]; ++full) enter(full, row);
      found += step(row);
    }
    return found;
  }

 private:
  // A page that the context has completed. The selection of the step before is still known.
  void enter(int32_t page, int64_t row) {
    if (resident_[page]) return;
    if (count_ == size_) evict(nothing_);
    load(page, row - 1);
  }

  int64_t step(int64_t row) {
    hits_.clear();
    misses_.clear();
    for (const int32_t page : selected_.next(trace_, row)) {
      (resident_[page] ? hits_ : misses_).push_back(page);
    }
    const int64_t needed = count_ + static_cast<int64_t>(misses_.size()) - size_;
    for (int64_t i = 0; i < needed; ++i) evict(selected_);
    for (const int32_t page : misses_) load(page, row);
    policy_.hit(hits_, row);
    return static_cast<int64_t>(hits_.size());
  }

  void load(int32_t page, int64_t row) {
    policy_.load(page, row);
    resident_[page] = 1;
    ++count_;
  }

  void evict(const Selected& selected) {
    resident_[policy_.evict(selected)] = 0;
    --count_;
  }

  const Trace& trace_;
  Policy policy_;
  Selected selected_, nothing_{trace_.num_pages};
  std::vector<uint8_t> resident_;
  std::vector<int32_t> hits_, misses_;
  int64_t size_ = 0, count_ = 0;
};

template <typename Policy>
void replay_with(const Trace& trace, const int32_t* sizes, int64_t num_sizes, Rows<int64_t> hits) {
  Cache<Policy> cache(trace);
  for (int64_t s = 0; s < trace.num_streams; ++s) {
    for (int64_t i = 0; i < num_sizes; ++i) hits[s][i] = cache.hits(s, sizes[i]);
  }
}

void replay(TensorView pages, TensorView offsets, TensorView streams, TensorView full_pages,
            TensorView sizes, TensorView hits, int64_t num_pages, int64_t policy) {
  const Trace trace(pages, offsets, streams, full_pages, num_pages);
  const Rows<int64_t> out = rows_of<int64_t>(hits, "hits");
  const int32_t* each = vector_of<const int32_t>(sizes, "sizes");
  const int64_t count = sizes.size(0);
  switch (policy) {  // The order of POLICIES in hisparse/kernels/recorded.py.
    case 0: return replay_with<Lru>(trace, each, count, out);
    case 1: return replay_with<Fifo>(trace, each, count, out);
    case 2: return replay_with<Clock>(trace, each, count, out);
    case 3: return replay_with<Lfu>(trace, each, count, out);
    case 4: return replay_with<TwoQueues>(trace, each, count, out);
    case 5: return replay_with<Belady>(trace, each, count, out);
  }
  TVM_FFI_THROW(ValueError) << "policy: got " << policy << ", expected 0 to 5";
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(stack_depths, stack_depths);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(replay, replay);

}  // namespace
}  // namespace hisparse
