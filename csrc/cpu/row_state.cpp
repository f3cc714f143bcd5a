// Changes to rows outside diff_tables: full tail pages, and capacity.
#include "pool.h"

#include <algorithm>
#include <vector>

namespace hisparse {
namespace {

void require_index(int64_t got, int64_t size, const char* name) {
  if (got < 0 || got >= size) {
    TVM_FFI_THROW(ValueError) << name << ": got " << got << ", expected 0 to " << size - 1;
  }
}

// Copies tail pages of a pool [N, Hr, S, D] to [T, Hkv, S, D]: a page of all heads, or one of each.
struct TailCopy {
  Pool src, dst;
  BlockCopy copy;

  TailCopy(const TensorView& pages, const TensorView& copies)
      : src(pages), dst(one_after_the_other(copies, src.heads)), copy(page_copy(src, dst)) {}

  // The copies as pages of `heads` heads.
  static Pool one_after_the_other(const TensorView& copies, int64_t heads) {
    Pool pool(copies);
    pool.heads = heads;
    pool.page_stride = heads * pool.head_stride;
    return pool;
  }

  void operator()(int64_t page, int64_t place) const {
    require_index(page, src.pages, "tail_pages");
    const char* from = src.data + page * src.page_stride;
    const Move move{dst.data + place * dst.page_stride, from, from};
    copy(&move, 1);
  }
};

struct PromoteTailParams {
  const int64_t* rows;        // [R]
  const int32_t* page_index;  // [T]
  const bool* filled;         // [R]
  const int32_t* capacity;    // [R]
  Rows<int32_t> slot_pages;   // [NR, C]
  Rows<int32_t> lru_order;    // [NR, C]
  Rows<int32_t> device_pages; // [NR, C]
  int32_t* tail_pages;        // [NR]
  int64_t num_rows, num_states, slots, heads;  // heads: R / T
  std::vector<TailCopy> pools;
  int64_t copies;  // rows with the same bytes, those of one KV head
};

void run(const PromoteTailParams& p) {
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const int64_t row = p.rows[r];
    require_index(row, p.num_states, "rows");
    for (const TailCopy& copy : p.pools) {
      if (r % p.copies == 0) copy(p.tail_pages[row], r / p.copies);
    }
    const int32_t capacity = p.capacity[r];
    require_index(capacity, p.slots + 1, "capacity");
    if (!p.filled[r] || capacity == 0) continue;
    int32_t* order = p.lru_order[row];
    const int32_t coldest = order[0];
    require_index(coldest, p.slots, "lru_order");
    std::rotate(order, order + 1, order + capacity);
    std::swap(p.device_pages[row][coldest], p.tail_pages[row]);
    p.slot_pages[row][coldest] = p.page_index[r / p.heads];
  }
}

struct RebalanceParams {
  const int64_t* rows;          // [M]
  const int32_t* new_capacity;  // [M]
  const int32_t* capacity;      // [NR]
  Rows<int32_t> slot_pages;     // [NR, C], of one layer
  Rows<int32_t> lru_order;      // [NR, C]
  Rows<int32_t> device_pages;   // [NR, C]
  int32_t* free_pages;          // [N]
  int64_t num_changes, slots, free_size;
};

// Renumbers a row's slots 0..n-1 from cold to hot; `held` and `pages` are in that order.
void renumber(const RebalanceParams& p, int64_t row, const int32_t* held, const int32_t* pages,
              int64_t count) {
  for (int64_t slot = 0; slot < p.slots; ++slot) {
    const bool owned = slot < count;
    p.slot_pages[row][slot] = owned ? held[slot] : -1;
    p.device_pages[row][slot] = owned ? pages[slot] : -1;
    p.lru_order[row][slot] = owned ? static_cast<int32_t>(slot) : -1;
  }
}

// Changes one layer. `free` is the height of the free stack before; returns the height after. Sets
// changed[i] for each row that changed. A row that would overrun the stack ends its pass: that row
// and those after it stay as they are.
int64_t run(const RebalanceParams& p, int64_t free, std::vector<bool>& changed) {
  std::vector<int32_t> held(p.slots), pages(p.slots);
  for (const bool shrink : {true, false}) {
    for (int64_t i = 0; i < p.num_changes; ++i) {
      const int64_t row = p.rows[i], old = p.capacity[row], count = p.new_capacity[i];
      if (count == old || (count < old) != shrink || count < 0 || count > p.slots) continue;
      if (free + old - count < 0 || free + old - count > p.free_size) break;
      changed[i] = true;
      // Gained slots are the coldest.
      const int64_t gained = std::max<int64_t>(count - old, 0);
      const int64_t dropped = std::max<int64_t>(old - count, 0);
      for (int64_t slot = 0; slot < gained; ++slot) {
        held[slot] = -1;
        pages[slot] = p.free_pages[--free];
      }
      for (int64_t rank = 0; rank < old; ++rank) {
        const int32_t slot = p.lru_order[row][rank];
        require_index(slot, p.slots, "lru_order");
        if (rank < dropped) {
          p.free_pages[free++] = p.device_pages[row][slot];
        } else {
          held[gained + rank - dropped] = p.slot_pages[row][slot];
          pages[gained + rank - dropped] = p.device_pages[row][slot];
        }
      }
      renumber(p, row, held.data(), pages.data(), count);
    }
  }
  return free;
}

Rows<int32_t> layer_of(const TensorView& tables, int64_t layer, const char* name) {
  require_unit_stride(tables, name);
  return {static_cast<int32_t*>(tables.data_ptr()) + layer * tables.stride(0), tables.stride(1)};
}

// Copies the tail pages of all rows, full or not.
void promote_tail(Arguments& in) {
  PromoteTailParams p;
  const TensorView rows = in.tensor(), page_index = in.tensor();
  p.rows = data_of<const int64_t>(rows, "rows");
  p.page_index = data_of<const int32_t>(page_index, "page_index");
  p.filled = in.data<const bool>("filled");
  p.capacity = in.data<const int32_t>("capacity");
  const TensorView slot_pages = in.tensor();
  p.slot_pages = rows_of<int32_t>(slot_pages, "slot_pages");
  p.lru_order = rows_of<int32_t>(in.tensor(), "lru_order");
  p.device_pages = rows_of<int32_t>(in.tensor(), "device_pages");
  in.skip(1);  // page_slots
  p.tail_pages = in.data<int32_t>("tail_pages");
  p.num_rows = rows.size(0);
  p.num_states = slot_pages.size(0);
  p.slots = slot_pages.size(1);
  p.heads = rows.size(0) / std::max<int64_t>(page_index.size(0), 1);
  p.copies = 1;
  const std::optional<TensorView> pools[2] = {in.optional(), in.optional()};
  const std::optional<TensorView> copies[2] = {in.optional(), in.optional()};
  for (int i = 0; i < 2; ++i) {
    if (!pools[i]) continue;
    p.pools.emplace_back(*pools[i], *copies[i]);
    p.copies = std::max<int64_t>(p.heads / copies[i]->size(1), 1);
  }
  run(p);
}

void rebalance(Arguments& in) {
  RebalanceParams p;
  const TensorView rows = in.tensor();
  p.rows = data_of<const int64_t>(rows, "rows");
  p.new_capacity = in.data<const int32_t>("new_capacity");
  int32_t* capacities = in.data<int32_t>("capacity");
  p.capacity = capacities;
  const TensorView slot_pages = in.tensor(), lru_order = in.tensor(), device_pages = in.tensor();
  in.skip(1);  // page_slots
  const TensorView free_pages = in.tensor();
  const Rows<int32_t> free = rows_of<int32_t>(free_pages, "free_pages");
  int32_t* counts = in.data<int32_t>("num_free");
  p.num_changes = rows.size(0);
  p.slots = slot_pages.size(2);
  p.free_size = free_pages.size(1);
  for (int64_t i = 0; i < p.num_changes; ++i) {
    require_index(p.rows[i], slot_pages.size(1), "rows");
    require_index(capacities[p.rows[i]], p.slots + 1, "capacity");
  }
  if (slot_pages.size(0) == 0) return;
  const int64_t before = counts[0];
  require_index(before, p.free_size + 1, "num_free");
  std::vector<bool> changed(p.num_changes);
  for (int64_t layer = 0; layer < slot_pages.size(0); ++layer) {
    p.slot_pages = layer_of(slot_pages, layer, "slot_pages");
    p.lru_order = layer_of(lru_order, layer, "lru_order");
    p.device_pages = layer_of(device_pages, layer, "device_pages");
    p.free_pages = free[layer];
    counts[layer] = static_cast<int32_t>(run(p, before, changed));
  }
  for (int64_t i = 0; i < p.num_changes; ++i) {
    if (changed[i]) capacities[p.rows[i]] = p.new_capacity[i];
  }
}

HISPARSE_EXPORT_KERNEL(promote_tail)
HISPARSE_EXPORT_KERNEL(rebalance)

}  // namespace
}  // namespace hisparse
