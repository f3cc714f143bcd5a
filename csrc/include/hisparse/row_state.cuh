// Changes to rows outside lru_diff, on the device: full tail pages, reuse, capacity.
#pragma once

#include "hisparse/transfer.cuh"

namespace hisparse {

// Tables of all layers, or of one.
struct RowTables {
  int32_t* slot_pages;    // [L, NR, C]
  int32_t* lru_order;     // [L, NR, C]
  int32_t* device_pages;  // [L, NR, C]
  int32_t* page_slots;    // [L, NR, indexed], see lru_diff.cuh
  int64_t slot_pages_layer, lru_order_layer, device_pages_layer, page_slots_layer;  // elements
  int64_t slot_pages_row, lru_order_row, device_pages_row, page_slots_row;          // elements
  int32_t num_states, slots, indexed;

  __device__ bool has(int64_t row, int32_t capacity) const {
    return row >= 0 && row < num_states && capacity >= 0 && capacity <= slots;
  }
  __device__ int32_t* held(int64_t layer, int64_t row) const {
    return slot_pages + layer * slot_pages_layer + row * slot_pages_row;
  }
  __device__ int32_t* order(int64_t layer, int64_t row) const {
    return lru_order + layer * lru_order_layer + row * lru_order_row;
  }
  __device__ int32_t* pages(int64_t layer, int64_t row) const {
    return device_pages + layer * device_pages_layer + row * device_pages_row;
  }
  // A page of the sequence moves into a slot.
  __device__ void put(int64_t layer, int64_t row, int32_t page, int32_t slot) const {
    held(layer, row)[slot] = page;
    if (page < 0 || page >= indexed) return;
    page_slots[layer * page_slots_layer + row * page_slots_row + page] = slot;
  }
};

// K or V of one layer's device pages, and where full tail pages are copied to.
struct TailPool {
  const char* src;  // [N, Hr, S, D]
  char* dst;        // [T, Hkv, S, D]
  int64_t src_page, dst_request, dst_head;  // strides, bytes
};

struct PromoteTailParams {
  const int64_t* rows;        // [R]
  const int32_t* page_index;  // [T]
  const bool* filled;         // [R]
  const int32_t* capacity;    // [R]
  int32_t* tail_pages;        // [NR]
  RowTables tables;           // of one layer
  TailPool pool[2];
  BlockShape shape[2];                    // of a page
  int32_t num_pools, heads, copies, num_pages;  // R / T, rows with one KV head, N
};

// All threads copy a full tail page of row r, unless another row of the same KV head does.
template <typename Unit>
__device__ void copy_tail(const PromoteTailParams& p, int32_t r, int32_t tail) {
  const int32_t request = r / p.heads, head = r % p.heads;
  if (head % p.copies != 0 || tail < 0 || tail >= p.num_pages) return;
  for (int i = 0; i < p.num_pools; ++i) {
    const TailPool& pool = p.pool[i];
    const char* src = pool.src + tail * pool.src_page;
    char* dst = pool.dst + request * pool.dst_request + head / p.copies * pool.dst_head;
    const int32_t chunks = (p.shape[i].units + kChunkUnits - 1) / kChunkUnits;
    for (int32_t chunk = warp_id(); chunk < chunks; chunk += num_threads() / kWarp) {
      copy_chunk<Unit>(p.shape[i], src, dst, chunk);
    }
  }
}

// One block per row; it leaves at once unless the row's tail page is full. A row whose indices
// leave the tables is left alone. Rows without capacity only copy.
template <typename Unit>
__global__ void __launch_bounds__(kTransferThreads)
    promote_tail_kernel(const __grid_constant__ PromoteTailParams p) {
  wait_for_earlier_launches();
  const int32_t r = static_cast<int32_t>(blockIdx.x);
  if (!p.filled[r]) return;
  const int64_t row = p.rows[r];
  const int32_t capacity = p.capacity[r];
  if (!p.tables.has(row, capacity)) return;
  const int32_t tail = p.tail_pages[row];
  copy_tail<Unit>(p, r, tail);
  if (capacity == 0) return;
  int32_t* order = p.tables.order(0, row);
  const int32_t coldest = order[0];
  if (coldest < 0 || coldest >= p.tables.slots) return;
  // Every slot moves one place towards the cold end; a tile is read before it is written.
  for (int32_t base = 0; base < capacity; base += num_threads()) {
    const int32_t at = base + static_cast<int32_t>(threadIdx.x);
    const int32_t moved = at + 1 < capacity ? order[at + 1] : coldest;
    __syncthreads();
    if (at < capacity) order[at] = moved;
  }
  if (threadIdx.x != 0) return;
  int32_t& page = p.tables.pages(0, row)[coldest];
  p.tail_pages[row] = page;
  page = tail;
  p.tables.put(0, row, p.page_index[r / p.heads], coldest);
}

struct ResetRowsParams {
  const int64_t* rows;      // [M]
  const int32_t* capacity;  // [NR]
  RowTables tables;         // of all layers
};

// One block per row and layer: blockIdx.x, blockIdx.y.
__global__ void __launch_bounds__(kMaxThreads, 1)
    reset_rows_kernel(const __grid_constant__ ResetRowsParams p) {
  wait_for_earlier_launches();
  const int64_t row = p.rows[blockIdx.x];
  if (!p.tables.has(row, 0)) return;
  int32_t* held = p.tables.held(blockIdx.y, row);
  int32_t* order = p.tables.order(blockIdx.y, row);
  for (int32_t slot = threadIdx.x; slot < p.tables.slots; slot += num_threads()) {
    held[slot] = -1;
    order[slot] = slot < p.capacity[row] ? slot : -1;
  }
}

struct RebalanceParams {
  const int64_t* rows;          // [M]
  const int32_t* new_capacity;  // [M]
  int32_t* capacity;            // [NR]
  int32_t* free_pages;          // [L, N]
  int32_t* num_free;            // [L]
  int32_t* scratch;             // [L, 2, C]
  int32_t* changed;             // [M], 0 before; 1 after for a row whose capacity changes
  int64_t free_stride;          // elements
  RowTables tables;             // of all layers
  int32_t num_changes, free_size;
};

// Changes one row from `old` to `count` slots; `free` is the height of the layer's free stack. The
// caller has made sure that the stack has the pages or the space.
__device__ inline void resize_row(const RebalanceParams& p, int64_t layer, int64_t row, int32_t old,
                                  int32_t count, int32_t free) {
  const RowTables& t = p.tables;
  int32_t *held = t.held(layer, row), *order = t.order(layer, row), *pages = t.pages(layer, row);
  int32_t* stack = p.free_pages + layer * p.free_stride;
  int32_t* new_held = p.scratch + layer * 2 * t.slots;
  int32_t* new_pages = new_held + t.slots;
  const int32_t gained = max(count - old, 0), dropped = max(old - count, 0);
  for (int32_t rank = threadIdx.x; rank < old; rank += num_threads()) {
    const int32_t slot = order[rank];
    const bool usable = slot >= 0 && slot < t.slots;
    const int32_t page = usable ? pages[slot] : -1;
    if (rank >= dropped) {
      new_held[gained + rank - dropped] = usable ? held[slot] : -1;
      new_pages[gained + rank - dropped] = page;
    } else {
      stack[free + rank] = page;
    }
  }
  // Gained slots are the coldest.
  for (int32_t slot = threadIdx.x; slot < gained; slot += num_threads()) {
    new_held[slot] = -1;
    new_pages[slot] = stack[free - 1 - slot];
  }
  __syncthreads();  // The row has been read.
  for (int32_t slot = threadIdx.x; slot < t.slots; slot += num_threads()) {
    const bool owned = slot < count;
    t.put(layer, row, owned ? new_held[slot] : -1, slot);
    pages[slot] = owned ? new_pages[slot] : -1;
    order[slot] = owned ? slot : -1;
  }
  __syncthreads();  // The next row may overwrite the scratch and pop pushed pages.
}

// One block per layer. It changes rows one by one, because they share the layer's free stack. A row
// that would overrun the stack ends its pass: that row and those behind it stay as they are.
__global__ void __launch_bounds__(kMaxThreads, 1)
    rebalance_kernel(const __grid_constant__ RebalanceParams p) {
  wait_for_earlier_launches();
  const int64_t layer = blockIdx.x;
  int32_t free = p.num_free[layer];
  if (free < 0 || free > p.free_size) return;
  for (int grows = 0; grows < 2; ++grows) {
    for (int32_t i = 0; i < p.num_changes; ++i) {
      const int64_t row = p.rows[i];
      const int32_t count = p.new_capacity[i];
      if (!p.tables.has(row, count)) continue;
      const int32_t old = p.capacity[row];
      if (count == old || (count > old) != (grows == 1) || !p.tables.has(row, old)) continue;
      const int32_t left = free + old - count;
      if (left < 0 || left > p.free_size) break;
      resize_row(p, layer, row, old, count, free);
      free = left;
      if (layer == 0 && threadIdx.x == 0) p.changed[i] = 1;
    }
  }
  __syncthreads();  // All threads have read the count.
  if (threadIdx.x == 0) p.num_free[layer] = free;
}

// Launched after all layers have read the old capacities.
__global__ void __launch_bounds__(kMaxThreads, 1)
    set_capacity_kernel(const __grid_constant__ RebalanceParams p) {
  wait_for_earlier_launches();
  for (int32_t i = threadIdx.x; i < p.num_changes; i += num_threads()) {
    if (p.changed[i] != 0) p.capacity[p.rows[i]] = p.new_capacity[i];
  }
}

}  // namespace hisparse
