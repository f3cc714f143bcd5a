// promote_tail, reset_rows, rebalance: checks and launches.
#include "hisparse/row_state.cuh"

#include "launch.h"

namespace hisparse {
namespace {

// Tables [L, NR, C], or [NR, C] of one layer.
RowTables tables_of(const TensorView& slot_pages, const TensorView& lru_order,
                    const TensorView& device_pages) {
  const int dims = slot_pages.ndim();
  const auto layer = [&](const TensorView& t) { return dims == 3 ? t.stride(0) : 0; };
  return {data_of<int32_t>(slot_pages, "slot_pages"),
          data_of<int32_t>(lru_order, "lru_order"),
          data_of<int32_t>(device_pages, "device_pages"),
          layer(slot_pages),
          layer(lru_order),
          layer(device_pages),
          slot_pages.stride(dims - 2),
          lru_order.stride(dims - 2),
          device_pages.stride(dims - 2),
          size32(slot_pages, dims - 2),
          size32(slot_pages, dims - 1)};
}

}  // namespace

void promote_tail(TensorView rows, TensorView page_index, TensorView filled, TensorView capacity,
                  TensorView slot_pages, TensorView lru_order, TensorView device_pages,
                  TensorView tail_pages) {
  if (rows.size(0) == 0) return;
  const PromoteTailParams p{data_of<const int64_t>(rows, "rows"),
                            data_of<const int32_t>(page_index, "page_index"),
                            data_of<const bool>(filled, "filled"),
                            data_of<const int32_t>(capacity, "capacity"),
                            data_of<int32_t>(tail_pages, "tail_pages"),
                            tables_of(slot_pages, lru_order, device_pages)};
  OnDevice(rows).launch("promote_tail", promote_tail_kernel, dim3(size32(rows, 0)),
                        block_threads(p.tables.slots, 1), 0, p);
}

void reset_rows(TensorView rows, TensorView capacity, TensorView slot_pages, TensorView lru_order,
                TensorView device_pages) {
  const ResetRowsParams p{data_of<const int64_t>(rows, "rows"),
                          data_of<const int32_t>(capacity, "capacity"),
                          tables_of(slot_pages, lru_order, device_pages)};
  const dim3 grid(size32(rows, 0), size32(slot_pages, 0));
  if (grid.x == 0 || grid.y == 0) return;
  OnDevice(rows).launch("reset_rows", reset_rows_kernel, grid, block_threads(p.tables.slots, 1), 0,
                        p);
}

void rebalance(TensorView rows, TensorView new_capacity, TensorView capacity,
               TensorView slot_pages, TensorView lru_order, TensorView device_pages,
               TensorView free_pages, TensorView num_free, TensorView scratch,
               TensorView changed) {
  const RebalanceParams p{data_of<const int64_t>(rows, "rows"),
                          data_of<const int32_t>(new_capacity, "new_capacity"),
                          data_of<int32_t>(capacity, "capacity"),
                          data_of<int32_t>(free_pages, "free_pages"),
                          data_of<int32_t>(num_free, "num_free"),
                          data_of<int32_t>(scratch, "scratch"),
                          data_of<int32_t>(changed, "changed"),
                          free_pages.stride(0),
                          tables_of(slot_pages, lru_order, device_pages),
                          size32(rows, 0),
                          size32(free_pages, 1)};
  const int64_t layers = slot_pages.size(0);
  if (layers == 0 || p.num_changes == 0) return;
  if (scratch.numel() < layers * 2 * p.tables.slots) {
    TVM_FFI_THROW(ValueError) << "scratch: got " << scratch.numel() << " elements, expected "
                              << layers * 2 * p.tables.slots;
  }
  const OnDevice on(rows);
  on.launch("rebalance", rebalance_kernel, dim3(static_cast<unsigned>(layers)),
            block_threads(p.tables.slots, 1), 0, p);
  on.launch("set_capacity", set_capacity_kernel, dim3(1), block_threads(p.num_changes, 1), 0, p);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(promote_tail, promote_tail);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(reset_rows, reset_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rebalance, rebalance);

}  // namespace hisparse
