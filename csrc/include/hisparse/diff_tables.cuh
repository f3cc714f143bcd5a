// diff_tables on the device: one block per row.
//
// Each row has an index from resident pages to their slots. A slot of the index holds the page only
// if `slot_pages` agrees, so nothing has to be erased when a page is evicted or a row is reset.
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
  const int32_t* page_limits;      // [T], pages that may be selected
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

// What attention reads, and what that follows from.
struct TableOutputs {
  const int32_t* device_pages;  // [NR, C]
  const int32_t* lengths;       // [R], pages of the selection; not read where all are selected
  const int32_t* tail_pages;    // [R]
  const int32_t* tail_lens;     // [R], tokens
  const bool* dense;            // [T], requests that select every page, or null
  int32_t* attended;            // [R, K + 1], the tail page after the selected ones
  int32_t* loads;               // [R, K]
  int32_t* seq_lens;            // [R], tokens to attend
  unsigned long long* counts;   // [3], sums of hits, misses and malformed rows; or null
  int64_t device_pages_stride, attended_stride, loads_stride;  // elements
  int32_t page_size, tail_below;  // a full tail page is attended beside fewer pages than tail_below
  bool waits;                     // or pages that are missing are left out of `attended`
};

// Lists of one row, in shared memory or, if the selection is too wide for it, in global memory.
struct LruWorkspace {
  int32_t* found;      // [K], an entry's slot; -1: no page; -2 - e: its page is missing, as entry e's
  int32_t* first;      // [K], by the entry that stands for a page: the first entry of that page
  int32_t* rank;       // [K], by first entry: rank of the miss
  int32_t* entry;      // [K], by rank of the miss: its first entry
  int32_t* victims;    // [K], slots from cold to hot
  int32_t* hits;       // [K], slots from cold to hot
  int32_t* host_pages;  // [K], of the missing pages, by entry
  uint32_t* hit_bits;  // [C / 32], by slot

  __host__ __device__ static int64_t bytes(int32_t width, int32_t slots) {
    const int64_t words = 7 * int64_t{width} + slots / kWarp + 1;
    return (words * 4 + 15) / 16 * 16;
  }

  __device__ LruWorkspace(char* memory, int32_t width) {
    found = reinterpret_cast<int32_t*>(memory);
    first = found + width;
    rank = first + width;
    entry = rank + width;
    victims = entry + width;
    hits = victims + width;
    host_pages = hits + width;
    hit_bits = reinterpret_cast<uint32_t*>(host_pages + width);
  }

  __device__ bool is_hit(int32_t slot) const {
    return hit_bits[slot / kWarp] >> (slot % kWarp) & 1u;
  }
};

// The part of a block's state that is always in shared memory.
struct LruShared {
  int32_t totals[BlockRank::kTotals];
  int32_t num_hits, malformed, unordered;  // The last: a page may be selected twice.
  int32_t resident;  // Entries that are attended. The workspace begins at a multiple of 16 bytes.
};

// Entries of the selection that each thread looks up at once: their pages, and what the index says.
struct LruEntries {
  int32_t pages[kItems], slots[kItems];
  bool unordered = false;  // Some page has no smaller one before it: it may stand there twice.

  __device__ static int32_t index(int32_t base, int j) {
    return base + j * num_threads() + static_cast<int32_t>(threadIdx.x);
  }

  __device__ LruEntries(const int32_t* selection, int32_t count, int32_t base) {
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      pages[j] = index(base, j) < count ? selection[index(base, j)] : -1;
    }
  }
};

// The most slots of a row whose tables are copied to shared memory.
constexpr int32_t kStagedSlots = 4096;

// One row. Every method but page_at and slot_at is called by all threads.
//
// Most time is spent in loads that depend on other loads. So each is issued as soon as its address
// is known: the selection and the row's numbers, then the index and the row's tables, then the host
// pages of the missing pages. Loops are not unrolled, which would take a division.
template <bool kInShared>
struct LruRow {
  const LruDiffParams& p;
  LruShared& shared;
  LruWorkspace work;
  BlockRank rank;
  const int32_t *selection, *host_pages;
  // [C] before the step, slot_pages, lru_order and device_pages; copies if the tables are staged.
  const int32_t *held, *order, *device_pages;
  int32_t *slot_pages, *lru_order, *page_slots;
  int32_t capacity, limit;
  bool every_page;

  // The page that entry i selects, or -1.
  __device__ int32_t page_at(int32_t i) const {
    if (every_page) return i < limit ? i : -1;
    return i < p.selected ? selection[i] : -1;
  }

  // Copies the tables to `memory`, [3, C]; the copies are there after find_resident()'s first barrier.
  __device__ void stage(int32_t* memory) {
#pragma unroll 1
    for (int32_t at = threadIdx.x; at < capacity; at += num_threads()) {
      copy_async<4>(memory + at, held + at);
      copy_async<4>(memory + p.slots + at, order + at);
      copy_async<4>(memory + 2 * p.slots + at, device_pages + at);
    }
    end_copies();
    held = memory;
    order = memory + p.slots;
    device_pages = memory + 2 * p.slots;
  }

  // Reads what the index says of the pages. True in a thread that saw one beyond the row's limit, or
  // beyond the host page table.
  __device__ bool ask(LruEntries& entries, int32_t base) {
    bool bad = false;
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      if (base + j * num_threads() >= p.width) break;
      int32_t& page = entries.pages[j];
      const int32_t i = LruEntries::index(base, j);
      if (every_page) page = i < min(limit, p.width) ? i : -1;
      if (page >= min(limit, p.num_pages)) {
        bad = true;
        page = -1;
      }
      if (page < 0) continue;
      entries.slots[j] = page_slots[page];
      const int32_t before = i == 0 ? -1 : page_at(i - 1);
      entries.unordered |= i > 0 && (before < 0 || before >= page);
    }
    return bad;
  }

  // Notes which pages are resident, and how many.
  __device__ void look_up(const LruEntries& entries, int32_t base) {
    int32_t hits = 0;
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      if (base + j * num_threads() >= p.width) break;
      const int32_t i = LruEntries::index(base, j), page = entries.pages[j];
      const int32_t slot = page < 0 ? -1 : entries.slots[j];
      const bool is_hit = slot >= 0 && slot < capacity && held[slot] == page;
      bool counts = false;  // Only once if the page is selected twice.
      if (is_hit) {
        const uint32_t bit = 1u << (slot % kWarp);
        counts = (atomicOr(&work.hit_bits[slot / kWarp], bit) & bit) == 0;
      } else if (page >= 0) {
        if constexpr (kInShared) {
          copy_async<4>(&work.host_pages[i], &host_pages[page]);
        } else {
          work.host_pages[i] = host_pages[page];
        }
      }
      hits += __popc(__ballot_sync(kAllLanes, counts));
      if (i >= p.width) continue;
      work.first[i] = i;
      work.found[i] = is_hit ? slot : page < 0 ? -1 : -2 - i;
    }
    if constexpr (kInShared) end_copies();
    if (lane_id() == 0 && hits != 0) atomicAdd(&shared.num_hits, hits);
    if (entries.unordered) atomicOr(&shared.unordered, 1);
  }

  // Looks up the selected pages in the index, the first of which are `entries`. False, in all
  // threads, if the row cannot be used.
  __device__ bool find_resident(LruEntries entries) {
    bool bad = ask(entries, 0);
    if constexpr (kInShared) wait_for_copies<0>();
    __syncthreads();  // The bits are clear, and the tables are there.
    look_up(entries, 0);
#pragma unroll 1
    for (int32_t base = tile_size(); base < p.width; base += tile_size()) {
      entries = LruEntries(selection, p.selected, base);
      bad |= ask(entries, base);
      look_up(entries, base);
    }
#pragma unroll 1
    for (int32_t at = threadIdx.x; at < capacity; at += num_threads()) {
      bad |= static_cast<uint32_t>(order[at]) >= static_cast<uint32_t>(capacity);
    }
    return !__syncthreads_or(bad);  // The hits are known.
  }

  // Lets one entry stand for all that select the same missing page: the index names it.
  __device__ void join_repeats() {
    for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) {
      // Any entry of the page may stay here.
      if (work.found[i] < -1) store_relaxed(&page_slots[page_at(i)], -2 - i);
    }
    __syncthreads();  // The index names an entry for every missing page.
    for (int32_t i = threadIdx.x; i < p.width; i += num_threads()) {
      if (work.found[i] >= -1) continue;
      work.found[i] = page_slots[page_at(i)];
      const int32_t named = -2 - work.found[i];
      if (named != i) atomicMin(&work.first[named], i);
    }
    __syncthreads();  // The first entries are known.
  }

  // Numbers the misses in order of first occurrence; returns how many there are.
  __device__ int32_t number_misses() {
#pragma unroll 1
    for (int32_t base = 0; base < p.width; base += num_threads()) {
      const int32_t i = base + static_cast<int32_t>(threadIdx.x);
      const int32_t found = i < p.width ? work.found[i] : -1;
      const bool is_miss[1] = {found < -1 && work.first[-2 - found] == i};
      int32_t ranks[1];
      rank(is_miss, ranks);
      if (!is_miss[0]) continue;
      work.entry[ranks[0]] = i;
      work.rank[i] = ranks[0];
    }
    return rank.count();
  }

  // Takes victims and hits out of the order and moves the survivors to its front.
  __device__ void split_order(int32_t num_misses) {
    rank.restart();
#pragma unroll 1
    for (int32_t base = 0; base < capacity; base += num_threads()) {
      const int32_t at = base + static_cast<int32_t>(threadIdx.x);
      const int32_t slot = at < capacity ? order[at] : -1;
      const bool is_hit[1] = {at < capacity && work.is_hit(slot)};
      int32_t hits_before[1];
      // Its barrier stands between the reads of a tile and the writes, which stay below its end.
      rank(is_hit, hits_before);
      if (at >= capacity) continue;
      const int32_t hit = hits_before[0], cold = at - hit;
      if (is_hit[0]) {
        if (hit < p.width) work.hits[hit] = slot;
      } else if (cold < num_misses) {
        work.victims[cold] = slot;
      } else {
        lru_order[cold - num_misses] = slot;
      }
    }
    if constexpr (kInShared) wait_for_copies<0>();
    __syncthreads();  // The lists are complete, and the host pages are there.
  }

  // The slot that holds the page of entry i after the step, or -1.
  __device__ int32_t slot_at(int32_t i) const {
    const int32_t found = work.found[i];
    return found < -1 ? work.victims[work.rank[work.first[-2 - found]]] : found;
  }

  // Writes the pages of the entries that were not missing, in their order, then -1; returns how many of
  // the first `length` entries these are.
  __device__ int32_t write_resident(int32_t* attended, int32_t length) {
    rank.restart();
#pragma unroll 1
    for (int32_t base = 0; base < p.width; base += num_threads()) {
      const int32_t i = base + static_cast<int32_t>(threadIdx.x);
      const int32_t slot = i < p.width ? work.found[i] : -2;
      const bool is_there[1] = {slot >= -1};
      int32_t place[1];
      rank(is_there, place);
      if (i == length && i < p.width) shared.resident = place[0];
      if (is_there[0]) attended[place[0]] = slot < 0 ? -1 : device_pages[slot];
    }
    const int32_t count = rank.count();
    if (threadIdx.x == 0 && (length < 0 || length >= p.width)) shared.resident = count;
#pragma unroll 1
    for (int32_t i = count + threadIdx.x; i <= p.width; i += num_threads()) attended[i] = -1;
    __syncthreads();  // The tail page is written after these.
    return shared.resident;
  }
};

// Writes what is loaded to where, victims and hits after the survivors, and what to attend.
template <bool kInShared>
__device__ void write_row(const TableOutputs& out, LruRow<kInShared>& row, int32_t r,
                          int32_t length, int32_t num_misses, int32_t tail_page, int32_t tail_len) {
  const LruDiffParams& p = row.p;
  const int32_t width = p.width, num_hits = row.shared.num_hits;
  const int32_t survivors = row.capacity - num_hits - num_misses;
  int32_t* attended = out.attended + r * out.attended_stride;
  int32_t* loads = out.loads + r * out.loads_stride;
  int32_t* load_host = p.load_host_pages + r * p.load_host_stride;
  bool malformed = num_hits + num_misses != length, absent = length < 0 || length > width;
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < width; i += num_threads()) {
    const int32_t slot = row.slot_at(i), attends = slot < 0 ? -1 : row.device_pages[slot];
    malformed |= (slot >= 0) != (i < length);
    absent |= i < length && attends < 0;
    if (out.waits && i != length) attended[i] = attends;
    if (i < num_hits) row.lru_order[survivors + num_misses + i] = row.work.hits[i];
    const int32_t victim = i < num_misses ? row.work.victims[i] : -1;
    const int32_t entry = victim < 0 ? -1 : row.work.entry[i];
    loads[i] = victim < 0 ? -1 : row.device_pages[victim];
    load_host[i] = victim < 0 ? -1 : row.work.host_pages[entry];
    if (victim < 0) continue;
    const int32_t page = row.page_at(entry);
    row.slot_pages[victim] = page;
    row.page_slots[page] = victim;
    row.lru_order[survivors + i] = victim;
  }
  if (malformed) atomicOr(&row.shared.malformed, 1);
  const int32_t resident = out.waits ? length : row.write_resident(attended, length);
  const bool tail_alone = __syncthreads_or(absent);  // Else attention would read page -1.
  if (tail_alone) {
#pragma unroll 1
    for (int32_t i = threadIdx.x; i <= width; i += num_threads()) attended[i] = -1;
    __syncthreads();  // The tail page is written after these.
  }
  if (threadIdx.x != 0) return;
  const int32_t full = tail_alone ? 0 : resident;
  const bool with_tail = row.every_page || tail_len < out.page_size ||
                         (tail_alone ? 0 : length) < out.tail_below;
  if (out.waits && length != width) attended[width] = -1;
  attended[full] = tail_page;
  out.seq_lens[r] = full * out.page_size + (with_tail ? tail_len : 0);
  p.num_hits[r] = num_hits;
  p.num_misses[r] = num_misses;
  if (out.counts == nullptr) return;
  atomicAdd(out.counts, static_cast<unsigned long long>(num_hits));
  atomicAdd(out.counts + 1, static_cast<unsigned long long>(num_misses));
  if (row.shared.malformed != 0) atomicAdd(out.counts + 2, 1ull);
}

// A row that attends only its tail page: padding, or, with num_misses = -1, one that cannot be served.
__device__ inline void refuse(const TableOutputs& out, const LruDiffParams& p, int32_t r,
                              int32_t num_misses) {
  for (int32_t i = threadIdx.x; i <= p.width; i += num_threads()) {
    out.attended[r * out.attended_stride + i] = i == 0 ? out.tail_pages[r] : -1;
    if (i == p.width) continue;
    out.loads[r * out.loads_stride + i] = p.load_host_pages[r * p.load_host_stride + i] = -1;
  }
  if (threadIdx.x != 0) return;
  p.num_hits[r] = 0;
  p.num_misses[r] = num_misses;
  out.seq_lens[r] = out.tail_lens[r];
  if (num_misses < 0 && out.counts != nullptr) atomicAdd(out.counts + 2, 1ull);
}

struct DiffTablesLaunch {
  LruDiffParams diff;
  TableOutputs out;
};

// blockIdx.y is the request, blockIdx.x its row. `kStaged`: tables are copied to shared memory.
template <bool kInShared, bool kStaged>
__global__ void __launch_bounds__(kMaxThreads, 1)
    diff_tables_kernel(const __grid_constant__ DiffTablesLaunch launch) {
  wait_for_earlier_launches();
  const LruDiffParams& p = launch.diff;
  const TableOutputs& out = launch.out;
  const int32_t request = static_cast<int32_t>(blockIdx.y);
  const int32_t r = request * static_cast<int32_t>(gridDim.x) + static_cast<int32_t>(blockIdx.x);
  const int32_t* selection = p.selection + r * p.selection_stride;
  const LruEntries entries(selection, p.selected, 0);
  const int64_t row = p.rows[r];
  const int32_t real_rows = *p.num_real_rows, capacity = p.capacity[r];
  const int32_t limit = p.page_limits[request];
  const bool every_page = p.every_page || (out.dense != nullptr && out.dense[request]);
  const int32_t length = p.every_page ? limit : out.lengths[r];
  const int32_t tail_page = out.tail_pages[r], tail_len = out.tail_lens[r];
  if (r >= real_rows) return refuse(out, p, r, 0);
  if (row < 0 || row >= p.num_states || capacity < 0 || capacity > p.slots) {
    return refuse(out, p, r, -1);
  }
  LruShared& shared = *reinterpret_cast<LruShared*>(dynamic_shared());
  const int64_t bytes = LruWorkspace::bytes(p.width, p.slots);
  char* memory = kInShared ? dynamic_shared() + sizeof(LruShared) : p.scratch + r * bytes;
  int32_t* slot_pages = p.slot_pages + row * p.slot_pages_stride;
  int32_t* lru_order = p.lru_order + row * p.lru_order_stride;
  LruRow<kInShared> step{
      p, shared, LruWorkspace(memory, p.width), BlockRank(shared.totals), selection,
      p.host_page_table + request * p.table_stride, slot_pages, lru_order,
      out.device_pages + row * out.device_pages_stride, slot_pages, lru_order,
      p.page_slots + row * p.page_slots_stride, capacity, limit, every_page};
  if constexpr (kStaged) step.stage(reinterpret_cast<int32_t*>(memory + bytes));
#pragma unroll 1
  for (int32_t i = threadIdx.x; i <= p.slots / kWarp; i += num_threads()) step.work.hit_bits[i] = 0;
  if (threadIdx.x == 0) shared.num_hits = shared.unordered = shared.malformed = 0;
  // More pages than entries: they cannot all be selected.
  const bool served = step.find_resident(entries) && !(every_page && limit > p.width);
  if (served && shared.unordered != 0) step.join_repeats();
  const int32_t num_misses = served ? step.number_misses() : 0;
  // More pages than slots: nothing has changed yet.
  if (!served || num_misses > capacity - shared.num_hits) {
    if constexpr (kInShared) wait_for_copies<0>();
    return refuse(out, p, r, -1);
  }
  step.split_order(num_misses);
  write_row(out, step, r, every_page ? limit : length, num_misses, tail_page, tail_len);
}

}  // namespace hisparse
