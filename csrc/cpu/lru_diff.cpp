// lru_diff: which selected pages are resident, which slots are evicted, what goes where.
#include "partition.h"
#include "tensors.h"

#include <algorithm>
#include <atomic>
#include <vector>

namespace hisparse {
namespace {

struct LruDiffParams {
  Rows<const int32_t> selection;    // [R, K]
  Rows<const int32_t> host_pages;   // [T, Pmax]
  const int32_t* capacity;          // [R]
  const int64_t* rows;              // [R]
  Rows<int32_t> slot_pages;         // [NR, C]
  Rows<int32_t> lru_order;          // [NR, C]
  Rows<int32_t> curr_device_slots;  // [R, K]
  Rows<int32_t> load_host_pages;    // [R, K]
  Rows<int32_t> load_device_slots;  // [R, K]
  int32_t* num_hits;                // [R]
  int32_t* num_misses;              // [R]
  int64_t num_rows, num_real_rows, num_states, rows_per_table;
  int32_t width, slots, num_pages;
};

enum class Fault : int { kNone, kStateRow, kCapacity, kPage, kOrder, kTooMany };

inline uint32_t entry_of(int32_t page) {
  return page < 0 ? 0u : static_cast<uint32_t>(page) + 1u;
}

// Tables over the pages of a row; entry 0 stands for "no page" and entry p + 1 for page p.
struct Scratch {
  static constexpr int32_t kUnknown = -1;
  std::vector<uint8_t> selected;  // all 0 between rows
  std::vector<int32_t> slot_of;   // all kUnknown between rows
  std::vector<int32_t> hits, others, missing;
  std::vector<uint8_t> is_hit;

  void fit(const LruDiffParams& p) {
    const size_t entries = static_cast<size_t>(p.num_pages) + 2;
    if (slot_of.size() < entries) {
      slot_of.resize(entries, kUnknown);
      selected.resize(entries, 0);
    }
    const size_t slots = static_cast<size_t>(p.slots) + kPartitionSlack;
    if (hits.size() < slots) {
      hits.resize(slots);
      others.resize(slots);
      is_hit.resize(slots);
    }
    const size_t width = static_cast<size_t>(p.width) + kPartitionSlack;
    if (missing.size() < width) missing.resize(width);
  }

  // After a row: entry by entry, or at a stroke where that is less to write.
  void clear(const int32_t* selection, int32_t width, int32_t num_pages) {
    if (num_pages / 8 < width) {
      std::fill_n(selected.begin(), num_pages + 2, 0);
      std::fill_n(slot_of.begin(), num_pages + 2, kUnknown);
      return;
    }
    for (int32_t i = 0; i < width; ++i) {
      selected[entry_of(selection[i])] = 0;
      slot_of[entry_of(selection[i])] = kUnknown;
    }
  }
};

void fill_padding(const LruDiffParams& p, int64_t r) {
  for (const auto& out : {p.curr_device_slots, p.load_host_pages, p.load_device_slots}) {
    std::fill_n(out[r], p.width, -1);
  }
  p.num_hits[r] = p.num_misses[r] = 0;
}

// Gives each miss, in order of first occurrence, the coldest slot that is left. Returns how many.
int32_t map_loads(const LruDiffParams& p, int64_t r, int32_t num_victims, Scratch& scratch) {
  int32_t* slot_of = scratch.slot_of.data();
  const int32_t* selection = p.selection[r];
  int32_t* current = p.curr_device_slots[r];
  int32_t* missing = scratch.missing.data();
  const int32_t count = find_slots(selection, p.width, slot_of, current, missing);
  int32_t num_misses = 0;
  for (int32_t m = 0; m < count; ++m) {
    const int32_t page = selection[missing[m]];
    int32_t& slot = slot_of[entry_of(page)];
    if (slot < 0) {
      if (num_misses == num_victims) return num_victims + 1;
      slot = scratch.others[num_misses];
      p.load_host_pages[r][num_misses] = page;
      p.load_device_slots[r][num_misses] = slot;
      ++num_misses;
    }
    current[missing[m]] = slot;
  }
  return num_misses;
}

// What the step leaves behind: survivors, then loads, then hits.
void commit(const LruDiffParams& p, int64_t r, const Partition& part, int32_t num_misses) {
  int32_t* order = p.lru_order[p.rows[r]];
  int32_t* pages = p.slot_pages[p.rows[r]];
  const int32_t num_survivors = part.num_others - num_misses;
  std::copy_n(part.others + num_misses, num_survivors, order);
  std::copy_n(part.others, num_misses, order + num_survivors);
  std::copy_n(part.hits, part.num_hits, order + part.num_others);
  const int32_t* host_pages = p.host_pages[r / p.rows_per_table];
  int32_t* load_pages = p.load_host_pages[r];
  int32_t* load_slots = p.load_device_slots[r];
  for (int32_t i = 0; i < num_misses; ++i) {
    pages[load_slots[i]] = load_pages[i];
    load_pages[i] = host_pages[load_pages[i]];
  }
  std::fill(load_pages + num_misses, load_pages + p.width, -1);
  std::fill(load_slots + num_misses, load_slots + p.width, -1);
  p.num_hits[r] = part.num_hits;
  p.num_misses[r] = num_misses;
}

Fault step_row(const LruDiffParams& p, int64_t r, Scratch& scratch) {
  const int64_t row = p.rows[r];
  if (row < 0 || row >= p.num_states) return Fault::kStateRow;
  const int32_t capacity = p.capacity[r];
  if (capacity < 0 || capacity > p.slots) return Fault::kCapacity;
  const int32_t* selection = p.selection[r];
  const int32_t width = p.width;
  int32_t largest = -1;
  for (int32_t i = 0; i < width; ++i) largest = std::max(largest, selection[i]);
  if (largest >= p.num_pages) return Fault::kPage;

  scratch.fit(p);
  uint8_t* selected = scratch.selected.data();
  int32_t* slot_of = scratch.slot_of.data();
  for (int32_t i = 0; i < width; ++i) selected[entry_of(selection[i])] = 1;
  selected[0] = 0;
  const int32_t* pages = p.slot_pages[row];
  Partition part;
  part.order = p.lru_order[row];
  part.pages = pages;
  part.selected = selected;
  part.is_hit = scratch.is_hit.data();
  part.hits = scratch.hits.data();
  part.others = scratch.others.data();
  part.capacity = capacity;
  part.num_slots = p.slots;
  part.num_pages = p.num_pages;
  Fault fault = part.run() ? Fault::kNone : Fault::kOrder;
  if (fault == Fault::kNone) {
    for (int32_t i = 0; i < part.num_hits; ++i) slot_of[pages[part.hits[i]] + 1] = part.hits[i];
    const int32_t num_misses = map_loads(p, r, part.num_others, scratch);
    if (num_misses > part.num_others) {
      fault = Fault::kTooMany;
    } else {
      commit(p, r, part, num_misses);
    }
  }
  scratch.clear(selection, width, p.num_pages);
  return fault;
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
                                << " in row " << r << ", expected -1 to " << p.num_pages - 1;
    case Fault::kOrder:
      TVM_FFI_THROW(ValueError) << "lru_order: got a slot beyond 0 to " << p.slots - 1
                                << " within the capacity of state row " << p.rows[r];
    case Fault::kTooMany:
      TVM_FFI_THROW(ValueError) << "selection: got more pages in row " << r
                                << " than its capacity, expected at most " << p.capacity[r];
    case Fault::kNone:
      break;
  }
}

void run(const LruDiffParams& p) {
  const double total_ns = 1.3 * p.num_real_rows * (static_cast<double>(p.width) + p.slots);
  std::atomic<int64_t> bad_row{-1};
  std::vector<Fault> faults(p.num_rows, Fault::kNone);
  parallel_for(p.num_rows, num_threads(p.num_rows, total_ns), [&](int64_t r) {
    static thread_local Scratch scratch;
    if (r >= p.num_real_rows) {
      fill_padding(p, r);
      return;
    }
    faults[r] = step_row(p, r, scratch);
    if (faults[r] != Fault::kNone) bad_row = r;
  });
  if (bad_row >= 0) raise(p, faults[bad_row], bad_row);
}

}  // namespace

void lru_diff(TensorView selection, TensorView host_page_table, TensorView capacity,
              TensorView num_real_rows, TensorView slot_pages, TensorView lru_order,
              TensorView rows, TensorView entries_current, TensorView entries_host,
              TensorView entries_slots, TensorView num_hits, TensorView num_misses) {
  LruDiffParams p;
  p.num_rows = selection.size(0);
  if (p.num_rows == 0) return;
  p.selection = rows_of<const int32_t>(selection, "selection");
  p.host_pages = rows_of<const int32_t>(host_page_table, "host_page_table");
  p.capacity = vector_of<const int32_t>(capacity, "capacity");
  p.rows = vector_of<const int64_t>(rows, "rows");
  p.slot_pages = rows_of<int32_t>(slot_pages, "slot_pages");
  p.lru_order = rows_of<int32_t>(lru_order, "lru_order");
  p.curr_device_slots = rows_of<int32_t>(entries_current, "curr_device_slots");
  p.load_host_pages = rows_of<int32_t>(entries_host, "load_host_pages");
  p.load_device_slots = rows_of<int32_t>(entries_slots, "load_device_slots");
  p.num_hits = vector_of<int32_t>(num_hits, "num_hits");
  p.num_misses = vector_of<int32_t>(num_misses, "num_misses");
  p.num_real_rows = *vector_of<const int32_t>(num_real_rows, "num_real_rows");
  p.num_states = slot_pages.size(0);
  p.rows_per_table = p.num_rows / host_page_table.size(0);
  p.width = static_cast<int32_t>(selection.size(1));
  p.slots = static_cast<int32_t>(slot_pages.size(1));
  p.num_pages = static_cast<int32_t>(host_page_table.size(1));
  run(p);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(lru_diff, lru_diff);

}  // namespace hisparse
