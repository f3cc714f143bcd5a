// gather_pages by the copy engine, for lists of pages that the host knows.
#include "pools.h"

#include <climits>
#include <cstdint>
#include <vector>

namespace hisparse {
namespace {

// Entries whose pages follow each other on both sides.
struct PageRun {
  int64_t row, src_page, dst_page, count;
};

void require_page(int32_t page, int64_t pages, const char* name) {
  if (page >= pages) {
    TVM_FFI_THROW(ValueError) << name << ": got " << page << ", expected at most " << pages - 1;
  }
}

std::vector<PageRun> page_runs(const TensorView& src_pages, const TensorView& dst_pages,
                               const Pool& src, const Pool& dst) {
  const int32_t* from = data_of<const int32_t>(src_pages, "src_pages");
  const int32_t* to = data_of<const int32_t>(dst_pages, "dst_pages");
  std::vector<PageRun> runs;
  for (int64_t r = 0; r < src_pages.size(0); ++r) {
    bool open = false;
    for (int64_t i = 0; i < src_pages.size(1); ++i) {
      const int32_t a = from[r * src_pages.stride(0) + i], b = to[r * dst_pages.stride(0) + i];
      if ((a | b) < 0) continue;
      require_page(a, src.pages, "src_pages");
      require_page(b, dst.pages, "dst_pages");
      if (open && a == runs.back().src_page + runs.back().count &&
          b == runs.back().dst_page + runs.back().count) {
        ++runs.back().count;
      } else {
        runs.push_back({r, a, b, 1});
        open = true;
      }
    }
  }
  return runs;
}

Runs runs_of(const Pool& src, const Pool& dst, int64_t pages) {
  return Runs({{dst.heads, src.head_stride, dst.head_stride},
               {dst.size, src.token_stride, dst.token_stride},
               {pages, src.page_stride, dst.page_stride}},
              dst.row_bytes);
}

// Rows take one call if the copy engine accepts both pitches.
bool is_pitched(const Runs& runs) {
  const Dim& d = runs.dims[0];
  return d.src_stride >= runs.bytes && d.dst_stride >= runs.bytes && d.src_stride <= INT_MAX &&
         d.dst_stride <= INT_MAX;
}

int64_t num_calls(const Runs& runs) {
  return is_pitched(runs) ? runs.dims[1].count * runs.dims[2].count : runs.count();
}

// Page-locked memory is registered in pieces that end at multiples of `piece` in the address space
// (hisparse/cache/allocate.py). A call must not span two registrations.
struct Copier {
  int64_t piece;
  cudaStream_t stream;

  int64_t bytes_left(const char* at) const {
    return piece - static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) %
                                        static_cast<uintptr_t>(piece));
  }

  // Rows of `bytes` from `at` on that lie in its piece.
  int64_t rows_left(const char* at, int64_t stride, int64_t bytes) const {
    const int64_t left = bytes_left(at);
    return left < bytes ? 0 : (left - bytes) / stride + 1;
  }

  void copy_row(const char* from, char* to, int64_t bytes) const {
    while (bytes > 0) {
      const int64_t part = std::min({bytes, bytes_left(from), bytes_left(to)});
      require_success(
          cudaMemcpyAsync(to, from, static_cast<size_t>(part), cudaMemcpyDefault, stream),
          "cudaMemcpyAsync");
      from += part, to += part, bytes -= part;
    }
  }

  void copy_rows(const char* from, char* to, const Dim& rows, int64_t bytes) const {
    for (int64_t i = 0; i < rows.count;) {
      const int64_t part =
          std::min({rows.count - i, rows_left(from, rows.src_stride, bytes),
                    rows_left(to, rows.dst_stride, bytes)});
      if (part == 0) {
        copy_row(from, to, bytes);
      } else {
        require_success(cudaMemcpy2DAsync(to, static_cast<size_t>(rows.dst_stride), from,
                                          static_cast<size_t>(rows.src_stride),
                                          static_cast<size_t>(bytes), static_cast<size_t>(part),
                                          cudaMemcpyDefault, stream),
                        "cudaMemcpy2DAsync");
      }
      const int64_t done = std::max<int64_t>(part, 1);
      from += done * rows.src_stride, to += done * rows.dst_stride, i += done;
    }
  }

  void copy(const Runs& runs, const char* src, char* dst) const {
    const Dim &rows = runs.dims[0], &middle = runs.dims[1], &outer = runs.dims[2];
    for (int64_t a = 0; a < outer.count; ++a) {
      for (int64_t b = 0; b < middle.count; ++b) {
        const char* from = src + a * outer.src_stride + b * middle.src_stride;
        char* to = dst + a * outer.dst_stride + b * middle.dst_stride;
        if (is_pitched(runs)) {
          copy_rows(from, to, rows, runs.bytes);
          continue;
        }
        for (int64_t c = 0; c < rows.count; ++c) {
          copy_row(from + c * rows.src_stride, to + c * rows.dst_stride, runs.bytes);
        }
      }
    }
  }
};

}  // namespace

// Page lists are on the CPU. Copies nothing and returns false if a call to the copy engine would
// move less than `min_call_bytes` on average. No call spans a multiple of `piece_bytes` on a side.
// `heads` of gather_pages comes before them.
bool copy_pages(Arguments& in) {
  const TensorView src_k = in.tensor();
  const std::optional<TensorView> src_v = in.optional();
  const TensorView src_pages = in.tensor(), dst_k = in.tensor();
  const std::optional<TensorView> dst_v = in.optional();
  const TensorView dst_pages = in.tensor();
  const auto heads = in.number<int64_t>(), min_call_bytes = in.number<int64_t>(),
             piece_bytes = in.number<int64_t>();
  const int64_t num_pools = src_v ? 2 : 1;
  const Pool src[2] = {Pool::of_pages(src_k, "src.k"),
                       Pool::of_pages(src_v.value_or(src_k), "src.v")};
  const Pool dst[2] = {Pool::of_pages(dst_k, "dst.k"),
                       Pool::of_pages(dst_v.value_or(dst_k), "dst.v")};
  const std::vector<PageRun> all = page_runs(src_pages, dst_pages, src[0], dst[0]);
  int64_t bytes = 0, calls = 0;
  for (const PageRun& run : all) {
    for (int64_t i = 0; i < num_pools; ++i) {
      const Runs runs = runs_of(src[i], dst[i], run.count);
      bytes += runs.bytes * runs.count();
      calls += num_calls(runs);
    }
  }
  if (bytes < min_call_bytes * calls) return false;
  const OnDevice on(src_k.device().device_type == kDLCUDA ? src_k : dst_k);
  const Copier copier{piece_bytes, on.stream()};
  for (int64_t layer = 0; layer < dst[0].layers; ++layer) {
    for (const PageRun& run : all) {
      for (int64_t i = 0; i < num_pools; ++i) {
        const bool whole = src[i].heads == dst[i].heads;
        const int64_t head = whole ? 0 : run.row % heads * src[i].heads / heads;
        copier.copy(runs_of(src[i], dst[i], run.count),
                    src[i].data + layer * src[i].layer_stride + run.src_page * src[i].page_stride +
                        head * src[i].head_stride,
                    dst[i].data + layer * dst[i].layer_stride + run.dst_page * dst[i].page_stride);
      }
    }
  }
  return true;
}

HISPARSE_EXPORT_KERNEL(copy_pages)

}  // namespace hisparse
