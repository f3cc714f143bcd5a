// Moves pages and tokens on the device, from lists that only the device knows.
//
// The work is cut into chunks of kChunkUnits units, of all entries, layers and pools; the warps of
// the whole grid take them in turns, so that a single request's misses keep every warp busy. Host
// memory is read in place.
#pragma once

#include "hisparse/block.cuh"

namespace hisparse {

// Loads that each lane has in flight.
constexpr int kLoads = 4;
constexpr int kChunkUnits = kLoads * kWarp;
constexpr int kTransferThreads = 256;

// Blocks of a transfer that crosses the link: 512 KiB of loads in flight, five times what 55 GB/s
// and 2 us of latency need. More would only take registers from kernels that run beside it.
constexpr int kLinkBlocks = 32;

// A block of bytes: up to two dimensions of contiguous runs. One load moves one unit.
struct BlockShape {
  int32_t units, run_units, inner_runs;
  int64_t src_inner, src_outer, dst_inner, dst_outer;  // strides of runs, bytes
};

// One chunk of a block.
struct ChunkMove {
  const char* src;  // of the block; null: nothing to move
  char* dst;
  int32_t shape, chunk;
};

struct GatherPool {
  const char* src;  // [L, Psrc, Hs, S, D]
  char* dst;        // [L, Pdst, Hd, S, D]
  int64_t src_layer, src_page, src_head, dst_layer, dst_page;  // strides, bytes
};

struct GatherPagesParams {
  GatherPool pool[2];
  BlockShape shape[2];       // of a page, or of one head of it
  const int32_t* src_pages;  // [R, K]
  const int32_t* dst_pages;  // [R, K]
  int64_t src_pages_stride, dst_pages_stride;  // elements
  int64_t num_items, num_entries;              // chunks in all; R * K
  int32_t width, num_src, num_dst;             // K, Psrc, Pdst
  int32_t heads, src_heads, chunks0, chunks;   // src_heads is 0 if whole pages move

  __device__ ChunkMove move(int64_t item) const {
    const int64_t entry = item / chunks % num_entries, layer = item / chunks / num_entries;
    const int64_t r = entry / width, i = entry % width;
    const int32_t from = src_pages[r * src_pages_stride + i];
    const int32_t to = dst_pages[r * dst_pages_stride + i];
    if (from < 0 || to < 0 || from >= num_src || to >= num_dst) return {nullptr, nullptr, 0, 0};
    const int32_t chunk = static_cast<int32_t>(item % chunks);
    const int32_t which = chunk < chunks0 ? 0 : 1;
    const GatherPool& q = pool[which];
    const int64_t head = r % heads * src_heads / heads;
    return {q.src + layer * q.src_layer + from * q.src_page + head * q.src_head,
            q.dst + layer * q.dst_layer + to * q.dst_page, which, which ? chunk - chunks0 : chunk};
  }
};

struct TokenPool {
  char* pages;   // [L, P, H, S, D]
  char* tokens;  // [L, T, H, D]
  int64_t pages_layer, pages_page, pages_token, tokens_layer, tokens_token;  // strides, bytes
};

struct MoveTokensParams {
  TokenPool pool[2];
  BlockShape shape[2];           // of a token, all heads
  const int64_t* slots;          // [T]
  int64_t num_items, num_slots;  // chunks in all; P * S
  int32_t num_tokens, page_size, chunks0, chunks;
  bool into_pages;

  __device__ ChunkMove move(int64_t item) const {
    const int64_t t = item / chunks % num_tokens, layer = item / chunks / num_tokens;
    const int64_t slot = slots[t];
    if (slot < 0 || slot >= num_slots) return {nullptr, nullptr, 0, 0};
    const int32_t chunk = static_cast<int32_t>(item % chunks);
    const int32_t which = chunk < chunks0 ? 0 : 1;
    const TokenPool& q = pool[which];
    char* stored = q.pages + layer * q.pages_layer + slot / page_size * q.pages_page +
                   slot % page_size * q.pages_token;
    char* token = q.tokens + layer * q.tokens_layer + t * q.tokens_token;
    return {into_pages ? token : stored, into_pages ? stored : token, which,
            which ? chunk - chunks0 : chunk};
  }
};

struct AppendPool {
  char* tokens;        // [T, H, D]
  char* host_pages;    // [P, H, S, D]
  char* device_pages;  // [N, Hr, S, D]
  int64_t tokens_token, tokens_head, host_page, host_token, device_page, device_token;  // bytes
};

// One new token for each of T requests, to its host slot and to the tail pages of its R rows.
struct AppendTokensParams {
  AppendPool pool[2];
  BlockShape shape[4];  // of a token in host memory, then of a row's part of it; by pool
  const int64_t* host_slots;  // [T]
  const int64_t* tail_slots;  // [R], device page times S, plus the offset in it
  int64_t num_items, num_host_slots, num_device_slots;
  int32_t heads, token_heads;  // R / T; heads of a token, or 0 if a row takes all of them
  int32_t page_size, host_chunks0, host_chunks, row_chunks0, row_chunks;

  __device__ ChunkMove move(int64_t item) const {
    const int32_t each = host_chunks + heads * row_chunks;
    const int64_t t = item / each;
    int32_t chunk = static_cast<int32_t>(item % each);
    const bool to_host = chunk < host_chunks;
    const int32_t head = to_host ? 0 : (chunk - host_chunks) / row_chunks;
    if (!to_host) chunk = (chunk - host_chunks) % row_chunks;
    const int64_t slot = to_host ? host_slots[t] : tail_slots[t * heads + head];
    if (slot < 0 || slot >= (to_host ? num_host_slots : num_device_slots)) {
      return {nullptr, nullptr, 0, 0};
    }
    const int32_t chunks0 = to_host ? host_chunks0 : row_chunks0;
    const int32_t which = chunk < chunks0 ? 0 : 1;
    const AppendPool& q = pool[which];
    const int64_t page = slot / page_size, at = slot % page_size;
    const int64_t part = to_host ? 0 : int64_t{head} * token_heads / heads;
    return {q.tokens + t * q.tokens_token + part * q.tokens_head,
            to_host ? q.host_pages + page * q.host_page + at * q.host_token
                    : q.device_pages + page * q.device_page + at * q.device_token,
            to_host ? which : 2 + which, which ? chunk - chunks0 : chunk};
  }
};

// All lanes of a warp move one chunk: all loads first, then all stores.
template <typename Unit>
__device__ void copy_chunk(const BlockShape& shape, const char* src, char* dst, int32_t chunk) {
  Unit loaded[kLoads];
  int64_t to[kLoads];
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const int32_t unit = chunk * kChunkUnits + j * kWarp + lane_id();
    if (unit >= shape.units) continue;
    const int32_t run = unit / shape.run_units;
    const int64_t inner = run % shape.inner_runs, outer = run / shape.inner_runs;
    const int64_t at = static_cast<int64_t>(unit % shape.run_units) * sizeof(Unit);
    const int64_t from = at + inner * shape.src_inner + outer * shape.src_outer;
    to[j] = at + inner * shape.dst_inner + outer * shape.dst_outer;
    loaded[j] = __ldcs(reinterpret_cast<const Unit*>(src + from));
  }
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const int32_t unit = chunk * kChunkUnits + j * kWarp + lane_id();
    if (unit >= shape.units) continue;
    *reinterpret_cast<Unit*>(dst + to[j]) = loaded[j];
  }
}

__device__ inline uint64_t from_lane(const void* pointer, int lane) {
  return __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane);
}

// Each lane looks up one of the warp's next chunks, then all lanes move the chunks that were found.
// If most pages are resident, most entries are -1; each of them costs one look-up by one lane.
template <typename Unit, typename Params>
__global__ void __launch_bounds__(kTransferThreads)
    transfer_kernel(const __grid_constant__ Params p) {
  wait_for_earlier_launches();
  const int32_t warps = static_cast<int32_t>(gridDim.x) * (num_threads() / kWarp);
  const int32_t warp = static_cast<int32_t>(blockIdx.x) * (num_threads() / kWarp) + warp_id();
  // The first entries of each row are the missing pages. If each turn began with the same warp, a few
  // warps would move the chunks of all rows, one after the other; so each turn begins with another one.
  const int32_t turn = warps / 16 | 1;
  int32_t own = (warp + lane_id() * turn) % warps;
  for (int64_t first = 0; first < p.num_items; first += int64_t{warps} * kWarp) {
    const int64_t item = first + lane_id() * warps + own;
    own = (own + kWarp * turn) % warps;
    const ChunkMove found = item < p.num_items ? p.move(item) : ChunkMove{nullptr, nullptr, 0, 0};
    unsigned left = __ballot_sync(kAllLanes, found.src != nullptr);
    for (; left != 0; left &= left - 1) {
      const int owner = __ffs(static_cast<int>(left)) - 1;
      const char* src = reinterpret_cast<const char*>(from_lane(found.src, owner));
      char* dst = reinterpret_cast<char*>(from_lane(found.dst, owner));
      const int32_t shape = __shfl_sync(kAllLanes, found.shape, owner);
      const int32_t chunk = __shfl_sync(kAllLanes, found.chunk, owner);
      copy_chunk<Unit>(p.shape[shape], src, dst, chunk);
    }
  }
}

}  // namespace hisparse
