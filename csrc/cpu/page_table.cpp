// page_table, diff_tables: the device pages behind slots.
#include "tensors.h"

namespace hisparse {

// lru_diff.cpp
void lru_diff(TensorView selection, TensorView host_page_table, TensorView capacity,
              TensorView num_real_rows, TensorView slot_pages, TensorView lru_order,
              TensorView rows, TensorView entries_current, TensorView entries_host,
              TensorView entries_slots, TensorView num_hits, TensorView num_misses,
              TensorView page_limits);

namespace {

// The rows' device pages [NR, C].
struct DevicePages {
  Rows<const int32_t> data;
  int64_t num_rows, num_slots;

  explicit DevicePages(const TensorView& device_pages)
      : data(rows_of<const int32_t>(device_pages, "device_pages")),
        num_rows(device_pages.size(0)),
        num_slots(device_pages.size(1)) {}

  const int32_t* row(int64_t row) const {
    if (row < 0 || row >= num_rows) {
      TVM_FFI_THROW(ValueError) << "rows: got " << row << ", expected 0 to " << num_rows - 1;
    }
    return data[row];
  }

  // Writes the pages of `width` slots of a row; -1 stays -1.
  void look_up(const int32_t* pages, const int32_t* slots, int64_t width, int32_t* table,
               const char* name) const {
    for (int64_t i = 0; i < width; ++i) {
      if (slots[i] >= num_slots) {
        TVM_FFI_THROW(ValueError) << name << ": got " << slots[i] << ", expected at most "
                                  << num_slots - 1;
      }
      table[i] = slots[i] < 0 ? -1 : pages[slots[i]];
    }
  }
};

void page_table(TensorView device_pages, TensorView rows, TensorView slots, TensorView table) {
  const DevicePages pages(device_pages);
  const int64_t* row_of = vector_of<const int64_t>(rows, "rows");
  const Rows<const int32_t> from = rows_of<const int32_t>(slots, "slots");
  const Rows<int32_t> to = rows_of<int32_t>(table, "table");
  for (int64_t r = 0; r < slots.size(0); ++r) {
    pages.look_up(pages.row(row_of[r]), from[r], slots.size(1), to[r], "slots");
  }
}

// Whether the first `length` slots are those of different pages and the others are none.
bool well_formed(const int32_t* slots, int64_t width, int64_t length, int32_t num_pages) {
  // Only -1 is negative, so a sign bit survives "or" if one slot is none, and "and" if all are.
  int32_t within = 0, behind = -1;
  for (int64_t i = 0; i < length; ++i) within |= slots[i];
  for (int64_t i = length; i < width; ++i) behind &= slots[i];
  return num_pages == length && within >= 0 && behind < 0;
}

// attended [R, K + 1] has the tail page at entry lengths[r]. `malformed` counts rows before
// num_real_rows; it may be empty, and so may `dense`: [R], rows that attend the tail page beside any
// number of pages.
void diff_tables(TensorView selection, TensorView lengths, TensorView host_page_table,
                 TensorView page_limits, TensorView capacity, TensorView num_real_rows,
                 TensorView rows, TensorView tail_pages, TensorView tail_lens, TensorView dense,
                 TensorView malformed, TensorView slot_pages, TensorView lru_order,
                 TensorView device_pages, TensorView attended, TensorView seq_lens,
                 TensorView loads, TensorView load_host_pages, TensorView num_hits,
                 TensorView num_misses, int64_t page_size, int64_t tail_below) {
  const int64_t width = selection.size(1);
  const int32_t* length_of = vector_of<const int32_t>(lengths, "lengths");
  for (int64_t r = 0; r < selection.size(0); ++r) {
    if (length_of[r] < 0 || length_of[r] > width) {
      TVM_FFI_THROW(ValueError) << "lengths: got " << length_of[r] << ", expected 0 to " << width;
    }
  }
  // Slots stand where their pages will.
  lru_diff(selection, host_page_table, capacity, num_real_rows, slot_pages, lru_order, rows,
           attended, load_host_pages, loads, num_hits, num_misses, page_limits);
  const DevicePages pages(device_pages);
  const int64_t* row_of = vector_of<const int64_t>(rows, "rows");
  const int32_t* tails = vector_of<const int32_t>(tail_pages, "tail_pages");
  const int32_t* tail_tokens = vector_of<const int32_t>(tail_lens, "tail_lens");
  const bool* with_tail = dense.size(0) == 0 ? nullptr : vector_of<const bool>(dense, "dense");
  const Rows<int32_t> attended_to = rows_of<int32_t>(attended, "attended");
  const Rows<int32_t> loads_to = rows_of<int32_t>(loads, "loads");
  const int32_t* hits = vector_of<const int32_t>(num_hits, "num_hits");
  const int32_t* misses = vector_of<const int32_t>(num_misses, "num_misses");
  int32_t* tokens = vector_of<int32_t>(seq_lens, "seq_lens");
  const int64_t guarded = malformed.size(0) == 0
                              ? 0
                              : *vector_of<const int32_t>(num_real_rows, "num_real_rows");
  for (int64_t r = 0; r < selection.size(0); ++r) {
    const int32_t* own = pages.row(row_of[r]);
    const int32_t length = length_of[r];
    int32_t* entries = attended_to[r];
    if (r < guarded && !well_formed(entries, width, length, hits[r] + misses[r])) {
      ++*vector_of<int64_t>(malformed, "malformed");
    }
    pages.look_up(own, entries, width, entries, "curr_device_slots");
    pages.look_up(own, loads_to[r], width, loads_to[r], "load_device_slots");
    entries[width] = -1;
    entries[length] = tails[r];
    const bool has_tail = length < tail_below || (with_tail != nullptr && with_tail[r]);
    tokens[r] = length * static_cast<int32_t>(page_size) + (has_tail ? tail_tokens[r] : 0);
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(page_table, page_table);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(diff_tables, diff_tables);

}  // namespace
}  // namespace hisparse
