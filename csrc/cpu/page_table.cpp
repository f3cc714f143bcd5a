// page_table, page_tables: the device pages behind slots.
#include "tensors.h"

namespace hisparse {
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

// slots, load_slots [R, K]; attended [R, K + 1] has the tail page at entry lengths[r]. `malformed`
// counts rows before num_real_rows; it may be empty.
void page_tables(TensorView device_pages, TensorView rows, TensorView slots, TensorView load_slots,
                 TensorView lengths, TensorView tail_pages, TensorView attended, TensorView loads,
                 TensorView num_hits, TensorView num_misses, TensorView num_real_rows,
                 TensorView malformed) {
  const DevicePages pages(device_pages);
  const int64_t* row_of = vector_of<const int64_t>(rows, "rows");
  const int32_t* tail_at = vector_of<const int32_t>(lengths, "lengths");
  const int32_t* tails = vector_of<const int32_t>(tail_pages, "tail_pages");
  const auto selected = rows_of<const int32_t>(slots, "curr_device_slots");
  const auto missing = rows_of<const int32_t>(load_slots, "load_device_slots");
  const auto attended_to = rows_of<int32_t>(attended, "attended");
  const auto loads_to = rows_of<int32_t>(loads, "loads");
  const int32_t* hits = vector_of<const int32_t>(num_hits, "num_hits");
  const int32_t* misses = vector_of<const int32_t>(num_misses, "num_misses");
  const int64_t width = slots.size(1);
  const int64_t guarded = malformed.size(0) == 0
                              ? 0
                              : *vector_of<const int32_t>(num_real_rows, "num_real_rows");
  for (int64_t r = 0; r < slots.size(0); ++r) {
    const int32_t* own = pages.row(row_of[r]);
    if (tail_at[r] < 0 || tail_at[r] > width) {
      TVM_FFI_THROW(ValueError) << "lengths: got " << tail_at[r] << ", expected 0 to " << width;
    }
    pages.look_up(own, selected[r], width, attended_to[r], "curr_device_slots");
    pages.look_up(own, missing[r], width, loads_to[r], "load_device_slots");
    attended_to[r][width] = -1;
    attended_to[r][tail_at[r]] = tails[r];
    if (r < guarded && !well_formed(selected[r], width, tail_at[r], hits[r] + misses[r])) {
      ++*vector_of<int64_t>(malformed, "malformed");
    }
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(page_table, page_table);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(page_tables, page_tables);

}  // namespace
}  // namespace hisparse
