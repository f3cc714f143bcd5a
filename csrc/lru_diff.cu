// lru_diff, diff_tables: checks and launches.
#include "hisparse/lru_diff.cuh"

#include "launch.h"

namespace hisparse {
namespace {

int64_t shared_bytes(int32_t width, int32_t slots) {
  return static_cast<int64_t>(sizeof(LruShared)) + LruWorkspace::bytes(width, slots);
}

// What both operations take. `width` is the number of entries, K.
LruDiffParams params_of(const TensorView& selection, const TensorView& host_page_table,
                        const TensorView& page_limits, const TensorView& capacity,
                        const TensorView& num_real_rows, const TensorView& rows,
                        const TensorView& slot_pages, const TensorView& lru_order,
                        const TensorView& page_slots, const TensorView& load_host_pages,
                        const TensorView& num_hits, const TensorView& num_misses,
                        const TensorView& scratch) {
  LruDiffParams p{};
  p.selection = data_of<const int32_t>(selection, "selection");
  p.host_page_table = data_of<const int32_t>(host_page_table, "host_page_table");
  p.page_limits =
      page_limits.size(0) == 0 ? nullptr : data_of<const int32_t>(page_limits, "num_pages");
  p.capacity = data_of<const int32_t>(capacity, "capacity");
  p.num_real_rows = data_of<const int32_t>(num_real_rows, "num_real_rows");
  p.rows = data_of<const int64_t>(rows, "rows");
  p.slot_pages = data_of<int32_t>(slot_pages, "slot_pages");
  p.lru_order = data_of<int32_t>(lru_order, "lru_order");
  p.page_slots = data_of<int32_t>(page_slots, "page_slots");
  p.load_host_pages = data_of<int32_t>(load_host_pages, "load_host_pages");
  p.num_hits = data_of<int32_t>(num_hits, "num_hits");
  p.num_misses = data_of<int32_t>(num_misses, "num_misses");
  p.scratch = scratch.size(1) == 0 ? nullptr : data_of<char>(scratch, "scratch");
  p.selection_stride = selection.stride(0);
  p.table_stride = host_page_table.stride(0);
  p.slot_pages_stride = slot_pages.stride(0);
  p.lru_order_stride = lru_order.stride(0);
  p.page_slots_stride = page_slots.stride(0);
  p.load_host_stride = load_host_pages.stride(0);
  p.width = size32(load_host_pages, 1);
  p.selected = size32(selection, 1);
  p.slots = size32(slot_pages, 1);
  p.num_pages = size32(host_page_table, 1);
  p.num_states = size32(slot_pages, 0);
  p.rows_per_table = static_cast<int32_t>(rows.size(0) / host_page_table.size(0));
  if (p.num_pages > page_slots.size(1)) {
    TVM_FFI_THROW(ValueError) << "page_slots: got " << page_slots.size(1)
                              << " pages a row, expected those of the host page table, "
                              << p.num_pages;
  }
  if (p.scratch != nullptr && scratch.size(1) < LruWorkspace::bytes(p.width, p.slots)) {
    TVM_FFI_THROW(ValueError) << "scratch: got " << scratch.size(1) << " bytes a row, expected "
                              << LruWorkspace::bytes(p.width, p.slots);
  }
  return p;
}

template <typename Outputs>
void launch(const char* name, const TensorView& rows, const LruDiffParams& p, const Outputs& out) {
  const OnDevice on(rows);
  const dim3 grid(static_cast<unsigned>(rows.size(0)));
  const int threads = block_threads(std::max(p.width, p.slots), kItems);
  const LruDiffLaunch<Outputs> params{p, out};
  if (p.scratch == nullptr) {
    on.launch(name, lru_diff_kernel<true, Outputs>, grid, threads, shared_bytes(p.width, p.slots),
              params);
  } else {
    on.launch(name, lru_diff_kernel<false, Outputs>, grid, threads, sizeof(LruShared), params);
  }
}

}  // namespace

// Bytes of scratch that a row needs: 0 if the shared memory of the tables' device is enough.
int64_t lru_diff_scratch_bytes(TensorView slot_pages, int64_t width) {
  const int32_t entries = static_cast<int32_t>(width), slots = size32(slot_pages, 1);
  const int64_t limit = OnDevice(slot_pages).attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return shared_bytes(entries, slots) <= limit ? 0 : LruWorkspace::bytes(entries, slots);
}

// `scratch` is [R, bytes] of uint8; with 0 bytes the kernel uses shared memory.
void lru_diff(TensorView selection, TensorView host_page_table, TensorView page_limits,
              TensorView capacity, TensorView num_real_rows, TensorView rows,
              TensorView slot_pages, TensorView lru_order, TensorView page_slots,
              TensorView curr_device_slots, TensorView load_host_pages,
              TensorView load_device_slots, TensorView num_hits, TensorView num_misses,
              TensorView scratch) {
  if (rows.size(0) == 0) return;
  const LruDiffParams p =
      params_of(selection, host_page_table, page_limits, capacity, num_real_rows, rows, slot_pages,
                lru_order, page_slots, load_host_pages, num_hits, num_misses, scratch);
  const SlotOutputs out{data_of<int32_t>(curr_device_slots, "curr_device_slots"),
                        data_of<int32_t>(load_device_slots, "load_device_slots"),
                        curr_device_slots.stride(0), load_device_slots.stride(0)};
  launch("lru_diff", rows, p, out);
}

// An empty `dense` or `malformed` stands for none. `every_page` selects all pages of all rows.
void diff_tables(TensorView selection, TensorView lengths, TensorView host_page_table,
                 TensorView page_limits, TensorView capacity, TensorView num_real_rows,
                 TensorView rows, TensorView tail_pages, TensorView tail_lens, TensorView dense,
                 TensorView malformed, TensorView slot_pages, TensorView lru_order,
                 TensorView device_pages, TensorView page_slots, TensorView attended,
                 TensorView loads, TensorView seq_lens, TensorView load_host_pages,
                 TensorView num_hits, TensorView num_misses, TensorView scratch, int64_t page_size,
                 int64_t tail_below, bool every_page) {
  if (rows.size(0) == 0) return;
  LruDiffParams p =
      params_of(selection, host_page_table, page_limits, capacity, num_real_rows, rows, slot_pages,
                lru_order, page_slots, load_host_pages, num_hits, num_misses, scratch);
  p.every_page = every_page;
  const TableOutputs out{
      data_of<const int32_t>(device_pages, "device_pages"),
      data_of<const int32_t>(lengths, "lengths"),
      data_of<const int32_t>(tail_pages, "tail_pages"),
      data_of<const int32_t>(tail_lens, "tail_lens"),
      dense.size(0) == 0 ? nullptr : data_of<const bool>(dense, "dense"),
      data_of<int32_t>(attended, "attended"),
      data_of<int32_t>(loads, "loads"),
      data_of<int32_t>(seq_lens, "seq_lens"),
      malformed.size(0) == 0 ? nullptr : data_of<unsigned long long>(malformed, "malformed"),
      device_pages.stride(0),
      attended.stride(0),
      loads.stride(0),
      static_cast<int32_t>(page_size),
      static_cast<int32_t>(tail_below)};
  launch("diff_tables", rows, p, out);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(lru_diff_scratch_bytes, lru_diff_scratch_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lru_diff, lru_diff);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(diff_tables, diff_tables);

}  // namespace hisparse
