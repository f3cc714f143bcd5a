// lru_diff: checks and launch.
#include "hisparse/lru_diff.cuh"

#include "launch.h"

namespace hisparse {
namespace {

int64_t shared_bytes(int32_t width, int32_t slots) {
  return static_cast<int64_t>(sizeof(LruShared)) + LruWorkspace::bytes(width, slots);
}

}  // namespace

// Bytes of scratch that a row needs: 0 if the shared memory of the tensor's device is enough.
int64_t lru_diff_scratch_bytes(TensorView selection, TensorView slot_pages) {
  const int32_t width = size32(selection, 1), slots = size32(slot_pages, 1);
  const int64_t limit = OnDevice(selection).attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return shared_bytes(width, slots) <= limit ? 0 : LruWorkspace::bytes(width, slots);
}

// `scratch` is [R, bytes] of uint8; with 0 bytes the kernel uses shared memory.
void lru_diff(TensorView selection, TensorView host_page_table, TensorView capacity,
              TensorView num_real_rows, TensorView slot_pages, TensorView lru_order,
              TensorView rows, TensorView curr_device_slots, TensorView load_host_pages,
              TensorView load_device_slots, TensorView num_hits, TensorView num_misses,
              TensorView page_limits, TensorView scratch) {
  const int64_t num_rows = selection.size(0);
  if (num_rows == 0) return;
  const bool in_shared = scratch.size(1) == 0;
  LruDiffParams p;
  p.selection = data_of<const int32_t>(selection, "selection");
  p.host_page_table = data_of<const int32_t>(host_page_table, "host_page_table");
  p.page_limits =
      page_limits.size(0) == 0 ? nullptr : data_of<const int32_t>(page_limits, "num_pages");
  p.capacity = data_of<const int32_t>(capacity, "capacity");
  p.num_real_rows = data_of<const int32_t>(num_real_rows, "num_real_rows");
  p.rows = data_of<const int64_t>(rows, "rows");
  p.slot_pages = data_of<int32_t>(slot_pages, "slot_pages");
  p.lru_order = data_of<int32_t>(lru_order, "lru_order");
  p.curr_device_slots = data_of<int32_t>(curr_device_slots, "curr_device_slots");
  p.load_host_pages = data_of<int32_t>(load_host_pages, "load_host_pages");
  p.load_device_slots = data_of<int32_t>(load_device_slots, "load_device_slots");
  p.num_hits = data_of<int32_t>(num_hits, "num_hits");
  p.num_misses = data_of<int32_t>(num_misses, "num_misses");
  p.scratch = in_shared ? nullptr : data_of<char>(scratch, "scratch");
  p.selection_stride = selection.stride(0);
  p.table_stride = host_page_table.stride(0);
  p.slot_pages_stride = slot_pages.stride(0);
  p.lru_order_stride = lru_order.stride(0);
  p.current_stride = curr_device_slots.stride(0);
  p.load_host_stride = load_host_pages.stride(0);
  p.load_slots_stride = load_device_slots.stride(0);
  p.width = size32(selection, 1);
  p.slots = size32(slot_pages, 1);
  p.num_pages = size32(host_page_table, 1);
  p.num_states = size32(slot_pages, 0);
  p.rows_per_table = static_cast<int32_t>(num_rows / host_page_table.size(0));
  if (!in_shared && scratch.size(1) < LruWorkspace::bytes(p.width, p.slots)) {
    TVM_FFI_THROW(ValueError) << "scratch: got " << scratch.size(1) << " bytes a row, expected "
                              << LruWorkspace::bytes(p.width, p.slots);
  }
  const OnDevice on(selection);
  const dim3 grid(static_cast<unsigned>(num_rows));
  const int threads = block_threads(std::max(p.width, p.slots), kItems);
  if (in_shared) {
    on.launch("lru_diff", lru_diff_kernel<true>, grid, threads, shared_bytes(p.width, p.slots), p);
  } else {
    on.launch("lru_diff", lru_diff_kernel<false>, grid, threads, sizeof(LruShared), p);
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(lru_diff_scratch_bytes, lru_diff_scratch_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lru_diff, lru_diff);

}  // namespace hisparse
