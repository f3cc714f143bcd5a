// page_table on the device: the device pages behind slots.
#pragma once

#include "hisparse/block.cuh"

namespace hisparse {

// The rows' device pages [NR, C].
struct DevicePages {
  const int32_t* data;
  int64_t stride;  // elements
  int32_t num_rows, num_slots;

  // -1 for a row or slot that is outside the table.
  __device__ int32_t at(int64_t row, int32_t slot) const {
    const bool inside = row >= 0 && row < num_rows && slot >= 0 && slot < num_slots;
    return inside ? data[row * stride + slot] : -1;
  }
};

struct PageTableParams {
  DevicePages device_pages;
  const int64_t* rows;   // [R]
  const int32_t* slots;  // [R, K]
  int32_t* table;        // [R, K]
  int64_t slots_stride, table_stride;  // elements
  int32_t width;                       // K
};

// blockIdx.x is the row.
__global__ void __launch_bounds__(kMaxThreads, 1)
    page_table_kernel(const __grid_constant__ PageTableParams p) {
  wait_for_earlier_launches();
  const int64_t r = blockIdx.x, row = p.rows[r];
  for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) {
    p.table[r * p.table_stride + i] = p.device_pages.at(row, p.slots[r * p.slots_stride + i]);
  }
}

}  // namespace hisparse
