// page_table: checks and launch.
#include "hisparse/page_table.cuh"

#include "launch.h"

namespace hisparse {

// `lengths` and `tail_pages` are read only if `with_tails`.
void page_table(TensorView device_pages, TensorView rows, TensorView slots, TensorView lengths,
                TensorView tail_pages, TensorView table, bool with_tails) {
  if (table.numel() == 0) return;
  const PageTableParams p{
      data_of<const int32_t>(device_pages, "device_pages"),
      data_of<const int64_t>(rows, "rows"),
      data_of<const int32_t>(slots, "slots"),
      with_tails ? data_of<const int32_t>(lengths, "lengths") : nullptr,
      with_tails ? data_of<const int32_t>(tail_pages, "tail_pages") : nullptr,
      data_of<int32_t>(table, "table"),
      device_pages.stride(0),
      slots.stride(0),
      table.stride(0),
      size32(slots, 1),
      size32(table, 1),
      size32(device_pages, 0),
      size32(device_pages, 1)};
  OnDevice(slots).launch("page_table", page_table_kernel, dim3(size32(slots, 0)),
                         block_threads(p.table_width, 1), 0, p);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(page_table, page_table);

}  // namespace hisparse
