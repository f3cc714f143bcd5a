// page_table: the device pages behind slots, with each row's tail page right after them.
#include "tensors.h"

#include <algorithm>

namespace hisparse {
namespace {

struct PageTableParams {
  Rows<const int32_t> device_pages;  // [NR, C]
  const int64_t* rows;               // [R]
  Rows<const int32_t> slots;         // [R, K]
  const int32_t* lengths;            // [R], or null: no tail pages
  const int32_t* tail_pages;         // [R]
  Rows<int32_t> table;               // [R, K], or [R, K + 1] with tail pages
  int64_t num_rows, width, num_states, num_slots;
};

void run(const PageTableParams& p) {
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const int64_t row = p.rows[r];
    if (row < 0 || row >= p.num_states) {
      TVM_FFI_THROW(ValueError) << "rows: got " << row << ", expected 0 to " << p.num_states - 1;
    }
    const int32_t *slots = p.slots[r], *pages = p.device_pages[row];
    int32_t* table = p.table[r];
    for (int64_t i = 0; i < p.width; ++i) {
      if (slots[i] >= p.num_slots) {
        TVM_FFI_THROW(ValueError) << "slots: got " << slots[i] << ", expected at most "
                                  << p.num_slots - 1;
      }
      table[i] = slots[i] < 0 ? -1 : pages[slots[i]];
    }
    if (p.lengths == nullptr) continue;
    if (p.lengths[r] < 0 || p.lengths[r] > p.width) {
      TVM_FFI_THROW(ValueError) << "lengths: got " << p.lengths[r] << ", expected 0 to " << p.width;
    }
    table[p.width] = -1;
    table[p.lengths[r]] = p.tail_pages[r];
  }
}

// `lengths` and `tail_pages` are read only if `with_tails`.
void page_table(TensorView device_pages, TensorView rows, TensorView slots, TensorView lengths,
                TensorView tail_pages, TensorView table, bool with_tails) {
  run({rows_of<const int32_t>(device_pages, "device_pages"),
       vector_of<const int64_t>(rows, "rows"), rows_of<const int32_t>(slots, "slots"),
       with_tails ? vector_of<const int32_t>(lengths, "lengths") : nullptr,
       with_tails ? vector_of<const int32_t>(tail_pages, "tail_pages") : nullptr,
       rows_of<int32_t>(table, "table"), slots.size(0), slots.size(1), device_pages.size(0),
       device_pages.size(1)});
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(page_table, page_table);

}  // namespace
}  // namespace hisparse
