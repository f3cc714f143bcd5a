// lru_diff on the device: one block per row.
//
// The block hashes the selected pages and looks up each resident page in the hash. The i-th miss,
// in order of first occurrence, goes to the i-th coldest slot that was not hit. The order is
// rewritten in place.
#pragma once

#include "hisparse/block.cuh"

#include <climits>

namespace hisparse {

struct LruDiffParams {
  const int32_t* selection;        // [R, K]
  const int32_t* host_page_table;  // [T, Pmax]
  const int32_t* page_limits;      // [T], pages that may be selected; null: num_pages for each
  const int32_t* capacity;         // [R]
  const int32_t* num_real_rows;    // [1]
  const int64_t* rows;             // [R]
  int32_t* slot_pages;             // [NR, C]
  int32_t* lru_order;              // [NR, C]
  int32_t* curr_device_slots;      // [R, K]
  int32_t* load_host_pages;        // [R, K]
  int32_t* load_device_slots;      // [R, K]
  int32_t* num_hits;               // [R]
  int32_t* num_misses;             // [R]
  char* scratch;                   // [R, workspace bytes], or null: shared memory is enough
  int64_t selection_stride, table_stride, slot_pages_stride, lru_order_stride;  // elements
  int64_t current_stride, load_host_stride, load_slots_stride;                  // elements
  int32_t width, slots, num_pages, num_states, rows_per_table;
};

// Lists of one row, in shared memory or, if the selection is too wide for it, in global memory.
struct LruWorkspace {
  int32_t* keys;       // [hash size], a selected page or -1
  int32_t* first;      // [hash size], the first entry that names it
  int32_t* entry_at;   // [K], index in the hash of an entry's page, or -1
  int32_t* slot_of;    // [K], by first entry: the slot that holds its page, or -2 - rank of the miss
  int32_t* load_page;  // [K], by rank of the miss
  int32_t* victims;    // [K], slots from cold to hot
  int32_t* hits;       // [K], slots from cold to hot
  uint32_t* hit_bits;  // [C / 32], by slot
  int32_t hash_size;

  __host__ __device__ static int32_t hash_size_of(int32_t width) { return 2 * width + kWarp; }

  __host__ __device__ static int64_t bytes(int32_t width, int32_t slots) {
    const int64_t words = 2 * int64_t{hash_size_of(width)} + 5 * int64_t{width} + slots / kWarp + 1;
    return (words * 4 + 15) / 16 * 16;
  }

  __device__ LruWorkspace(char* memory, int32_t width) : hash_size(hash_size_of(width)) {
    keys = reinterpret_cast<int32_t*>(memory);
    first = keys + hash_size;
    entry_at = first + hash_size;
    slot_of = entry_at + width;
    load_page = slot_of + width;
    victims = load_page + width;
    hits = victims + width;
    hit_bits = reinterpret_cast<uint32_t*>(hits + width);
  }

  // Where probing for a page begins. Half of the hash stays free, so probing ends.
  __device__ int32_t home(int32_t page) const {
    return static_cast<int32_t>(__umulhi(static_cast<uint32_t>(page) * 0x9E3779B1u,
                                         static_cast<uint32_t>(hash_size)));
  }
  __device__ int32_t next(int32_t at) const { return at + 1 == hash_size ? 0 : at + 1; }

  __device__ int32_t insert(int32_t page, int32_t entry) const {
    int32_t at = home(page);
    for (;; at = next(at)) {
      const int32_t key = atomicCAS(&keys[at], -1, page);
      if (key == -1 || key == page) break;
    }
    atomicMin(&first[at], entry);
    return at;
  }

  __device__ int32_t find(int32_t page) const {
    int32_t at = home(page);
    while (keys[at] != page) {
      if (keys[at] == -1) return -1;
      at = next(at);
    }
    return at;
  }
};

// The part of a block's state that is always in shared memory.
struct LruShared {
  int32_t totals[BlockRank::kTotals];
  int32_t num_hits;
  int32_t unused[3];  // The workspace behind it begins at a multiple of 16 bytes.
};

// One row. Every method is called by all threads and ends with a barrier.
struct LruRow {
  const LruDiffParams& p;
  LruShared& shared;
  LruWorkspace work;
  BlockRank rank;
  const int32_t* selection;
  int32_t *slot_pages, *lru_order;
  int32_t capacity, limit;

  // Hashes the selected pages. Returns true in a thread that saw a page beyond the row's limit.
  __device__ bool index_selection() {
    for (int32_t i = threadIdx.x; i < work.hash_size; i += num_threads()) {
      work.keys[i] = -1;
      work.first[i] = INT_MAX;
    }
    for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) work.slot_of[i] = -1;
    if (threadIdx.x == 0) shared.num_hits = 0;
    __syncthreads();  // The hash is empty.
    bool bad = false;
    for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) {
      const int32_t page = selection[i];
      bad |= page >= limit;
      work.entry_at[i] = page >= 0 && page < p.num_pages ? work.insert(page, i) : -1;
    }
    __syncthreads();  // The hash is full.
    return bad;
  }

  // Finds the slots that hold a selected page. False, in all threads, if the row cannot be used.
  __device__ bool find_resident(bool bad) {
    for (int32_t base = 0; base < p.slots; base += tile_size()) {
      int32_t page[kItems], slot_in_order[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int32_t slot = base + tile_index(j);
        page[j] = slot < p.slots ? slot_pages[slot] : -1;
        slot_in_order[j] = slot < capacity ? lru_order[slot] : 0;
      }
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int32_t slot = base + tile_index(j);
        const int32_t at = page[j] >= 0 && page[j] < p.num_pages ? work.find(page[j]) : -1;
        if (at >= 0) work.slot_of[work.first[at]] = slot;
        const unsigned hits = __ballot_sync(kAllLanes, at >= 0);
        if (lane_id() == 0 && slot < p.slots) work.hit_bits[slot / kWarp] = hits;
        bad |= static_cast<uint32_t>(slot_in_order[j]) >= static_cast<uint32_t>(p.slots);
      }
    }
    return !__syncthreads_or(bad);
  }

  // Numbers the misses in order of first occurrence; returns how many there are.
  __device__ int32_t number_misses() {
    for (int32_t base = 0; base < p.width; base += tile_size()) {
      bool is_miss[kItems];
      int32_t at[kItems], ranks[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int32_t i = base + tile_index(j);
        at[j] = i < p.width ? work.entry_at[i] : -1;
        const bool is_first = at[j] >= 0 && work.first[at[j]] == i;
        is_miss[j] = is_first && work.slot_of[i] < 0;
        const unsigned hits = __ballot_sync(kAllLanes, is_first && !is_miss[j]);
        if (lane_id() == 0 && hits != 0) atomicAdd(&shared.num_hits, __popc(hits));
      }
      rank(is_miss, ranks);
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        if (!is_miss[j]) continue;
        work.load_page[ranks[j]] = work.keys[at[j]];
        work.slot_of[base + tile_index(j)] = -2 - ranks[j];
      }
    }
    __syncthreads();  // The misses are numbered and the hits are counted.
    return rank.count();
  }

  // Takes victims and hits out of the order and moves the survivors to its front.
  __device__ void split_order(int32_t num_misses) {
    rank.restart();
    for (int32_t base = 0; base < capacity; base += tile_size()) {
      bool is_hit[kItems];
      int32_t slot[kItems], hits_before[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int32_t at = base + tile_index(j);
        slot[j] = at < capacity ? lru_order[at] : -1;
        is_hit[j] = at < capacity && (work.hit_bits[slot[j] / kWarp] >> (slot[j] % kWarp) & 1u);
      }
      // Its barrier stands between the reads of a tile and the writes, which stay below its end.
      rank(is_hit, hits_before);
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int32_t at = base + tile_index(j), cold = at - hits_before[j];
        if (at >= capacity) continue;
        if (is_hit[j]) {
          if (hits_before[j] < p.width) work.hits[hits_before[j]] = slot[j];
        } else if (cold < num_misses) {
          work.victims[cold] = slot[j];
        } else {
          lru_order[cold - num_misses] = slot[j];
        }
      }
    }
    __syncthreads();  // The lists are complete.
  }

  // Writes the results, and victims and hits behind the survivors.
  __device__ void write(int32_t r, int32_t num_misses, const int32_t* host_pages) {
    const int32_t num_hits = shared.num_hits, survivors = capacity - num_hits - num_misses;
    int32_t* current = p.curr_device_slots + r * p.current_stride;
    int32_t* load_host = p.load_host_pages + r * p.load_host_stride;
    int32_t* load_slots = p.load_device_slots + r * p.load_slots_stride;
    for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) {
      int32_t victim = -1, host_page = -1;
      if (i < num_misses) {
        victim = work.victims[i];
        host_page = host_pages[work.load_page[i]];
        slot_pages[victim] = work.load_page[i];
        lru_order[survivors + i] = victim;
      }
      if (i < num_hits) lru_order[survivors + num_misses + i] = work.hits[i];
      load_slots[i] = victim;
      load_host[i] = host_page;
      const int32_t at = work.entry_at[i];
      const int32_t slot = at < 0 ? -1 : work.slot_of[work.first[at]];
      current[i] = slot < -1 ? work.victims[-2 - slot] : slot;
    }
    if (threadIdx.x == 0) {
      p.num_hits[r] = num_hits;
      p.num_misses[r] = num_misses;
    }
  }
};

// A row without results: padding, or, with num_misses = -1, one that cannot be served.
__device__ inline void write_nothing(const LruDiffParams& p, int32_t r, int32_t num_misses) {
  for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) {
    p.curr_device_slots[r * p.current_stride + i] = -1;
    p.load_host_pages[r * p.load_host_stride + i] = -1;
    p.load_device_slots[r * p.load_slots_stride + i] = -1;
  }
  if (threadIdx.x == 0) {
    p.num_hits[r] = 0;
    p.num_misses[r] = num_misses;
  }
}

template <bool kInShared>
__global__ void __launch_bounds__(kMaxThreads)
    lru_diff_kernel(const __grid_constant__ LruDiffParams p) {
  const int32_t r = static_cast<int32_t>(blockIdx.x);
  if (r >= *p.num_real_rows) return write_nothing(p, r, 0);
  const int64_t row = p.rows[r];
  const int32_t capacity = p.capacity[r];
  if (row < 0 || row >= p.num_states || capacity < 0 || capacity > p.slots) {
    return write_nothing(p, r, -1);
  }
  LruShared& shared = *reinterpret_cast<LruShared*>(dynamic_shared());
  char* memory = kInShared ? dynamic_shared() + sizeof(LruShared)
                           : p.scratch + r * LruWorkspace::bytes(p.width, p.slots);
  LruRow step{p,
              shared,
              LruWorkspace(memory, p.width),
              BlockRank(shared.totals),
              p.selection + r * p.selection_stride,
              p.slot_pages + row * p.slot_pages_stride,
              p.lru_order + row * p.lru_order_stride,
              capacity,
              p.page_limits == nullptr ? p.num_pages : p.page_limits[r / p.rows_per_table]};
  const bool bad = step.index_selection();
  if (!step.find_resident(bad)) return write_nothing(p, r, -1);
  const int32_t num_misses = step.number_misses();
  // More pages than slots: nothing has changed yet.
  if (num_misses > capacity - shared.num_hits) return write_nothing(p, r, -1);
  step.split_order(num_misses);
  step.write(r, num_misses, p.host_page_table + r / p.rows_per_table * p.table_stride);
}

}  // namespace hisparse
