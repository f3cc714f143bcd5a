// page_table: check and launch.
#include "hisparse/page_table.cuh"

#include "launch.h"

namespace hisparse {
namespace {

DevicePages pages_of(const TensorView& device_pages) {
  return {data_of<const int32_t>(device_pages, "device_pages"), device_pages.stride(0),
          size32(device_pages, 0), size32(device_pages, 1)};
}

}  // namespace

void page_table(Arguments& in) {
  const TensorView device_pages = in.tensor(), rows = in.tensor(), slots = in.tensor(),
                   table = in.tensor();
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

HISPARSE_EXPORT_KERNEL(page_table)

}  // namespace hisparse
