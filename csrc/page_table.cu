// page_table, page_tables: checks and launches.
#include "hisparse/page_table.cuh"

#include "launch.h"

namespace hisparse {
namespace {

DevicePages pages_of(const TensorView& device_pages) {
  return {data_of<const int32_t>(device_pages, "device_pages"), device_pages.stride(0),
          size32(device_pages, 0), size32(device_pages, 1)};
}

}  // namespace

void page_table(TensorView device_pages, TensorView rows, TensorView slots, TensorView table) {
  if (table.numel() == 0) return;
  const PageTableParams p{pages_of(device_pages),
                          data_of<const int64_t>(rows, "rows"),
                          data_of<const int32_t>(slots, "slots"),
                          data_of<int32_t>(table, "table"),
                          slots.stride(0),
                          table.stride(0),
                          size32(slots, 1)};
  OnDevice(slots).launch("page_table", page_table_kernel, dim3(size32(slots, 0)),
                         block_threads(p.width, 1), 0, p);
}

void page_tables(TensorView device_pages, TensorView rows, TensorView slots, TensorView load_slots,
                 TensorView lengths, TensorView tail_pages, TensorView attended, TensorView loads,
                 TensorView attended_lengths, TensorView num_hits, TensorView num_misses,
                 TensorView num_real_rows, TensorView malformed) {
  if (attended.numel() == 0) return;
  // An empty tensor stands for none.
  const bool guarded = malformed.size(0) != 0;
  const PageTablesParams p{pages_of(device_pages),
                           data_of<const int64_t>(rows, "rows"),
                           data_of<const int32_t>(slots, "curr_device_slots"),
                           data_of<const int32_t>(load_slots, "load_device_slots"),
                           data_of<const int32_t>(lengths, "lengths"),
                           data_of<const int32_t>(tail_pages, "tail_pages"),
                           data_of<int32_t>(attended, "attended"),
                           data_of<int32_t>(loads, "loads"),
                           data_of<int32_t>(attended_lengths, "attended_lengths"),
                           data_of<const int32_t>(num_hits, "num_hits"),
                           data_of<const int32_t>(num_misses, "num_misses"),
                           data_of<const int32_t>(num_real_rows, "num_real_rows"),
                           guarded ? data_of<unsigned long long>(malformed, "malformed") : nullptr,
                           slots.stride(0),
                           load_slots.stride(0),
                           attended.stride(0),
                           loads.stride(0),
                           size32(slots, 1)};
  OnDevice(slots).launch("page_tables", page_tables_kernel, dim3(size32(slots, 0)),
                         block_threads(p.width + 1, 1), 0, p);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(page_table, page_table);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(page_tables, page_tables);

}  // namespace hisparse
