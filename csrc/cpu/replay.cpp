// stack_depths, replay: what caches of many sizes would have held, from recorded selections.
//
// A stream is one row of one layer. Its rows are selections in the order of time. All pages of a
// selection are resident at once: hits are counted before the step, and no page that is selected is
// evicted. Pages that the context completes between two selections enter without being counted.
#include "tensors.h"

#include <algorithm>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

namespace hisparse {
namespace {

struct Trace {
  const int32_t* pages;       // [N]
  const int64_t* offsets;     // [R + 1], first page of each selection
  const int64_t* streams;     // [S + 1], first selection of each stream
  const int32_t* full_pages;  // [R], complete pages of the context
  int64_t num_streams, num_pages;

  Trace(const TensorView& pages, const TensorView& offsets, const TensorView& streams,
        const TensorView& full_pages, int64_t num_pages)
      : pages(data_of<const int32_t>(pages, "pages")),
        offsets(data_of<const int64_t>(offsets, "offsets")),
        streams(data_of<const int64_t>(streams, "streams")),
        full_pages(data_of<const int32_t>(full_pages, "full_pages")),
        num_streams(streams.size(0) - 1),
        num_pages(num_pages) {}
};

// The different pages of a selection, and which pages those are.
class Selected {
 public:
  explicit Selected(int64_t num_pages) : stamps_(num_pages, 0) {}

  const std::vector<int32_t>& next(const Trace& trace, int64_t row) {
    ++now_;
    pages_.clear();
    for (int64_t i = trace.offsets[row]; i < trace.offsets[row + 1]; ++i) {
      const int32_t page = trace.pages[i];
      if (stamps_[page] != now_) pages_.push_back(page);
      stamps_[page] = now_;
    }
    return pages_;
  }

  bool holds(int32_t page) const { return stamps_[page] == now_; }

 private:
  std::vector<int64_t> stamps_;
  std::vector<int32_t> pages_;
  int64_t now_ = 1;  // No page is selected yet.
};

// A doubly linked list of pages, with the coldest first.
class List {
 public:
  explicit List(int64_t num_pages) : next_(num_pages + 1), before_(num_pages + 1) {
    end_ = static_cast<int32_t>(num_pages);
    clear();
  }

  void clear() { next_[end_] = before_[end_] = end_; }
  int32_t end() const { return end_; }
  int32_t coldest() const { return next_[end_]; }
  int32_t after(int32_t page) const { return next_[page]; }

  void append(int32_t page) {
    const int32_t last = before_[end_];
    next_[last] = before_[end_] = page;
    before_[page] = last;
    next_[page] = end_;
  }

  void remove(int32_t page) {
    next_[before_[page]] = next_[page];
    before_[next_[page]] = before_[page];
  }

  // The coldest page that is not selected; the end if there is none.
  int32_t victim(const Selected& selected) const {
    int32_t page = coldest();
    while (page != end_ && selected.holds(page)) page = after(page);
    return page;
  }

 private:
  std::vector<int32_t> next_, before_;
  int32_t end_;
};

// Policies. `start` begins a stream with an empty cache of `size` pages. `evict` removes a page
// that is not selected; `load` follows the evictions of a selection, and `hit` its loads.
struct Lru {
  explicit Lru(const Trace& trace) : list(trace.num_pages), ticks(trace.num_pages) {}
  void start(int64_t, int64_t) {
    list.clear();
    now = 0;
  }
  void load(int32_t page, int64_t) {
    ticks[page] = ++now;
    list.append(page);
  }
  void hit(std::vector<int32_t>& pages, int64_t) {
    // In their old order, as lru_diff does.
    std::sort(pages.begin(), pages.end(),
              [&](int32_t a, int32_t b) { return ticks[a] < ticks[b]; });
    for (const int32_t page : pages) {
      list.remove(page);
      load(page, 0);
    }
  }
  int32_t evict(const Selected& selected) {
    const int32_t page = list.victim(selected);
    list.remove(page);
    return page;
  }

  List list;
  std::vector<int64_t> ticks;
  int64_t now = 0;
};

// Evicts the page that is selected last of all (Belady, 1966): no policy hits more often.
struct Belady {
  explicit Belady(const Trace& trace) : trace(trace), uses(trace.num_pages) {}
  void start(int64_t, int64_t stream) {
    heap = {};
    if (stream != current) {
      for (auto& rows : uses) rows.clear();
      for (int64_t row = trace.streams[stream + 1] - 1; row >= trace.streams[stream]; --row) {
        for (int64_t i = trace.offsets[row]; i < trace.offsets[row + 1]; ++i) {
          uses[trace.pages[i]].push_back(row);
        }
      }
      current = stream;
    }
  }
  void load(int32_t page, int64_t row) {
    // The first use after `row`; uses are in descending order.
    const auto& rows = uses[page];
    const auto later = std::lower_bound(rows.begin(), rows.end(), row,
                                        [](int64_t use, int64_t now) { return use > now; });
    heap.emplace(later == rows.begin() ? kNever : *std::prev(later), page);
  }
  void hit(std::vector<int32_t>& pages, int64_t row) {
    for (const int32_t page : pages) load(page, row);
  }
  int32_t evict(const Selected&) {
    // A page that was used again has an older entry, which is in the past and so never on top.
    const int32_t page = heap.top().second;
    heap.pop();
    return page;
  }

  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  const Trace& trace;
  std::vector<std::vector<int64_t>> uses;
  std::priority_queue<std::pair<int64_t, int32_t>> heap;
  int64_t current = -1;
};

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

void stack_depths(Arguments& in) {
  const TensorView pages = in.tensor(), offsets = in.tensor(), streams = in.tensor(),
                   full_pages = in.tensor(), histogram = in.tensor();
  const auto num_pages = in.number<int64_t>();
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

void replay(Arguments& in) {
  const TensorView pages = in.tensor(), offsets = in.tensor(), streams = in.tensor(),
                   full_pages = in.tensor(), sizes = in.tensor(), hits = in.tensor();
  const auto num_pages = in.number<int64_t>(), policy = in.number<int64_t>();
  const Trace trace(pages, offsets, streams, full_pages, num_pages);
  const Rows<int64_t> out = rows_of<int64_t>(hits, "hits");
  const int32_t* each = data_of<const int32_t>(sizes, "sizes");
  const int64_t count = sizes.size(0);
  switch (policy) {  // The order of POLICIES in hisparse/kernels/recorded.py.
    case 0: return replay_with<Lru>(trace, each, count, out);
    case 1: return replay_with<Belady>(trace, each, count, out);
  }
  TVM_FFI_THROW(ValueError) << "policy: got " << policy << ", expected 0 or 1";
}

HISPARSE_EXPORT_KERNEL(stack_depths)
HISPARSE_EXPORT_KERNEL(replay)

}  // namespace
}  // namespace hisparse
