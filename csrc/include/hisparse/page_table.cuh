// page_table, page_tables on the device: the device pages behind slots.
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
__global__ void __launch_bounds__(kMaxThreads)
    page_table_kernel(const __grid_constant__ PageTableParams p) {
  const int64_t r = blockIdx.x, row = p.rows[r];
  for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) {
    p.table[r * p.table_stride + i] = p.device_pages.at(row, p.slots[r * p.slots_stride + i]);
  }
}

struct PageTablesParams {
  DevicePages device_pages;
  const int64_t* rows;        // [R]
  const int32_t* slots;       // [R, K], of the selected pages
  const int32_t* load_slots;  // [R, K], of the misses
  const int32_t* lengths;     // [R], entry of `attended` that becomes the tail page
  const int32_t* tail_pages;  // [R]
  int32_t* attended;          // [R, K + 1]
  int32_t* loads;             // [R, K]
  int32_t* attended_lengths;  // [R], pages of `attended` before the tail page
  const int32_t* num_hits;    // [R]
  const int32_t* num_misses;  // [R]
  const int32_t* num_real_rows;   // [1]
  unsigned long long* malformed;  // [1], counts rows with another selection than `lengths` pages,
                                  // each once, and nothing behind them; or null
  int64_t slots_stride, load_slots_stride, attended_stride, loads_stride;  // elements
  int32_t width;                                                           // K
};

// blockIdx.x is the row.
__global__ void __launch_bounds__(kMaxThreads)
    page_tables_kernel(const __grid_constant__ PageTablesParams p) {
  const int64_t r = blockIdx.x, row = p.rows[r];
  const int32_t* slots = p.slots + r * p.slots_stride;
  const int32_t length = p.lengths[r];
  bool malformed = p.num_hits[r] + p.num_misses[r] != length;
  bool absent = length < 0 || length > p.width;
  for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) {
    malformed |= (slots[i] >= 0) != (i < length);
    absent |= i < length && p.device_pages.at(row, slots[i]) < 0;
    p.loads[r * p.loads_stride + i] =
        p.device_pages.at(row, p.load_slots[r * p.load_slots_stride + i]);
  }
  // Attention would read page -1, which is memory before the pool.
  const bool tail_alone = p.malformed != nullptr && __syncthreads_or(absent);
  const int32_t tail_at = tail_alone ? 0 : length;
  for (int32_t i = threadIdx.x; i <= p.width; i += num_threads()) {
    const int32_t page = tail_alone || i == p.width ? -1 : p.device_pages.at(row, slots[i]);
    p.attended[r * p.attended_stride + i] = i == tail_at ? p.tail_pages[r] : page;
  }
  if (threadIdx.x == 0) p.attended_lengths[r] = tail_at;
  if (p.malformed == nullptr || r >= *p.num_real_rows) return;
  if (__syncthreads_or(malformed) && threadIdx.x == 0) atomicAdd(p.malformed, 1ull);
}

}  // namespace hisparse
