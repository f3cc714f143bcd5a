// promote_tail, reset_rows, rebalance: checks and launches.
#include "hisparse/row_state.cuh"

#include "pools.h"

namespace hisparse {
namespace {

// Tables [L, NR, C], or [NR, C] of one layer.
struct Tables {
  RowTables tables;
  int64_t layers;
};

Tables tables_of(Arguments& in) {
  const TensorView slot_pages = in.tensor(), lru_order = in.tensor(), device_pages = in.tensor(),
                   page_slots = in.tensor();
  const int dims = slot_pages.ndim();
  const auto layer = [&](const TensorView& t) { return dims == 3 ? t.stride(0) : 0; };
  const RowTables tables{
          data_of<int32_t>(slot_pages, "slot_pages"),
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
  return {tables, dims == 3 ? slot_pages.size(0) : 1};
}

}  // namespace

// Copies full pages of up to two pools to the results, [T, Hkv, S, D].
void promote_tail(Arguments& in) {
  PromoteTailParams p{};
  const TensorView rows = in.tensor(), page_index = in.tensor();
  p.rows = data_of<const int64_t>(rows, "rows");
  p.page_index = data_of<const int32_t>(page_index, "page_index");
  p.filled = in.data<const bool>("filled");
  p.capacity = in.data<const int32_t>("capacity");
  p.tables = tables_of(in).tables;
  p.tail_pages = in.data<int32_t>("tail_pages");
  const std::optional<TensorView> pages[2] = {in.optional(), in.optional()};
  const std::optional<TensorView> copies[2] = {in.optional(), in.optional()};
  const int64_t num_rows = rows.size(0), num_pools = !pages[0] ? 0 : !pages[1] ? 1 : 2;
  if (num_rows == 0) return;
  p.num_pools = static_cast<int32_t>(num_pools);
  p.heads = static_cast<int32_t>(num_rows / page_index.size(0));
  p.copies = 1;
  int64_t unit = 16;
  if (num_pools > 0) {
    const Pool from[2] = {Pool::of_pages(*pages[0], "pages.k"),
                          Pool::of_pages(pages[1].value_or(*pages[0]), "pages.v")};
    const Pool to[2] = {Pool::of_pages(*copies[0], "copy.k"),
                        Pool::of_pages(copies[1].value_or(*copies[0]), "copy.v")};
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

void reset_rows(Arguments& in) {
  const TensorView rows = in.tensor();
  ResetRowsParams p{};
  p.rows = data_of<const int64_t>(rows, "rows");
  p.capacity = in.data<const int32_t>("capacity");
  const auto [tables, layers] = tables_of(in);
  p.tables = tables;
  const dim3 grid(size32(rows, 0), static_cast<unsigned>(layers));
  if (grid.x == 0 || grid.y == 0) return;
  OnDevice(rows).launch("reset_rows", reset_rows_kernel, grid, block_threads(p.tables.slots, 1), 0,
                        p);
}

void rebalance(Arguments& in) {
  RebalanceParams p{};
  const TensorView rows = in.tensor();
  p.rows = data_of<const int64_t>(rows, "rows");
  p.new_capacity = in.data<const int32_t>("new_capacity");
  p.capacity = in.data<int32_t>("capacity");
  const auto [tables, layers] = tables_of(in);
  p.tables = tables;
  const TensorView free_pages = in.tensor();
  p.free_pages = data_of<int32_t>(free_pages, "free_pages");
  p.num_free = in.data<int32_t>("num_free");
  const TensorView scratch = in.tensor(), plan = in.tensor();
  p.scratch = data_of<int32_t>(scratch, "scratch");
  p.plan = data_of<int32_t>(plan, "plan");
  p.free_stride = free_pages.stride(0);
  p.num_layers = static_cast<int32_t>(layers);
  p.num_changes = size32(rows, 0);
  p.free_size = size32(free_pages, 1);
  if (layers == 0 || p.num_changes == 0) return;
  const dim3 grid(size32(scratch, 0), static_cast<unsigned>(layers));
  if (grid.x == 0 || scratch.numel() < grid.x * layers * 2 * p.tables.slots) {
    TVM_FFI_THROW(ValueError) << "scratch: got " << scratch.numel() << " elements, expected a "
                              << "multiple of " << layers * 2 * p.tables.slots;
  }
  const OnDevice on(rows);
  on.launch("rebalance", plan_rebalance_kernel, dim3(1), block_threads(p.num_changes, 1),
            sizeof(PlanShared), p);
  for (const bool grows : {false, true}) {
    p.grows = grows;
    on.launch("rebalance", rebalance_kernel, grid, block_threads(p.tables.slots, 1), 0, p);
  }
}

HISPARSE_EXPORT_KERNEL(promote_tail)
HISPARSE_EXPORT_KERNEL(reset_rows)
HISPARSE_EXPORT_KERNEL(rebalance)

}  // namespace hisparse
