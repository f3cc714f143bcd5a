// page_table on the device: the device pages behind slots, with each row's tail page behind them.
#pragma once

#include "hisparse/block.cuh"

namespace hisparse {

struct PageTableParams {
  const int32_t* device_pages;  // [NR, C]
  const int64_t* rows;          // [R]
  const int32_t* slots;         // [R, K]
  const int32_t* lengths;       // [R], or null: no tail pages
  const int32_t* tail_pages;    // [R]
  int32_t* table;               // [R, table_width], K or, with tail pages, K + 1
  int64_t pages_stride, slots_stride, table_stride;  // elements
  int32_t width, table_width, num_states, num_slots;
};

// blockIdx.x is the row. Indices that leave the tables give -1.
__global__ void __launch_bounds__(kMaxThreads)
    page_table_kernel(const __grid_constant__ PageTableParams p) {
  const int64_t r = blockIdx.x, row = p.rows[r];
  const bool usable = row >= 0 && row < p.num_states;
  const int32_t tail_at = p.lengths == nullptr ? -1 : p.lengths[r];
  for (int32_t i = threadIdx.x; i < p.table_width; i += num_threads()) {
    const int32_t slot = i < p.width ? p.slots[r * p.slots_stride + i] : -1;
    int32_t page = -1;
    if (usable && slot >= 0 && slot < p.num_slots) {
      page = p.device_pages[row * p.pages_stride + slot];
    }
    p.table[r * p.table_stride + i] = i == tail_at ? p.tail_pages[r] : page;
  }
}

}  // namespace hisparse
