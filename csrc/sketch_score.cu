// sketch_score: checks and launch.
#include "hisparse/sketch_score.cuh"

#include "pools.h"

#include <algorithm>

namespace hisparse {
namespace {

constexpr int64_t kReserved = 1024;  // bytes of shared memory of each block, for the system

NumberRows rows_of(const TensorView& t) {
  const auto type = t.dtype();
  NumberType number = NumberType::kFloat32;
  if (type.code == kDLBfloat) {
    number = NumberType::kBFloat16;
  } else if (type.code == kDLFloat8_e4m3fn) {
    number = NumberType::kE4M3;
  } else if (type.code == kDLInt && type.bits == 8) {
    number = NumberType::kInt8;
  } else if (type.code == kDLFloat && type.bits == 16) {
    number = NumberType::kFloat16;
  } else if (type.code != kDLFloat || type.bits != 32) {
    TVM_FFI_THROW(ValueError) << "tail.kv: got DLPack's dtype " << static_cast<int>(type.code)
                              << " of " << static_cast<int>(type.bits) << " bits, expected float32, "
                              << "bfloat16, float16, float8_e4m3fn or int8";
  }
  return {t.data_ptr(), 0, t.stride(-2), t.stride(-1), number};
}

// `keys` are those of the tail pages.
TailParams tail_of(Arguments& in, const std::optional<TensorView>& keys, int64_t requests) {
  TailParams p{};
  const std::optional<TensorView> scales = in.optional(), pages = in.optional();
  p.lens = in.data_or_null<const int32_t>("tail.lens");
  if (!keys || requests == 0) return p;
  p.keys = rows_of(*keys);
  p.page_stride = keys->stride(0);
  p.head_stride = keys->stride(1);
  p.num_pages = size32(*keys, 0);
  p.heads = size32(*keys, 1);
  p.size = size32(*keys, 2);
  p.pages = data_of<const int32_t>(*pages, "tail.pages");
  p.rows = static_cast<int32_t>(pages->size(0) / requests);
  if (scales) {
    p.scales = data_of<const uint8_t>(*scales, "tail.kv.scales");
    p.scales_page_stride = scales->stride(0);
    p.scales_head_stride = scales->stride(1);
    p.scales_token_stride = scales->stride(2);
  }
  return p;
}

// K and V [B, Hkv, D] to host pages [P, Hkv, S, D] and to tail pages [N, heads, S, D].
NewTokens new_tokens_of(Arguments& in, const std::optional<TensorView> (&tails)[2]) {
  const std::optional<TensorView> tokens[2] = {in.optional(), in.optional()};
  const std::optional<TensorView> host_pages[2] = {in.optional(), in.optional()};
  NewTokens p{};
  p.host_slots = in.data_or_null<const int64_t>("tail.new.host_slots");
  p.tail_slots = in.data_or_null<const int64_t>("tail.new.tail_slots");
  if (!tokens[0]) return p;
  const Pool token[2] = {Pool::of_tokens(*tokens[0], "tail.new.k"),
                         Pool::of_tokens(*tokens[1], "tail.new.v")};
  const Pool host[2] = {Pool::of_pages(*host_pages[0], "tail.new.host.k"),
                        Pool::of_pages(*host_pages[1], "tail.new.host.v")};
  const Pool tail[2] = {Pool::of_pages(*tails[0], "tail.kv.k"),
                        Pool::of_pages(*tails[1], "tail.kv.v")};
  // As with MLA, whose values are the first columns of its keys.
  const bool within = host[0].data == host[1].data && tail[0].data == tail[1].data;
  const int64_t parts = within ? 1 : 2;
  const int64_t unit =
      std::min(unit_bytes(token, {"tail.new.k", "tail.new.v"}, host, parts),
               unit_bytes(token, {"tail.new.k or tail.kv.k", "tail.new.v or tail.kv.v"}, tail, parts));
  p.wide = unit == 16;
  for (int64_t i = 0; i < parts; ++i) {
    p.parts[i] = {token[i].data,        host[i].data,         tail[i].data,
                  token[i].token_stride, token[i].head_stride, host[i].page_stride,
                  host[i].head_stride,  host[i].token_stride, tail[i].page_stride,
                  tail[i].head_stride,  tail[i].token_stride,
                  static_cast<int32_t>(token[i].row_bytes / (p.wide ? 16 : 2))};
  }
  p.num_host_slots = host[0].pages * host[0].size;
  p.num_tail_slots = tail[0].pages * tail[0].size;
  p.page_size = static_cast<int32_t>(tail[0].size);
  return p;
}

// For a device that runs `slots` blocks at once, each of which scores `batch` pages in a turn.
dim3 grid_of(const SketchScoreParams& p, int64_t requests, int64_t slots, int64_t batch) {
  // Each block loads its queries: it pays to take some turns, unless the device is left idle.
  constexpr int64_t kMostTurns = 16;
  const auto quotient = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t rows = requests * p.request_blocks, tails = p.tail.keys.data != nullptr;
  const int64_t turns = quotient(p.width, batch);
  int64_t runs = std::max(slots / rows, quotient(turns, kMostTurns));
  // A captured step has blocks for the longest context: no more than one request keeps busy.
  runs = std::min({runs, quotient(slots, p.request_blocks), turns});
  if (runs > 0) runs = quotient(turns, quotient(turns, runs));  // Fewer would take longer.
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(runs + tails));
}

template <typename Layout, int kQueries, int kParts>
void launch(const OnDevice& on, int64_t requests, const SketchScoreParams& p) {
  const SketchScoreShared sizes = score_shared<Layout, kQueries, kParts>(p.layout);
  const int64_t most = on.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  int warps = kScoreWarps;
  const auto bytes = [&] { return int64_t{sizes.warps()} + int64_t{warps} * sizes.warp_bytes(); };
  while (warps > 1 && bytes() > most) --warps;
  if (bytes() > most) {
    TVM_FFI_THROW(ValueError) << "sketches: got pages of " << p.layout.page_size << " tokens, whose "
                              << "sketches of " << p.layout.num_bytes() << " bytes take more than "
                              << "the " << most << " bytes of shared memory that a block of this "
                              << "GPU has; expected a smaller page_size";
  }
  const int64_t resident = std::clamp<int64_t>((most + kReserved) / (bytes() + kReserved), 1,
                                               score_blocks<Layout>(kQueries));
  on.launch("sketch_score", sketch_score_kernel<Layout, kQueries, kParts>,
            grid_of(p, requests, resident * on.attribute(cudaDevAttrMultiProcessorCount),
                    warps * kBatch),
            warps * kWarp, bytes(), p);
}

template <typename Layout, int kQueries>
bool launch_known(const OnDevice& on, int64_t requests, const SketchScoreParams& p) {
  const SketchLayout known = Layout::get();
  if (p.layout.dim != known.dim || p.layout.page_size != known.page_size ||
      p.layout.num_channels != known.num_channels) {
    return false;
  }
  launch<Layout, kQueries, 1>(on, requests, p);
  return true;
}

template <int kQueries>
void launch_queries(const OnDevice& on, int64_t requests, const SketchScoreParams& p) {
  if (p.query.type != NumberType::kFloat32) {
    if (launch_known<KnownLayout<128, 16, 40>, kQueries>(on, requests, p) ||
        launch_known<KnownLayout<64, 16, 20>, kQueries>(on, requests, p) ||
        launch_known<KnownLayout<96, 16, 30>, kQueries>(on, requests, p) ||
        launch_known<KnownLayout<256, 16, 80>, kQueries>(on, requests, p)) {
      return;
    }
    if constexpr (kQueries <= kTileQueries) {
      if (launch_known<KnownLayout<128, 32, 40>, kQueries>(on, requests, p) ||
          launch_known<KnownLayout<128, 64, 40>, kQueries>(on, requests, p)) {
        return;
      }
    } else {  // latents, of many heads
      if (launch_known<KnownLayout<576, 16, 180>, kQueries>(on, requests, p)) return;
    }
  }
  constexpr int kAny = kQueries == 4 ? 8 : kQueries;
  // A query in float32 is a sum of two float16 numbers.
  if (p.query.type == NumberType::kFloat32) {
    launch<AnyLayout<>, kAny, 2>(on, requests, p);
  } else {
    launch<AnyLayout<>, kAny, 1>(on, requests, p);
  }
}

}  // namespace

// After the scores come `lse`, [B, Hq] or None, the layout's five numbers and the softmax scale.
void sketch_score(Arguments& in) {
  SketchScoreParams p{};
  const TensorView query = in.tensor(), sketches = in.tensor(), host_page_table = in.tensor();
  const int64_t requests = query.size(0);
  p.num_pages = in.data<const int32_t>("num_pages");
  const std::optional<TensorView> tails[2] = {in.optional(), in.optional()};
  p.tail = tail_of(in, tails[0], requests);
  p.added = new_tokens_of(in, tails);
  const TensorView scores = in.tensor();
  p.tail.lse = in.data_or_null<float>("lse");
  p.layout.dim = in.number<int32_t>();
  p.layout.page_size = in.number<int32_t>();
  p.layout.num_channels = in.number<int32_t>();
  p.layout.numbered = in.number<int32_t>() != 0;
  p.layout.bits = in.number<int32_t>();
  if (!p.layout.numbered) {
    TVM_FFI_THROW(ValueError) << "layout: got sketches without the numbers of their channels, "
                              << "which CPUs read, expected numbered ones";
  }
  p.scale = in.number<float>();
  p.query = rows_of(query);
  p.query_request = query.stride(0);
  p.heads = size32(query, 1);
  p.kv_heads = size32(sketches, 1);
  p.width = size32(scores, 2);
  if (requests * p.heads == 0 || (p.width == 0 && p.tail.keys.data == nullptr)) return;
  p.sketches = data_of<const uint8_t>(sketches, "sketches");
  // The stride of a single page or head says nothing.
  const int64_t page_stride = sketches.size(0) > 1 ? sketches.stride(0) : 0;
  p.sketch_head = p.kv_heads > 1 ? sketches.stride(1) : 0;
  const uint64_t bits = reinterpret_cast<uint64_t>(p.sketches) |
                        static_cast<uint64_t>(page_stride | p.sketch_head);
  if (bits % kCopyBytes != 0 || page_stride >> 32 != 0) {
    TVM_FFI_THROW(ValueError) << "sketches: got strides of " << page_stride << " and "
                              << p.sketch_head << " bytes from address "
                              << reinterpret_cast<uintptr_t>(p.sketches)
                              << ", expected multiples of " << kCopyBytes << " below 2^32";
  }
  p.sketch_page = static_cast<uint32_t>(page_stride);
  p.last_host_page = size32(sketches, 0) - 1;
  p.host_pages = data_of<const int32_t>(host_page_table, "host_page_table");
  p.table_row = host_page_table.stride(0);
  p.scores = data_of<float>(scores, "scores");
  p.tail.head_rows = p.tail.rows / p.kv_heads;
  p.group = p.heads / p.kv_heads;
  const int32_t queries = p.group > 8 ? 16 : p.group > 4 ? 8 : 4;
  p.tiles = (p.group + queries - 1) / queries;
  p.request_blocks = p.kv_heads * p.tiles;
  if (p.added.host_slots != nullptr && p.tiles > 1) {
    TVM_FFI_THROW(ValueError) << "tail.new: got new tokens for " << p.group << " query heads of a "
                              << "KV head, expected at most 16: one block scores a tail page";
  }
  const OnDevice on(query);
  if (queries == 4) {
    launch_queries<4>(on, requests, p);
  } else if (queries == 8) {
    launch_queries<8>(on, requests, p);
  } else {
    launch_queries<16>(on, requests, p);
  }
}

HISPARSE_EXPORT_KERNEL(sketch_score)

}  // namespace hisparse
