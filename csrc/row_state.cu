// promote_tail, reset_rows, rebalance: checks and launches.
#include "hisparse/row_state.cuh"

#include "pools.h"

namespace hisparse {
namespace {

// Tables [L, NR, C], or [NR, C] of one layer.
RowTables tables_of(const TensorView& slot_pages, const TensorView& lru_order,
                    const TensorView& device_pages, const TensorView& page_slots) {
  const int dims = slot_pages.ndim();
  const auto layer = [&](const TensorView& t) { return dims == 3 ? t.stride(0) : 0; };
  return {data_of<int32_t>(slot_pages, "slot_pages"),
          data_of<int32_t>(lru_order, "lru_order"),
          data_of<int32_t>(device_pages, "device_pages"),
          data_of<int32_t>(page_slots, "page_slots"),
          layer(slot_pages),
          layer(lru_order),
          layer(device_pages),
          layer(page_slots),
          slot_pages.stride(dims - 2),
          lru_order.stride(dims - 2),
          device_pages.stride(dims - 2),
          page_slots.stride(dims - 2),
          size32(slot_pages, dims - 2),
          size32(slot_pages, dims - 1),
          size32(page_slots, dims - 1)};
}

}  // namespace

// Copies full pages of `num_pools` pools, 0 to 2, to [T, Hkv, S, D].
void promote_tail(TensorView rows, TensorView page_index, TensorView filled, TensorView capacity,
                  TensorView slot_pages, TensorView lru_order, TensorView device_pages,
                  TensorView page_slots, TensorView tail_pages, TensorView pages_k,
                  TensorView pages_v, TensorView copy_k, TensorView copy_v, int64_t num_pools) {
  const int64_t num_rows = rows.size(0);
  if (num_rows == 0) return;
  PromoteTailParams p{};
  p.rows = data_of<const int64_t>(rows, "rows");
  p.page_index = data_of<const int32_t>(page_index, "page_index");
  p.filled = data_of<const bool>(filled, "filled");
  p.capacity = data_of<const int32_t>(capacity, "capacity");
  p.tail_pages = data_of<int32_t>(tail_pages, "tail_pages");
  p.tables = tables_of(slot_pages, lru_order, device_pages, page_slots);
  p.num_pools = static_cast<int32_t>(num_pools);
  p.heads = static_cast<int32_t>(num_rows / page_index.size(0));
  p.copies = 1;
  int64_t unit = 16;
  if (num_pools > 0) {
    const Pool from[2] = {Pool::of_pages(pages_k, "pages.k"), Pool::of_pages(pages_v, "pages.v")};
    const Pool to[2] = {Pool::of_pages(copy_k, "copy.k"), Pool::of_pages(copy_v, "copy.v")};
    unit = unit_bytes(from, {"pages.k", "pages.v"}, to, num_pools);
    for (int64_t i = 0; i < num_pools; ++i) {
      p.pool[i] = {from[i].data, to[i].data, from[i].page_stride, to[i].page_stride,
                   to[i].head_stride};
      const Runs runs({{from[i].heads, from[i].head_stride, to[i].head_stride},
                       {from[i].size, from[i].token_stride, to[i].token_stride}},
                      from[i].row_bytes);
      p.shape[i] = shape_of(runs, unit);
    }
    p.num_pages = static_cast<int32_t>(from[0].pages);
    p.copies = static_cast<int32_t>(std::max<int64_t>(p.heads / to[0].heads, 1));
  }
  void (*kernel)(PromoteTailParams) = unit == 16  ? promote_tail_kernel<uint4>
                                      : unit == 8 ? promote_tail_kernel<uint2>
                                      : unit == 4 ? promote_tail_kernel<unsigned>
                                                  : promote_tail_kernel<unsigned short>;
  OnDevice(rows).launch("promote_tail", kernel, dim3(static_cast<unsigned>(num_rows)),
                        kTransferThreads, 0, p);
}

void reset_rows(TensorView rows, TensorView capacity, TensorView slot_pages, TensorView lru_order,
                TensorView device_pages, TensorView page_slots) {
  const ResetRowsParams p{data_of<const int64_t>(rows, "rows"),
                          data_of<const int32_t>(capacity, "capacity"),
                          tables_of(slot_pages, lru_order, device_pages, page_slots)};
  const dim3 grid(size32(rows, 0), size32(slot_pages, 0));
  if (grid.x == 0 || grid.y == 0) return;
  OnDevice(rows).launch("reset_rows", reset_rows_kernel, grid, block_threads(p.tables.slots, 1), 0,
                        p);
}

void rebalance(TensorView rows, TensorView new_capacity, TensorView capacity,
               TensorView slot_pages, TensorView lru_order, TensorView device_pages,
               TensorView page_slots, TensorView free_pages, TensorView num_free,
               TensorView scratch, TensorView changed) {
  const RebalanceParams p{data_of<const int64_t>(rows, "rows"),
                          data_of<const int32_t>(new_capacity, "new_capacity"),
                          data_of<int32_t>(capacity, "capacity"),
                          data_of<int32_t>(free_pages, "free_pages"),
                          data_of<int32_t>(num_free, "num_free"),
                          data_of<int32_t>(scratch, "scratch"),
                          data_of<int32_t>(changed, "changed"),
                          free_pages.stride(0),
                          tables_of(slot_pages, lru_order, device_pages, page_slots),
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
