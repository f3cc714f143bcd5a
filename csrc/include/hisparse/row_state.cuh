// Changes to rows outside diff_tables, on the device: full tail pages, reuse, capacity.
#pragma once

#include "hisparse/transfer.cuh"

namespace hisparse {

// Tables of all layers, or of one.
struct RowTables {
  int32_t* slot_pages;    // [L, NR, C]
  int32_t* lru_order;     // [L, NR, C]
  int32_t* device_pages;  // [L, NR, C]
  int32_t* page_slots;    // [L, NR, indexed], see diff_tables.cuh
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
// leave the tables does not change. Rows without capacity only copy.
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
  int32_t* scratch;             // [B, L, 2, C], B rows change at once
  int32_t* plan;                // [M, 2], capacity before, -1: the row stays; and the height of the
                                // free stacks when the row's turn comes
  int64_t free_stride;          // elements
  RowTables tables;             // of all layers
  int32_t num_layers, num_changes, free_size;
  bool grows;  // which rows change: those that grow, or those that shrink
};

// The shared memory of plan_rebalance_kernel.
struct PlanShared {
  int64_t totals[kMaxWarps];
  int32_t served;  // pages that rows get or give
};

// The sum of `own` over the threads up to this one; all threads call it. `totals` is [kMaxWarps] in
// shared memory; `sum` is set to the sum over all threads.
__device__ inline int64_t sum_up_to_here(int64_t own, int64_t* totals, int64_t& sum) {
  const auto add_lower_lanes = [](int64_t value) {
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int64_t lower = __shfl_up_sync(kAllLanes, value, distance);
      if (lane_id() >= distance) value += lower;
    }
    return value;
  };
  const int64_t in_warp = add_lower_lanes(own);
  if (lane_id() == kWarp - 1) totals[warp_id()] = in_warp;
  __syncthreads();
  const int64_t of_warp = lane_id() < num_threads() / kWarp ? totals[lane_id()] : 0;
  const int64_t warps = add_lower_lanes(of_warp);
  sum = __shfl_sync(kAllLanes, warps, kWarp - 1);
  const int64_t up_to_here = in_warp + __shfl_sync(kAllLanes, warps - of_warp, warp_id());
  __syncthreads();  // The totals have been read.
  return up_to_here;
}

// Gives each row its place on the free stacks, which are alike in all layers, and its capacity:
// shrinks first, each in the order of the rows. A row that would overrun the stack stays as it is,
// as do those after it. One block.
__global__ void __launch_bounds__(kMaxThreads, 1)
    plan_rebalance_kernel(const __grid_constant__ RebalanceParams p) {
  wait_for_earlier_launches();
  PlanShared& shared = *reinterpret_cast<PlanShared*>(dynamic_shared());
  int32_t free = p.num_free[0];
  if (free < 0 || free > p.free_size) return;
  for (int grows = 0; grows < 2; ++grows) {
    const int32_t room = grows ? free : p.free_size - free;
    int64_t asked = 0;  // pages of the rows before a tile
    if (threadIdx.x == 0) shared.served = 0;
    for (int32_t base = 0; base < p.num_changes; base += num_threads()) {
      const int32_t i = base + static_cast<int32_t>(threadIdx.x);
      int32_t old = 0, pages = 0;
      if (i < p.num_changes && p.tables.has(p.rows[i], p.new_capacity[i])) {
        old = p.capacity[p.rows[i]];
        const int32_t gained = p.new_capacity[i] - old;
        if (p.tables.has(p.rows[i], old)) pages = max(grows ? gained : -gained, 0);
      }
      int64_t sum;
      const int64_t upto = asked + sum_up_to_here(pages, shared.totals, sum);
      asked += sum;
      if (pages == 0 || upto > room) continue;
      const int32_t before = static_cast<int32_t>(upto) - pages;
      p.plan[2 * i] = old;
      p.plan[2 * i + 1] = grows ? free - before : free + before;
      p.capacity[p.rows[i]] = p.new_capacity[i];
      atomicAdd(&shared.served, pages);
    }
    __syncthreads();  // All have been served.
    free += grows ? -shared.served : shared.served;
    __syncthreads();  // The number has been read.
  }
  for (int32_t layer = threadIdx.x; layer < p.num_layers; layer += num_threads()) {
    p.num_free[layer] = free;
  }
}

// Changes one row from `old` to `count` slots, with the free stack `free` pages high; `new_held` is
// [2, C].
__device__ inline void resize_row(const RebalanceParams& p, int64_t layer, int64_t row, int32_t old,
                                  int32_t count, int32_t free, int32_t* new_held) {
  const RowTables& t = p.tables;
  int32_t *held = t.held(layer, row), *order = t.order(layer, row), *pages = t.pages(layer, row);
  int32_t* stack = p.free_pages + layer * p.free_stride;
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
  __syncthreads();  // The block's next row may overwrite the scratch.
}

// Changes the planned rows that shrink, or those that grow, which get pages of the others: launched
// twice. blockIdx.x takes every gridDim.x-th row, blockIdx.y is the layer.
__global__ void __launch_bounds__(kMaxThreads, 1)
    rebalance_kernel(const __grid_constant__ RebalanceParams p) {
  wait_for_earlier_launches();
  const int64_t layer = blockIdx.y, block = int64_t{blockIdx.x} * gridDim.y + layer;
  for (int32_t i = static_cast<int32_t>(blockIdx.x); i < p.num_changes;
       i += static_cast<int32_t>(gridDim.x)) {
    const int32_t old = p.plan[2 * i], count = p.new_capacity[i];
    if (old < 0 || (count > old) != p.grows) continue;
    resize_row(p, layer, p.rows[i], old, count, p.plan[2 * i + 1],
               p.scratch + block * 2 * p.tables.slots);
  }
}

}  // namespace hisparse
