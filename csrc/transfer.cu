// gather_pages, scatter_tokens, gather_tokens by kernel: checks and launches. A call moves one pool,
// or two alike: keys and values.
#include "hisparse/transfer.cuh"

#include "pools.h"

namespace hisparse {
namespace {

int32_t chunks_of(const BlockShape& shape) {
  return (shape.units + kChunkUnits - 1) / kChunkUnits;
}

bool in_host_memory(const TensorView& tensor) { return tensor.device().device_type != kDLCUDA; }

// `crosses` says whether the transfer reads or writes host memory.
template <typename Params>
void launch(const OnDevice& on, const char* name, int64_t unit, bool crosses, const Params& p) {
  if (p.num_items == 0) return;
  const int64_t most = crosses ? kLinkBlocks : 8 * on.attribute(cudaDevAttrMultiProcessorCount);
  const int64_t warps = kTransferThreads / kWarp;
  const dim3 grid(static_cast<unsigned>(std::min(most, (p.num_items + warps - 1) / warps)));
  void (*kernel)(Params) = unit == 16  ? transfer_kernel<uint4, Params>
                           : unit == 8 ? transfer_kernel<uint2, Params>
                           : unit == 4 ? transfer_kernel<unsigned, Params>
                                       : transfer_kernel<unsigned short, Params>;
  on.launch(name, kernel, grid, kTransferThreads, 0, p);
}

using Tensors = const std::optional<TensorView> (&)[2];

// V is absent where it lies within K: then one pool moves, and the second stands for nothing.
int64_t count(Tensors kv) { return kv[1] ? 2 : 1; }

void move_tokens(Tensors tokens, const Names& names, Tensors pools, const Names& pool_names,
                 const TensorView& slots, bool into_pages) {
  const Pool token[2] = {Pool::of_tokens(*tokens[0], names.first),
                         Pool::of_tokens(tokens[1].value_or(*tokens[0]), names.second)};
  const Pool pool[2] = {Pool::of_pages(*pools[0], pool_names.first),
                        Pool::of_pages(pools[1].value_or(*pools[0]), pool_names.second)};
  const int64_t num_pools = count(tokens);
  const int64_t unit = unit_bytes(token, names, pool, num_pools);
  MoveTokensParams p{};
  for (int64_t i = 0; i < num_pools; ++i) {
    const Pool& from = into_pages ? token[i] : pool[i];
    const Pool& to = into_pages ? pool[i] : token[i];
    p.pool[i] = {pool[i].data,         token[i].data,         pool[i].layer_stride,
                 pool[i].page_stride,  pool[i].token_stride,  token[i].layer_stride,
                 token[i].token_stride};
    const Runs runs({{pool[i].heads, from.head_stride, to.head_stride}}, pool[i].row_bytes);
    p.shape[i] = shape_of(runs, unit);
    p.chunks += chunks_of(p.shape[i]);
  }
  p.slots = data_of<const int64_t>(slots, "slots");
  p.num_slots = pool[0].pages * pool[0].size;
  p.num_tokens = size32(slots, 0);
  p.page_size = static_cast<int32_t>(std::max<int64_t>(pool[0].size, 1));
  p.chunks0 = chunks_of(p.shape[0]);
  p.num_items = pool[0].layers * p.num_tokens * p.chunks;
  p.into_pages = into_pages;
  const bool crosses = in_host_memory(*tokens[0]) || in_host_memory(*pools[0]);
  launch(OnDevice(slots), into_pages ? "scatter_tokens" : "gather_tokens", unit, crosses, p);
}

}  // namespace

void gather_pages(Arguments& in) {
  const std::optional<TensorView> from[2] = {in.tensor(), in.optional()};
  const TensorView src_pages = in.tensor();
  const std::optional<TensorView> to[2] = {in.tensor(), in.optional()};
  const TensorView dst_pages = in.tensor();
  const auto heads = in.number<int64_t>();
  const int64_t num_pools = count(from);
  const Pool src[2] = {Pool::of_pages(*from[0], "src.k"),
                       Pool::of_pages(from[1].value_or(*from[0]), "src.v")};
  const Pool dst[2] = {Pool::of_pages(*to[0], "dst.k"),
                       Pool::of_pages(to[1].value_or(*to[0]), "dst.v")};
  const int64_t unit = unit_bytes(src, {"src.k or dst.k", "src.v or dst.v"}, dst, num_pools);
  GatherPagesParams p{};
  for (int64_t i = 0; i < num_pools; ++i) {
    p.pool[i] = {src[i].data,        dst[i].data,         src[i].layer_stride, src[i].page_stride,
                 src[i].head_stride, dst[i].layer_stride, dst[i].page_stride};
    const Runs runs({{dst[i].heads, src[i].head_stride, dst[i].head_stride},
                     {dst[i].size, src[i].token_stride, dst[i].token_stride}},
                    dst[i].row_bytes);
    p.shape[i] = shape_of(runs, unit);
    p.chunks += chunks_of(p.shape[i]);
  }
  p.src_pages = data_of<const int32_t>(src_pages, "src_pages");
  p.dst_pages = data_of<const int32_t>(dst_pages, "dst_pages");
  p.src_pages_stride = src_pages.stride(0);
  p.dst_pages_stride = dst_pages.stride(0);
  p.num_entries = src_pages.numel();
  p.width = size32(src_pages, 1);
  p.num_src = static_cast<int32_t>(src[0].pages);
  p.num_dst = static_cast<int32_t>(dst[0].pages);
  p.heads = static_cast<int32_t>(heads);
  p.src_heads = src[0].heads == dst[0].heads ? 0 : static_cast<int32_t>(src[0].heads);
  p.chunks0 = chunks_of(p.shape[0]);
  p.num_items = dst[0].layers * p.num_entries * p.chunks;
  const bool crosses = in_host_memory(*from[0]) || in_host_memory(*to[0]);
  launch(OnDevice(src_pages), "gather_pages", unit, crosses, p);
}

void scatter_tokens(Arguments& in) {
  const std::optional<TensorView> pools[2] = {in.tensor(), in.optional()};
  const std::optional<TensorView> tokens[2] = {in.tensor(), in.optional()};
  move_tokens(tokens, {"k", "v"}, pools, {"dst.k", "dst.v"}, in.tensor(), true);
}

void gather_tokens(Arguments& in) {
  const std::optional<TensorView> pools[2] = {in.tensor(), in.optional()};
  const TensorView slots = in.tensor();
  const std::optional<TensorView> tokens[2] = {in.tensor(), in.optional()};
  move_tokens(tokens, {"k", "v"}, pools, {"src.k", "src.v"}, slots, false);
}

// K and V [T, H, D] to host pages [P, H, S, D] and device pages [N, Hr, S, D]; Hr is H, or 1.
void append_tokens(Arguments& in) {
  const std::optional<TensorView> host_pages[2] = {in.tensor(), in.optional()};
  const std::optional<TensorView> tokens[2] = {in.tensor(), in.optional()};
  const TensorView host_slots = in.tensor();
  const std::optional<TensorView> device_pages[2] = {in.tensor(), in.optional()};
  const TensorView tail_slots = in.tensor();
  const int64_t num_tokens = host_slots.size(0), num_pools = count(tokens);
  if (num_tokens == 0) return;
  const Pool token[2] = {Pool::of_tokens(*tokens[0], "k"),
                         Pool::of_tokens(tokens[1].value_or(*tokens[0]), "v")};
  const Pool host[2] = {Pool::of_pages(*host_pages[0], "host.k"),
                        Pool::of_pages(host_pages[1].value_or(*host_pages[0]), "host.v")};
  const Pool device[2] = {Pool::of_pages(*device_pages[0], "device.k"),
                          Pool::of_pages(device_pages[1].value_or(*device_pages[0]), "device.v")};
  const int64_t unit =
      std::min(unit_bytes(token, {"k or host.k", "v or host.v"}, host, num_pools),
               unit_bytes(token, {"k or device.k", "v or device.v"}, device, num_pools));
  AppendTokensParams p{};
  for (int64_t i = 0; i < num_pools; ++i) {
    p.pool[i] = {token[i].data,          host[i].data,        device[i].data,
                 token[i].token_stride,  token[i].head_stride, host[i].page_stride,
                 host[i].token_stride,   device[i].page_stride, device[i].token_stride};
    const Runs whole({{host[i].heads, token[i].head_stride, host[i].head_stride}},
                     host[i].row_bytes);
    const Runs part({{device[i].heads, token[i].head_stride, device[i].head_stride}},
                    device[i].row_bytes);
    p.shape[i] = shape_of(whole, unit);
    p.shape[2 + i] = shape_of(part, unit);
    p.host_chunks += chunks_of(p.shape[i]);
    p.row_chunks += chunks_of(p.shape[2 + i]);
  }
  p.host_slots = data_of<const int64_t>(host_slots, "host_slots");
  p.tail_slots = data_of<const int64_t>(tail_slots, "tail_slots");
  p.num_host_slots = host[0].pages * host[0].size;
  p.num_device_slots = device[0].pages * device[0].size;
  p.heads = static_cast<int32_t>(tail_slots.size(0) / num_tokens);
  p.token_heads = device[0].heads == token[0].heads ? 0 : static_cast<int32_t>(token[0].heads);
  p.page_size = static_cast<int32_t>(std::max<int64_t>(host[0].size, 1));
  p.host_chunks0 = chunks_of(p.shape[0]);
  p.row_chunks0 = chunks_of(p.shape[2]);
  p.num_items = num_tokens * (p.host_chunks + p.heads * p.row_chunks);
  launch(OnDevice(tail_slots), "append_tokens", unit, in_host_memory(*host_pages[0]), p);
}

HISPARSE_EXPORT_KERNEL(append_tokens)
HISPARSE_EXPORT_KERNEL(gather_pages)
HISPARSE_EXPORT_KERNEL(scatter_tokens)
HISPARSE_EXPORT_KERNEL(gather_tokens)

}  // namespace hisparse
