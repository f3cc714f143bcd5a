// Moving pages and tokens between pools of pages. A call moves one pool, or two alike: keys and
// values.
#include "pool.h"

namespace hisparse {
namespace {

// Bytes that one core copies in a nanosecond, roughly.
constexpr double kBytesPerNs = 8.0;
constexpr int64_t kEntriesPerTask = 32;

struct GatherPagesParams {
  Pool src[2], dst[2];            // as many of them as there are pools
  Rows<const int32_t> src_pages;  // [R, K]
  Rows<const int32_t> dst_pages;  // [R, K]
  int64_t num_rows, width, heads, num_pools;

  bool whole_pages() const { return src[0].heads == dst[0].heads; }
};

// Throws unless every page that is to move exists. Returns how many move.
int64_t count_moves(const GatherPagesParams& p) {
  int64_t moves = 0;
  for (int64_t r = 0; r < p.num_rows; ++r) {
    for (int64_t i = 0; i < p.width; ++i) {
      const int32_t from = p.src_pages[r][i], to = p.dst_pages[r][i];
      if ((from | to) < 0) continue;
      if (from >= p.src[0].pages) {
        TVM_FFI_THROW(ValueError) << "src_pages: got " << from << " in row " << r
                                  << ", expected at most " << p.src[0].pages - 1;
      }
      if (to >= p.dst[0].pages) {
        TVM_FFI_THROW(ValueError) << "dst_pages: got " << to << " in row " << r
                                  << ", expected at most " << p.dst[0].pages - 1;
      }
      ++moves;
    }
  }
  return moves;
}

// Some entries of a row, in one layer of one pool.
void gather_entries(const GatherPagesParams& p, const BlockCopy& copy, int64_t which,
                    int64_t layer, int64_t r, int64_t first) {
  const Pool &src = p.src[which], &dst = p.dst[which];
  const int64_t last = std::min(first + kEntriesPerTask, p.width);
  const int64_t head = p.whole_pages() ? 0 : r % p.heads * src.heads / p.heads;
  const int32_t *from = p.src_pages[r], *to = p.dst_pages[r];
  const char* source = src.data + layer * src.layer_stride + head * src.head_stride;
  char* target = dst.data + layer * dst.layer_stride;
  Move moves[kEntriesPerTask];
  int count = 0;
  for (int64_t i = first; i < last; ++i) {
    if ((from[i] | to[i]) < 0) continue;
    moves[count++] = {target + to[i] * dst.page_stride, source + from[i] * src.page_stride, nullptr};
  }
  for (int i = 0; i < count; ++i) moves[i].ahead = moves[std::min(i + kAtOnce, count - 1)].src;
  for (int i = 0; i < count; i += kAtOnce) copy.stream(moves + i, std::min(kAtOnce, count - i));
}

void run(const GatherPagesParams& p) {
  const int64_t moves = count_moves(p);
  const BlockCopy copies[2] = {page_copy(p.src[0], p.dst[0]), page_copy(p.src[1], p.dst[1])};
  const int64_t layers = p.src[0].layers;
  int64_t bytes = 0;
  for (int64_t which = 0; which < p.num_pools; ++which) bytes += copies[which].bytes();
  const int64_t per_row = (p.width + kEntriesPerTask - 1) / kEntriesPerTask;
  const int64_t per_layer = p.num_rows * per_row, tasks = layers * per_layer;
  const int threads = num_threads(tasks, moves * layers * bytes / kBytesPerNs);
  parallel_for(tasks, threads, [&](int64_t task) {
    const int64_t layer = task / per_layer, r = task % per_layer / per_row;
    const int64_t first = task % per_row * kEntriesPerTask;
    for (int64_t which = 0; which < p.num_pools; ++which) {
      gather_entries(p, copies[which], which, layer, r, first);
    }
  });
}

struct Tokens {
  char* data;
  int64_t layer_stride, token_stride, head_stride, item_stride;  // bytes

  explicit Tokens(const TensorView& t) : data(static_cast<char*>(t.data_ptr())) {
    const int64_t item_bytes = t.dtype().bits * t.dtype().lanes / 8;
    layer_stride = t.ndim() == 4 ? t.stride(0) * item_bytes : 0;
    token_stride = t.stride(-3) * item_bytes;
    head_stride = t.stride(-2) * item_bytes;
    item_stride = t.stride(-1) * item_bytes;
  }
};

struct MoveTokensParams {
  Tokens tokens[2];      // [T, H, D] or [L, T, H, D]
  Pool pool[2];
  const int64_t* slots;  // [T * copies]: a token's follow each other
  int64_t num_slots, copies, num_pools;
  bool into_pool;
};

BlockCopy token_copy(const Tokens& tokens, const Pool& pool, bool into_pool) {
  Dim heads{pool.heads, tokens.head_stride, pool.head_stride};
  Dim items{pool.width, tokens.item_stride, pool.item_stride};
  if (!into_pool) {
    std::swap(heads.src_stride, heads.dst_stride);
    std::swap(items.src_stride, items.dst_stride);
  }
  return BlockCopy({heads, items}, pool.item_bytes);
}

void require_slots(const MoveTokensParams& p) {
  const int64_t room = p.pool[0].pages * p.pool[0].size;
  for (int64_t i = 0; i < p.num_slots; ++i) {
    if (p.slots[i] < 0 || p.slots[i] >= room) {
      TVM_FFI_THROW(ValueError) << "slots: got " << p.slots[i] << " for token " << i / p.copies
                                << ", expected 0 to " << room - 1;
    }
  }
}

void run(const MoveTokensParams& p) {
  require_slots(p);
  const BlockCopy copies[2] = {token_copy(p.tokens[0], p.pool[0], p.into_pool),
                               token_copy(p.tokens[1], p.pool[1], p.into_pool)};
  const int64_t layers = p.pool[0].layers, size = p.pool[0].size;
  int64_t bytes = 0;
  for (int64_t which = 0; which < p.num_pools; ++which) bytes += copies[which].bytes();
  const int64_t per_layer = (p.num_slots + kEntriesPerTask - 1) / kEntriesPerTask;
  const int64_t tasks = layers * per_layer;
  const int threads = num_threads(tasks, layers * p.num_slots * bytes / kBytesPerNs);
  parallel_for(tasks, threads, [&](int64_t task) {
    const int64_t layer = task / per_layer, first = task % per_layer * kEntriesPerTask;
    const int64_t last = std::min(first + kEntriesPerTask, p.num_slots);
    for (int64_t i = first; i < last; ++i) {
      const int64_t page = p.slots[i] / size, offset = p.slots[i] % size, t = i / p.copies;
      for (int64_t which = 0; which < p.num_pools; ++which) {
        const Pool& pool = p.pool[which];
        const Tokens& tokens = p.tokens[which];
        char* stored = pool.data + layer * pool.layer_stride + page * pool.page_stride +
                       offset * pool.token_stride;
        char* token = tokens.data + layer * tokens.layer_stride + t * tokens.token_stride;
        const char* from = p.into_pool ? token : stored;
        const Move move{p.into_pool ? stored : token, from, from};
        copies[which](&move, 1);
      }
    }
  });
}

void move_tokens(const TensorView& k, const std::optional<TensorView>& v, const TensorView& pool_k,
                 const std::optional<TensorView>& pool_v, const TensorView& slots,
                 bool into_pool) {
  run(MoveTokensParams{{Tokens(k), Tokens(v.value_or(k))},
                       {Pool(pool_k), Pool(pool_v.value_or(pool_k))},
                       data_of<const int64_t>(slots, "slots"),
                       slots.size(0),
                       slots.size(0) / std::max<int64_t>(1, k.size(-3)),
                       v ? 2 : 1,
                       into_pool});
}

// V is absent where it lies within K: then one pool moves, and the second stands for nothing.
void gather_pages(Arguments& in) {
  const TensorView src_k = in.tensor();
  const std::optional<TensorView> src_v = in.optional();
  const TensorView src_pages = in.tensor(), dst_k = in.tensor();
  const std::optional<TensorView> dst_v = in.optional();
  const TensorView dst_pages = in.tensor();
  run(GatherPagesParams{{Pool(src_k), Pool(src_v.value_or(src_k))},
                        {Pool(dst_k), Pool(dst_v.value_or(dst_k))},
                        rows_of<const int32_t>(src_pages, "src_pages"),
                        rows_of<const int32_t>(dst_pages, "dst_pages"),
                        src_pages.size(0),
                        src_pages.size(1),
                        in.number<int64_t>(),
                        src_v ? 2 : 1});
}

void scatter_tokens(Arguments& in) {
  const TensorView dst_k = in.tensor();
  const std::optional<TensorView> dst_v = in.optional();
  const TensorView k = in.tensor();
  const std::optional<TensorView> v = in.optional();
  move_tokens(k, v, dst_k, dst_v, in.tensor(), true);
}

void gather_tokens(Arguments& in) {
  const TensorView src_k = in.tensor();
  const std::optional<TensorView> src_v = in.optional();
  const TensorView slots = in.tensor(), k = in.tensor();
  move_tokens(k, in.optional(), src_k, src_v, slots, false);
}

HISPARSE_EXPORT_KERNEL(gather_pages)
HISPARSE_EXPORT_KERNEL(scatter_tokens)
HISPARSE_EXPORT_KERNEL(gather_tokens)

}  // namespace
}  // namespace hisparse
