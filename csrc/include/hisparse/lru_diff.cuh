// lru_diff and diff_tables on the device: one block per row.
//
// Each row has an index from pages to slots, which says for every resident page in which slot it
// lies. Other entries of the index mean nothing: a slot that the index names holds a page only if
// `slot_pages` agrees. So nothing has to be erased when a page is evicted or a row is reset.
//
// The i-th miss, in order of first occurrence, goes to the i-th coldest slot that was not hit. The
// order is rewritten in place.
#pragma once

#include "hisparse/block.cuh"
#include "hisparse/ptx.cuh"

namespace hisparse {

struct LruDiffParams {
  const int32_t* selection;        // [R, selected]; not read if every_page
  const int32_t* host_page_table;  // [T, Pmax]
  const int32_t* page_limits;      // [T], pages that may be selected; null: num_pages for each
  const int32_t* capacity;         // [R]
  const int32_t* num_real_rows;    // [1]
  const int64_t* rows;             // [R]
  int32_t* slot_pages;             // [NR, C]
  int32_t* lru_order;              // [NR, C]
  int32_t* page_slots;             // [NR, indexed], the index
  int32_t* load_host_pages;        // [R, K]
  int32_t* num_hits;               // [R]
  int32_t* num_misses;             // [R]
  char* scratch;                   // [R, workspace bytes], or null: shared memory is enough
  int64_t selection_stride, table_stride, slot_pages_stride, lru_order_stride;  // elements
  int64_t page_slots_stride, load_host_stride;                                  // elements
  int32_t width, selected, slots, num_pages, num_states, rows_per_table;
  bool every_page;  // every row selects every page below its limit
};

// What only lru_diff writes.
struct SlotOutputs {
  int32_t* curr_device_slots;  // [R, K]
  int32_t* load_device_slots;  // [R, K]
  int64_t current_stride, load_slots_stride;  // elements
};

// What only diff_tables reads and writes.
struct TableOutputs {
  const int32_t* device_pages;  // [NR, C]
  const int32_t* lengths;       // [R], pages of the selection; not read where all are selected
  const int32_t* tail_pages;    // [R]
  const int32_t* tail_lens;     // [R], tokens
  const bool* dense;            // [T], requests that select every page, or null
  int32_t* attended;            // [R, K + 1], the tail page after the selected ones
  int32_t* loads;               // [R, K]
  int32_t* seq_lens;            // [R], tokens to attend
  unsigned long long* malformed;  // [1], counts rows with another selection than `lengths`
                                  // different pages, and rows that cannot be served; or null
  int64_t device_pages_stride, attended_stride, loads_stride;  // elements
  int32_t page_size, tail_below;  // the tail page is attended beside fewer pages than tail_below
};

// Lists of one row, in shared memory or, if the selection is too wide for it, in global memory.
struct LruWorkspace {
  int32_t* found;      // [K], an entry's slot, -1 for no page, or -2 - the entry that the index
                       // names for its missing page
  int32_t* first;      // [K], by the entry that the index names: the first entry of that page
  int32_t* rank;       // [K], by first entry: rank of the miss
  int32_t* entry;      // [K], by rank of the miss: its first entry
  int32_t* victims;    // [K], slots from cold to hot
  int32_t* hits;       // [K], slots from cold to hot
  uint32_t* hit_bits;  // [C / 32], by slot

  __host__ __device__ static int64_t bytes(int32_t width, int32_t slots) {
    const int64_t words = 6 * int64_t{width} + slots / kWarp + 1;
    return (words * 4 + 15) / 16 * 16;
  }

  __device__ LruWorkspace(char* memory, int32_t width) {
    found = reinterpret_cast<int32_t*>(memory);
    first = found + width;
    rank = first + width;
    entry = rank + width;
    victims = entry + width;
    hits = victims + width;
    hit_bits = reinterpret_cast<uint32_t*>(hits + width);
  }

  __device__ bool is_hit(int32_t slot) const {
    return hit_bits[slot / kWarp] >> (slot % kWarp) & 1u;
  }
};

// The part of a block's state that is always in shared memory.
struct LruShared {
  int32_t totals[BlockRank::kTotals];
  int32_t num_hits;
  int32_t unused[3];  // The workspace behind it begins at a multiple of 16 bytes.
};

// One row. Every method but page_at and slot_at is called by all threads and ends with a barrier.
struct LruRow {
  const LruDiffParams& p;
  LruShared& shared;
  LruWorkspace work;
  BlockRank rank;
  const int32_t* selection;
  int32_t *slot_pages, *lru_order, *page_slots;
  int32_t capacity, limit;
  bool every_page;

  // The page that entry i selects, or -1.
  __device__ int32_t page_at(int32_t i) const {
    if (every_page) return i < limit ? i : -1;
    return i < p.selected ? selection[i] : -1;
  }

  // Looks up the selected pages in the index. Returns true in a thread that saw a page beyond the
  // row's limit.
  __device__ bool find_resident() {
    for (int32_t i = threadIdx.x; i <= p.slots / kWarp; i += num_threads()) work.hit_bits[i] = 0;
    for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) work.first[i] = i;
    if (threadIdx.x == 0) shared.num_hits = 0;
    __syncthreads();  // The bits are clear.
    bool bad = false;
    for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) {
      const int32_t page = page_at(i);
      bad |= page >= limit;
      work.found[i] = -1;
      if (page < 0 || page >= p.num_pages) continue;
      const int32_t slot = load_relaxed(&page_slots[page]);
      if (slot >= 0 && slot < capacity && slot_pages[slot] == page) {
        work.found[i] = slot;
        atomicOr(&work.hit_bits[slot / kWarp], 1u << (slot % kWarp));
      } else {
        // If the page is selected twice, any of its entries may stay here.
        store_relaxed(&page_slots[page], -2 - i);
        work.found[i] = -2;
      }
    }
    __syncthreads();  // The index names an entry for every missing page.
    for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) {
      if (work.found[i] != -2) continue;
      work.found[i] = page_slots[page_at(i)];
      const int32_t named = -2 - work.found[i];
      if (named != i) atomicMin(&work.first[named], i);
    }
    return bad;
  }

  // Counts the hits. False, in all threads, if the row cannot be used.
  __device__ bool count_hits(bool bad) {
    int32_t hits = 0;
    for (int32_t i = threadIdx.x; i <= p.slots / kWarp; i += num_threads()) {
      hits += __popc(work.hit_bits[i]);
    }
    if (hits != 0) atomicAdd(&shared.num_hits, hits);
    for (int32_t at = threadIdx.x; at < capacity; at += num_threads()) {
      bad |= static_cast<uint32_t>(lru_order[at]) >= static_cast<uint32_t>(p.slots);
    }
    return !__syncthreads_or(bad);  // The first entries and the hits are known.
  }

  // Numbers the misses in order of first occurrence; returns how many there are.
  __device__ int32_t number_misses() {
    for (int32_t base = 0; base < p.width; base += tile_size()) {
      bool is_miss[kItems];
      int32_t ranks[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int32_t i = base + tile_index(j);
        const int32_t found = i < p.width ? work.found[i] : -1;
        is_miss[j] = found < -1 && work.first[-2 - found] == i;
      }
      rank(is_miss, ranks);
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        if (!is_miss[j]) continue;
        const int32_t i = base + tile_index(j);
        work.entry[ranks[j]] = i;
        work.rank[i] = ranks[j];
      }
    }
    __syncthreads();  // The misses are numbered.
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
        is_hit[j] = at < capacity && work.is_hit(slot[j]);
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

  // Writes what both operations write, and victims and hits behind the survivors.
  __device__ void write(int32_t r, int32_t num_misses, const int32_t* host_pages) {
    const int32_t num_hits = shared.num_hits, survivors = capacity - num_hits - num_misses;
    int32_t* load_host = p.load_host_pages + r * p.load_host_stride;
    for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) {
      int32_t host_page = -1;
      if (i < num_misses) {
        const int32_t victim = work.victims[i], page = page_at(work.entry[i]);
        host_page = host_pages[page];
        slot_pages[victim] = page;
        page_slots[page] = victim;
        lru_order[survivors + i] = victim;
      }
      if (i < num_hits) lru_order[survivors + num_misses + i] = work.hits[i];
      load_host[i] = host_page;
    }
    if (threadIdx.x == 0) {
      p.num_hits[r] = num_hits;
      p.num_misses[r] = num_misses;
    }
  }

  // The slot that holds the page of entry i after the step, or -1.
  __device__ int32_t slot_at(int32_t i) const {
    const int32_t found = work.found[i];
    return found < -1 ? work.victims[work.rank[work.first[-2 - found]]] : found;
  }
};

// A row without results: padding, or, with num_misses = -1, one that cannot be served.
__device__ inline void write_no_loads(const LruDiffParams& p, int32_t r, int32_t num_misses) {
  for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) {
    p.load_host_pages[r * p.load_host_stride + i] = -1;
  }
  if (threadIdx.x == 0) {
    p.num_hits[r] = 0;
    p.num_misses[r] = num_misses;
  }
}

__device__ inline void write_nothing(const SlotOutputs& out, const LruDiffParams& p, int32_t r,
                                     int32_t) {
  for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) {
    out.curr_device_slots[r * out.current_stride + i] = -1;
    out.load_device_slots[r * out.load_slots_stride + i] = -1;
  }
}

__device__ inline void write_row(const SlotOutputs& out, const LruRow& row, int32_t r,
                                 int32_t num_misses) {
  for (int32_t i = threadIdx.x; i < row.p.width; i += num_threads()) {
    out.curr_device_slots[r * out.current_stride + i] = row.slot_at(i);
    out.load_device_slots[r * out.load_slots_stride + i] =
        i < num_misses ? row.work.victims[i] : -1;
  }
}

__device__ inline bool selects_every_page(const SlotOutputs&, int32_t) { return false; }

// Only the tail page: padding, or a row that cannot be served.
__device__ inline void write_nothing(const TableOutputs& out, const LruDiffParams& p, int32_t r,
                                     int32_t num_misses) {
  for (int32_t i = threadIdx.x; i <= p.width; i += num_threads()) {
    out.attended[r * out.attended_stride + i] = i == 0 ? out.tail_pages[r] : -1;
    if (i < p.width) out.loads[r * out.loads_stride + i] = -1;
  }
  if (threadIdx.x != 0) return;
  out.seq_lens[r] = out.tail_lens[r];
  if (num_misses < 0 && out.malformed != nullptr) atomicAdd(out.malformed, 1ull);
}

__device__ inline void write_row(const TableOutputs& out, const LruRow& row, int32_t r,
                                 int32_t num_misses) {
  const int32_t width = row.p.width, length = row.every_page ? row.limit : out.lengths[r];
  const int32_t* pages = out.device_pages + row.p.rows[r] * out.device_pages_stride;
  int32_t* attended = out.attended + r * out.attended_stride;
  bool malformed = row.shared.num_hits + num_misses != length;
  bool absent = length < 0 || length > width;
  for (int32_t i = threadIdx.x; i < width; i += num_threads()) {
    const int32_t slot = row.slot_at(i), page = slot < 0 ? -1 : pages[slot];
    malformed |= (slot >= 0) != (i < length);
    absent |= i < length && page < 0;
    if (i != length) attended[i] = page;
    out.loads[r * out.loads_stride + i] = i < num_misses ? pages[row.work.victims[i]] : -1;
  }
  if (threadIdx.x == 0 && length != width) attended[width] = -1;
  // Attention would read page -1, which is memory before the pool.
  const bool tail_alone = __syncthreads_or(absent);
  const bool counted = __syncthreads_or(malformed) && out.malformed != nullptr;
  if (tail_alone) {
    for (int32_t i = threadIdx.x; i <= width; i += num_threads()) {
      attended[i] = i == 0 ? out.tail_pages[r] : -1;
    }
  }
  if (threadIdx.x != 0) return;
  const int32_t full = tail_alone ? 0 : length;
  const bool with_tail = row.every_page || full < out.tail_below;
  attended[full] = out.tail_pages[r];
  out.seq_lens[r] = full * out.page_size + (with_tail ? out.tail_lens[r] : 0);
  if (counted) atomicAdd(out.malformed, 1ull);
}

__device__ inline bool selects_every_page(const TableOutputs& out, int32_t request) {
  return out.dense != nullptr && out.dense[request];
}

template <typename Outputs>
__device__ void refuse(const Outputs& out, const LruDiffParams& p, int32_t r, int32_t num_misses) {
  write_no_loads(p, r, num_misses);
  write_nothing(out, p, r, num_misses);
}

template <typename Outputs>
struct LruDiffLaunch {
  LruDiffParams diff;
  Outputs out;
};

template <bool kInShared, typename Outputs>
__global__ void __launch_bounds__(kMaxThreads, 1)
    lru_diff_kernel(const __grid_constant__ LruDiffLaunch<Outputs> launch) {
  wait_for_earlier_launches();
  const LruDiffParams& p = launch.diff;
  const Outputs& out = launch.out;
  const int32_t r = static_cast<int32_t>(blockIdx.x), request = r / p.rows_per_table;
  if (r >= *p.num_real_rows) return refuse(out, p, r, 0);
  const int64_t row = p.rows[r];
  const int32_t capacity = p.capacity[r];
  if (row < 0 || row >= p.num_states || capacity < 0 || capacity > p.slots) {
    return refuse(out, p, r, -1);
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
              p.page_slots + row * p.page_slots_stride,
              capacity,
              p.page_limits == nullptr ? p.num_pages : p.page_limits[request],
              p.every_page || selects_every_page(out, request)};
  const bool bad = step.find_resident();
  // More pages than entries: they cannot all be selected.
  if (!step.count_hits(bad || (step.every_page && step.limit > p.width))) {
    return refuse(out, p, r, -1);
  }
  const int32_t num_misses = step.number_misses();
  // More pages than slots: nothing has changed yet.
  if (num_misses > capacity - shared.num_hits) return refuse(out, p, r, -1);
  step.split_order(num_misses);
  step.write(r, num_misses, p.host_page_table + request * p.table_stride);
  write_row(out, step, r, num_misses);
}

}  // namespace hisparse
