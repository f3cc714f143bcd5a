// Replacement policies that replay.cpp runs over recorded selections.
#pragma once

#include "tensors.h"

#include <algorithm>
#include <limits>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

namespace hisparse {

struct Trace {
  const int32_t* pages;       // [N]
  const int64_t* offsets;     // [R + 1], first page of each selection
  const int64_t* streams;     // [S + 1], first selection of each stream
  const int32_t* full_pages;  // [R], complete pages of the context
  int64_t num_streams, num_pages;

  Trace(const TensorView& pages, const TensorView& offsets, const TensorView& streams,
        const TensorView& full_pages, int64_t num_pages)
      : pages(vector_of<const int32_t>(pages, "pages")),
        offsets(vector_of<const int64_t>(offsets, "offsets")),
        streams(vector_of<const int64_t>(streams, "streams")),
        full_pages(vector_of<const int32_t>(full_pages, "full_pages")),
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

struct Fifo {
  explicit Fifo(const Trace& trace) : list(trace.num_pages) {}
  void start(int64_t, int64_t) { list.clear(); }
  void load(int32_t page, int64_t) { list.append(page); }
  void hit(std::vector<int32_t>&, int64_t) {}
  int32_t evict(const Selected& selected) {
    const int32_t page = list.victim(selected);
    list.remove(page);
    return page;
  }

  List list;
};

// The hand is at the coldest page; a page that it passes becomes the hottest.
struct Clock {
  explicit Clock(const Trace& trace) : list(trace.num_pages), used(trace.num_pages) {}
  void start(int64_t, int64_t) { list.clear(); }
  void load(int32_t page, int64_t) {
    used[page] = 0;
    list.append(page);
  }
  void hit(std::vector<int32_t>& pages, int64_t) {
    for (const int32_t page : pages) used[page] = 1;
  }
  int32_t evict(const Selected& selected) {
    for (;;) {
      const int32_t page = list.coldest();
      list.remove(page);
      if (!used[page] && !selected.holds(page)) return page;
      used[page] = 0;
      list.append(page);
    }
  }

  List list;
  std::vector<uint8_t> used;
};

// Fewest uses since the page was loaded; of those, the one whose last use is the longest ago.
struct Lfu {
  explicit Lfu(const Trace& trace) : uses(trace.num_pages), ticks(trace.num_pages, 0) {}
  void start(int64_t, int64_t) {
    heap = {};
    std::fill(ticks.begin(), ticks.end(), 0);
  }
  void load(int32_t page, int64_t) {
    uses[page] = 0;
    use(page);
  }
  void hit(std::vector<int32_t>& pages, int64_t) {
    for (const int32_t page : pages) use(page);
  }
  void use(int32_t page) {
    ticks[page] = ++now;
    heap.emplace(-++uses[page], -now, page);
  }
  int32_t evict(const Selected& selected) {
    for (;;) {
      const auto [minus_uses, minus_tick, page] = heap.top();
      heap.pop();
      // A selected page gets a new entry when it is hit.
      if (ticks[page] != -minus_tick || selected.holds(page)) continue;
      ticks[page] = 0;
      return page;
    }
  }

  using Entry = std::tuple<int64_t, int64_t, int32_t>;
  std::vector<int64_t> uses, ticks;
  std::priority_queue<Entry> heap;
  int64_t now = 0;
};

// 2Q (Johnson and Shasha, 1994): pages loaded once queue in `in`, a quarter of the cache. Those
// that left it are remembered in `out`, half as many as the cache has; loaded again, they enter
// `main`, an LRU.
struct TwoQueues {
  explicit TwoQueues(const Trace& trace)
      : in(trace.num_pages), out(trace.num_pages), main(trace.num_pages), where(trace.num_pages) {}
  void start(int64_t size, int64_t) {
    in.clear();
    out.clear();
    main.clear();
    std::fill(where.begin(), where.end(), kNowhere);
    num_in = num_out = 0;
    most_in = std::max<int64_t>(1, size / 4);
    most_out = std::max<int64_t>(1, size / 2);
  }
  void load(int32_t page, int64_t) {
    if (where[page] == kOut) {
      out.remove(page);
      --num_out;
      main.append(page);
      where[page] = kMain;
    } else {
      in.append(page);
      ++num_in;
      where[page] = kIn;
    }
  }
  void hit(std::vector<int32_t>& pages, int64_t) {
    for (const int32_t page : pages) {
      if (where[page] != kMain) continue;
      main.remove(page);
      main.append(page);
    }
  }
  int32_t evict(const Selected& selected) {
    const int32_t from_in = in.victim(selected), from_main = main.victim(selected);
    if (from_main == main.end() || (from_in != in.end() && num_in > most_in)) {
      in.remove(from_in);
      --num_in;
      if (num_out == most_out) {
        where[out.coldest()] = kNowhere;
        out.remove(out.coldest());
        --num_out;
      }
      out.append(from_in);
      ++num_out;
      where[from_in] = kOut;
      return from_in;
    }
    main.remove(from_main);
    where[from_main] = kNowhere;
    return from_main;
  }

  enum : uint8_t { kNowhere, kIn, kOut, kMain };
  List in, out, main;
  std::vector<uint8_t> where;
  int64_t num_in = 0, num_out = 0, most_in = 0, most_out = 0;
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

}  // namespace hisparse
