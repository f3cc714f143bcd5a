// The first half of diff_tables: find resident pages, choose slots to evict, map misses to those slots.
#include "lru_diff.h"
#include "partition.h"
#include "tensors.h"

#include <algorithm>
#include <atomic>
#include <vector>

namespace hisparse {
namespace {

enum class Fault : int { kNone, kStateRow, kCapacity, kPage, kOrder, kTooMany };

// Scratch for one row's lists; nothing in it is read before it is written.
template <typename Slot>
struct Scratch {
  std::vector<Slot> slot_of;      // by page + 1
  std::vector<uint8_t> slot_hit;  // by slot + 1
  std::vector<int32_t> hits, others, missing;
  std::vector<uint8_t> is_hit;

  void fit(const LruDiffParams& p) {
    // One spare entry, because a narrow table is read in pairs.
    grow(slot_of, static_cast<size_t>(p.num_pages) + 3);
    grow(slot_hit, static_cast<size_t>(p.slots) + 1);
    const size_t slots = static_cast<size_t>(p.slots) + kPartitionSlack;
    grow(hits, slots);
    grow(others, slots);
    grow(is_hit, slots);
    grow(missing, static_cast<size_t>(p.width) + kPartitionSlack);
  }

 private:
  template <typename T>
  static void grow(std::vector<T>& list, size_t size) {
    if (list.size() < size) list.resize(size);
  }
};

void fill_padding(const LruDiffParams& p, int64_t r) {
  for (const auto& out : {p.curr_device_slots, p.load_host_pages, p.load_device_slots}) {
    std::fill_n(out[r], p.width, -1);
  }
  p.num_hits[r] = p.num_misses[r] = 0;
}

// Gives each of `count` missing entries, in order of first occurrence, the coldest slot that is
// left. Returns the number of slots taken, or more than the number of victims if they run out.
template <typename Slot>
int32_t map_loads(const LruDiffParams& p, int64_t r, int32_t count, const Partition& part,
                  Scratch<Slot>& scratch) {
  const int32_t* selection = p.selection[r];
  int32_t* current = p.curr_device_slots[r];
  int32_t num_misses = 0;
  for (int32_t m = 0; m < count; ++m) {
    const int32_t entry = scratch.missing[m];
    Slot& slot = scratch.slot_of[selection[entry] + 1];
    if (slot == kNoSlot<Slot>) {
      if (num_misses == part.num_others) return num_misses + 1;
      slot = static_cast<Slot>(part.others[num_misses]);
      p.load_host_pages[r][num_misses] = selection[entry];
      p.load_device_slots[r][num_misses] = part.others[num_misses];
      ++num_misses;
    }
    current[entry] = static_cast<int32_t>(slot);
  }
  return num_misses;
}

// The order after the step: survivors, then loads, then hits.
void commit(const LruDiffParams& p, int64_t r, const Partition& part, int32_t num_loads) {
  int32_t* order = p.lru_order[p.rows[r]];
  int32_t* pages = p.slot_pages[p.rows[r]];
  const int32_t num_survivors = part.num_others - num_loads;
  std::copy_n(part.others + num_loads, num_survivors, order);
  std::copy_n(part.others, num_loads, order + num_survivors);
  std::copy_n(part.hits, part.num_hits, order + part.num_others);
  const int32_t* host_pages = p.host_pages[r / p.rows_per_table];
  int32_t* load_pages = p.load_host_pages[r];
  int32_t* load_slots = p.load_device_slots[r];
  for (int32_t i = 0; i < num_loads; ++i) {
    pages[load_slots[i]] = load_pages[i];
    load_pages[i] = host_pages[load_pages[i]];
  }
  std::fill(load_pages + num_loads, load_pages + p.width, -1);
  std::fill(load_slots + num_loads, load_slots + p.width, -1);
  p.num_hits[r] = part.num_hits;
  p.num_misses[r] = num_loads;
}

template <typename Slot>
Fault step_row(const LruDiffParams& p, int64_t r, Scratch<Slot>& scratch) {
  const int64_t row = p.rows[r];
  if (row < 0 || row >= p.num_states) return Fault::kStateRow;
  const int32_t capacity = p.capacity[r];
  if (capacity < 0 || capacity > p.slots) return Fault::kCapacity;
  const int32_t* selection = p.selection[r];
  int32_t largest = -1;
  for (int32_t i = 0; i < p.width; ++i) largest = std::max(largest, selection[i]);
  if (largest >= p.limit(r)) return Fault::kPage;

  scratch.fit(p);
  map_pages(selection, p.width, p.slot_pages[row], p.slots, p.num_pages, scratch.slot_of.data());
  int32_t* current = p.curr_device_slots[r];
  const int32_t num_missing =
      find_slots(selection, p.width, scratch.slot_of.data(), current, scratch.missing.data());
  uint8_t* slot_hit = scratch.slot_hit.data();
  mark_hits(current, p.width, slot_hit, p.slots);
  Partition part{p.lru_order[row],      slot_hit + 1,          scratch.is_hit.data(),
                 scratch.hits.data(),   scratch.others.data(), capacity,
                 p.slots};
  if (!part.run()) return Fault::kOrder;
  const int32_t num_misses = map_loads(p, r, num_missing, part, scratch);
  if (num_misses > part.num_others) return Fault::kTooMany;
  commit(p, r, part, num_misses);
  for (int32_t m = 0; !p.waits && m < num_missing; ++m) current[scratch.missing[m]] = kAway;
  return Fault::kNone;
}

// The unique pages that row r selects.
int64_t count_pages(const LruDiffParams& p, int64_t r) {
  std::vector<int32_t> pages(p.selection[r], p.selection[r] + p.width);
  std::sort(pages.begin(), pages.end());
  const auto end = std::unique(pages.begin(), pages.end());
  return end - std::lower_bound(pages.begin(), end, 0);
}

// The first entry of row r's order that is no slot.
const int32_t* no_slot(const LruDiffParams& p, int64_t r) {
  const int32_t* order = p.lru_order[p.rows[r]];
  return std::find_if(order, order + p.capacity[r],
                      [&](int32_t slot) { return slot < 0 || slot >= p.slots; });
}

void raise(const LruDiffParams& p, Fault fault, int64_t r) {
  switch (fault) {
    case Fault::kStateRow:
      TVM_FFI_THROW(ValueError) << "rows: got " << p.rows[r] << " in row " << r
                                << ", expected 0 to " << p.num_states - 1;
    case Fault::kCapacity:
      TVM_FFI_THROW(ValueError) << "capacity: got " << p.capacity[r] << " in row " << r
                                << ", expected 0 to " << p.slots;
    case Fault::kPage:
      TVM_FFI_THROW(ValueError) << "selection: got page "
                                << *std::max_element(p.selection[r], p.selection[r] + p.width)
                                << " in row " << r << ", expected -1 to " << p.limit(r) - 1;
    case Fault::kOrder:
      TVM_FFI_THROW(ValueError) << "lru_order: got slot " << *no_slot(p, r) << " in state row "
                                << p.rows[r] << ", entry " << no_slot(p, r) - p.lru_order[p.rows[r]]
                                << ", expected 0 to " << p.slots - 1;
    case Fault::kTooMany:
      TVM_FFI_THROW(ValueError) << "selection: got " << count_pages(p, r) << " pages in state row "
                                << p.rows[r] << ", expected at most its capacity, "
                                << p.capacity[r];
    case Fault::kNone:
      break;
  }
}

// The first request of each run of requests that have the same state rows, and the number of requests.
std::vector<int64_t> first_requests(const LruDiffParams& p) {
  const int64_t heads = p.rows_per_table, requests = p.num_rows / heads;
  std::vector<int64_t> firsts;
  for (int64_t t = 0; t < requests; ++t) {
    if (t == 0 || p.rows[t * heads] != p.rows[(t - 1) * heads]) firsts.push_back(t);
  }
  firsts.push_back(requests);
  return firsts;
}

template <typename Slot>
void run(const LruDiffParams& p) {
  const double total_ns = 1.1 * p.num_real_rows * (static_cast<double>(p.width) + p.slots);
  std::atomic<int64_t> bad_row{-1};
  std::vector<Fault> faults(p.num_rows, Fault::kNone);
  const int64_t heads = p.rows_per_table;
  const std::vector<int64_t> firsts = first_requests(p);
  const int64_t items = (static_cast<int64_t>(firsts.size()) - 1) * heads;
  parallel_for(items, num_threads(items, total_ns), [&](int64_t item) {
    static thread_local Scratch<Slot> scratch;
    const auto i = static_cast<size_t>(item / heads);
    for (int64_t t = firsts[i]; t < firsts[i + 1]; ++t) {
      const int64_t r = t * heads + item % heads;
      if (r >= p.num_real_rows) {
        fill_padding(p, r);
        continue;
      }
      faults[r] = step_row(p, r, scratch);
      if (faults[r] != Fault::kNone) bad_row = r;
    }
  });
  if (bad_row >= 0) raise(p, faults[bad_row], bad_row);
}

}  // namespace

void run_lru_diff(const LruDiffParams& p) {
  if (p.num_rows == 0) return;
  if (p.slots < kNoSlot<uint16_t>) {
    run<uint16_t>(p);
  } else {
    run<int32_t>(p);
  }
}

}  // namespace hisparse
