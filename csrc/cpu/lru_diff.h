// The first half of diff_tables: row-local slots.
#pragma once

#include "tensors.h"

#include <limits>

namespace hisparse {

// The place of a slot for a missing page that the row does not wait for.
constexpr int32_t kAway = std::numeric_limits<int32_t>::max();

struct LruDiffParams {
  Rows<const int32_t> selection;    // [R, K]
  Rows<const int32_t> host_pages;   // [T, Pmax]
  const int32_t* page_limits;       // [T]
  const int32_t* capacity;          // [R]
  const int64_t* rows;              // [R]
  Rows<int32_t> slot_pages;         // [NR, C]
  Rows<int32_t> lru_order;          // [NR, C]
  Rows<int32_t> curr_device_slots;  // [R, K]
  Rows<int32_t> load_host_pages;    // [R, K]
  Rows<int32_t> load_device_slots;  // [R, K]
  int32_t* num_hits;                // [R]
  int32_t* num_misses;              // [R]
  bool waits;                       // whether rows wait for their misses
  int64_t num_rows, num_real_rows, num_states, rows_per_table;
  int32_t width, slots, num_pages;

  // Pages that row r may select.
  int32_t limit(int64_t r) const {
    return std::min(page_limits[r / rows_per_table], num_pages);
  }

  void set(const TensorView& selected, const TensorView& host_page_table, const TensorView& tables) {
    num_rows = selected.size(0);
    selection = rows_of<const int32_t>(selected, "selection");
    host_pages = rows_of<const int32_t>(host_page_table, "host_page_table");
    slot_pages = rows_of<int32_t>(tables, "slot_pages");
    num_states = tables.size(0);
    rows_per_table = num_rows == 0 ? 1 : num_rows / host_page_table.size(0);
    width = static_cast<int32_t>(selected.size(1));
    slots = static_cast<int32_t>(tables.size(1));
    num_pages = static_cast<int32_t>(host_page_table.size(1));
  }
};

// Throws if a row cannot be served; its tables are unchanged.
void run_lru_diff(const LruDiffParams& p);

}  // namespace hisparse
