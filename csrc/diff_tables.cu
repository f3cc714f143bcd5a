// diff_tables: checks and launches.
#include "hisparse/diff_tables.cuh"

#include "launch.h"

namespace hisparse {
namespace {

// With the row's tables, if they are staged.
int64_t shared_bytes(int32_t width, int32_t slots) {
  const int64_t staged = slots <= kStagedSlots ? 3 * sizeof(int32_t) * slots : 0;
  return static_cast<int64_t>(sizeof(LruShared)) + LruWorkspace::bytes(width, slots) + staged;
}

void set_selection(LruDiffParams& p, const TensorView& selection) {
  p.selection = data_of<const int32_t>(selection, "selection");
  p.selection_stride = selection.stride(0);
  p.selected = size32(selection, 1);
}

void set_host_pages(LruDiffParams& p, const TensorView& table) {
  p.host_page_table = data_of<const int32_t>(table, "host_page_table");
  p.table_stride = table.stride(0);
  p.num_pages = size32(table, 1);
}

void set_tables(LruDiffParams& p, const TensorView& slot_pages, const TensorView& lru_order,
                const TensorView& page_slots) {
  p.slot_pages = data_of<int32_t>(slot_pages, "slot_pages");
  p.lru_order = data_of<int32_t>(lru_order, "lru_order");
  p.page_slots = data_of<int32_t>(page_slots, "page_slots");
  p.slot_pages_stride = slot_pages.stride(0);
  p.lru_order_stride = lru_order.stride(0);
  p.page_slots_stride = page_slots.stride(0);
  p.num_states = size32(slot_pages, 0);
  p.slots = size32(slot_pages, 1);
  if (p.num_pages > page_slots.size(1)) {
    TVM_FFI_THROW(ValueError) << "page_slots: got " << page_slots.size(1)
                              << " pages a row, expected those of the host page table, "
                              << p.num_pages;
  }
}

void set_loads(LruDiffParams& p, const TensorView& load_host_pages) {
  p.load_host_pages = data_of<int32_t>(load_host_pages, "load_host_pages");
  p.load_host_stride = load_host_pages.stride(0);
  p.width = size32(load_host_pages, 1);
}

// `scratch` is [R, bytes] of uint8; with 0 bytes the kernel uses shared memory.
void set_scratch(LruDiffParams& p, const TensorView& scratch) {
  p.scratch = scratch.size(1) == 0 ? nullptr : data_of<char>(scratch, "scratch");
  if (p.scratch != nullptr && scratch.size(1) < LruWorkspace::bytes(p.width, p.slots)) {
    TVM_FFI_THROW(ValueError) << "scratch: got " << scratch.size(1) << " bytes a row, expected "
                              << LruWorkspace::bytes(p.width, p.slots);
  }
}

void launch(const TensorView& rows, unsigned requests, const LruDiffParams& p,
            const TableOutputs& out) {
  const OnDevice on(rows);
  const dim3 grid(static_cast<unsigned>(rows.size(0)) / requests, requests);
  const int threads = block_threads(std::max(p.width, p.slots), 1);
  const DiffTablesLaunch params{p, out};
  void (*kernel)(DiffTablesLaunch) = p.scratch != nullptr    ? diff_tables_kernel<false, false>
                                     : p.slots > kStagedSlots ? diff_tables_kernel<true, false>
                                                              : diff_tables_kernel<true, true>;
  const int64_t shared =
      p.scratch != nullptr ? sizeof(LruShared) : shared_bytes(p.width, p.slots);
  on.launch("diff_tables", kernel, grid, threads, shared, params);
}

}  // namespace

// Bytes of scratch that a row needs: 0 if the shared memory of the tables' device is enough.
int64_t diff_tables_scratch_bytes(Arguments& in) {
  const TensorView slot_pages = in.tensor();
  const int32_t entries = in.number<int32_t>(), slots = size32(slot_pages, 1);
  const int64_t limit = OnDevice(slot_pages).attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return shared_bytes(entries, slots) <= limit ? 0 : LruWorkspace::bytes(entries, slots);
}

// Without a selection every page of every row is selected.
void diff_tables(Arguments& in) {
  LruDiffParams p{};
  TableOutputs out{};
  const std::optional<TensorView> selection = in.optional();
  if (selection) set_selection(p, *selection);
  p.every_page = !selection;
  out.lengths = in.data_or_null<const int32_t>("lengths");
  const TensorView rows = in.tensor();
  p.rows = data_of<const int64_t>(rows, "rows");
  p.capacity = in.data<const int32_t>("capacity");
  p.num_real_rows = in.data<const int32_t>("num_real_rows");
  const TensorView host_page_table = in.tensor();
  set_host_pages(p, host_page_table);
  p.page_limits = in.data<const int32_t>("num_pages");
  out.tail_pages = in.data<const int32_t>("tail_pages");
  out.tail_lens = in.data<const int32_t>("tail_lens");
  out.dense = in.data_or_null<const bool>("dense");
  out.counts = in.data_or_null<unsigned long long>("counts");
  const TensorView slot_pages = in.tensor(), lru_order = in.tensor(), device_pages = in.tensor();
  set_tables(p, slot_pages, lru_order, in.tensor());
  out.device_pages = data_of<const int32_t>(device_pages, "device_pages");
  out.device_pages_stride = device_pages.stride(0);
  const TensorView attended = in.tensor();
  out.attended = data_of<int32_t>(attended, "attended");
  out.attended_stride = attended.stride(0);
  out.seq_lens = in.data<int32_t>("seq_lens");
  const TensorView loads = in.tensor();
  out.loads = data_of<int32_t>(loads, "loads");
  out.loads_stride = loads.stride(0);
  set_loads(p, in.tensor());
  p.num_hits = in.data<int32_t>("num_hits");
  p.num_misses = in.data<int32_t>("num_misses");
  set_scratch(p, in.tensor());
  out.page_size = in.number<int32_t>();
  out.tail_below = in.number<int32_t>();
  out.waits = in.number<bool>();
  if (rows.size(0) == 0) return;
  launch(rows, static_cast<unsigned>(host_page_table.size(0)), p, out);
}

HISPARSE_EXPORT_KERNEL(diff_tables_scratch_bytes)
HISPARSE_EXPORT_KERNEL(diff_tables)

}  // namespace hisparse
