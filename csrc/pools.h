// Pools of pages for the transfers: bytes, strides, and blocks as contiguous runs.
#pragma once

#include "hisparse/transfer.cuh"

#include "launch.h"

#include <initializer_list>
#include <unordered_set>

namespace hisparse {

// Host addresses that the device can reach, as CUDA reported. An address stays here after its
// memory is freed, so unpinned memory at the same address is not noticed.
inline std::unordered_set<void*>& known_pinned() {
  static thread_local std::unordered_set<void*> addresses;
  return addresses;
}

// Host memory is read and written in place by the device, so it has to be pinned.
inline void require_reachable(const TensorView& tensor, const char* name) {
  if (tensor.device().device_type == kDLCUDA || tensor.numel() == 0) return;
  if (known_pinned().count(tensor.data_ptr()) != 0) return;
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, tensor.data_ptr());
  if (error != cudaSuccess) cudaGetLastError();  // Else the next launch would report it.
  if (error != cudaSuccess || attributes.type == cudaMemoryTypeUnregistered) {
    TVM_FFI_THROW(ValueError) << name << ": got unpinned host memory, expected device memory or "
                              << "pinned host memory";
  }
  known_pinned().insert(tensor.data_ptr());
}

// A tensor [..., D] with its strides in bytes; dimensions that it lacks have size 1.
struct Pool {
  char* data;
  int64_t row_bytes;
  int64_t layers, pages, heads, size;
  int64_t layer_stride, page_stride, head_stride, token_stride;

  // [P, H, S, D] or [L, P, H, S, D].
  static Pool of_pages(const TensorView& t, const char* name) {
    Pool p = of_rows(t, name);
    const int layer = t.ndim() - 5;
    p.layers = layer < 0 ? 1 : t.size(0);
    p.layer_stride = layer < 0 ? 0 : stride_bytes(t, 0);
    p.pages = t.size(-4);
    p.page_stride = stride_bytes(t, -4);
    p.heads = t.size(-3);
    p.head_stride = stride_bytes(t, -3);
    p.size = t.size(-2);
    p.token_stride = stride_bytes(t, -2);
    return p;
  }

  // [T, H, D] or [L, T, H, D].
  static Pool of_tokens(const TensorView& t, const char* name) {
    Pool p = of_rows(t, name);
    const int layer = t.ndim() - 4;
    p.layers = layer < 0 ? 1 : t.size(0);
    p.layer_stride = layer < 0 ? 0 : stride_bytes(t, 0);
    p.pages = p.page_stride = 0;
    p.size = t.size(-3);
    p.token_stride = stride_bytes(t, -3);
    p.heads = t.size(-2);
    p.head_stride = stride_bytes(t, -2);
    return p;
  }

  // Addresses and strides, ORed: a unit's size has to divide all of them.
  uint64_t alignment_bits() const {
    return reinterpret_cast<uint64_t>(data) | static_cast<uint64_t>(row_bytes | layer_stride |
                                                                    page_stride | head_stride |
                                                                    token_stride);
  }

 private:
  static int64_t item_bytes(const TensorView& t) { return t.dtype().bits * t.dtype().lanes / 8; }

  // A dimension of size 1 may have any stride, which nothing uses: it must not narrow a unit.
  static int64_t stride_bytes(const TensorView& t, int dim) {
    return t.size(dim) == 1 ? 0 : t.stride(dim) * item_bytes(t);
  }

  static Pool of_rows(const TensorView& t, const char* name) {
    require_reachable(t, name);
    Pool p{};
    p.data = data_of<char>(t, name);
    p.row_bytes = t.size(-1) * item_bytes(t);
    return p;
  }
};

struct Dim {
  int64_t count, src_stride, dst_stride;  // bytes
};

// A block as contiguous runs in up to three dimensions, inner first; neighbours are merged.
struct Runs {
  int64_t bytes;
  Dim dims[3] = {{1, 0, 0}, {1, 0, 0}, {1, 0, 0}};

  Runs(std::initializer_list<Dim> all, int64_t row_bytes) : bytes(row_bytes) {
    Dim sorted[3];
    int count = 0, kept = 0;
    for (const Dim& dim : all) {
      if (dim.count != 1) sorted[count++] = dim;
    }
    std::sort(sorted, sorted + count,
              [](const Dim& a, const Dim& b) { return a.src_stride < b.src_stride; });
    for (int i = 0; i < count; ++i) {
      if (kept == 0 && sorted[i].src_stride == bytes && sorted[i].dst_stride == bytes) {
        bytes *= sorted[i].count;
      } else {
        dims[kept++] = sorted[i];
      }
    }
  }

  int64_t count() const { return dims[0].count * dims[1].count * dims[2].count; }
};

struct Names {
  const char *first, *second;
};

// Bytes that one load may move: a divisor of all addresses and strides of both sides.
inline int64_t unit_bytes(const Pool* a, const Names& a_names, const Pool* b, int64_t num_pools) {
  int64_t unit = 16;
  for (int64_t i = 0; i < num_pools; ++i) {
    const uint64_t bits = a[i].alignment_bits() | b[i].alignment_bits();
    while (bits % static_cast<uint64_t>(unit) != 0) unit /= 2;
    if (unit < 2) {
      TVM_FFI_THROW(ValueError) << (i == 0 ? a_names.first : a_names.second) << ": got rows of "
                                << a[i].row_bytes << " bytes whose addresses, strides or widths "
                                << "are odd, expected multiples of 8 (2 or 4 are slow)";
    }
  }
  return unit;
}

inline BlockShape shape_of(const Runs& runs, int64_t unit) {
  const int64_t run_units = runs.bytes / unit;
  return {static_cast<int32_t>(run_units * runs.count()),
          static_cast<int32_t>(std::max<int64_t>(run_units, 1)),
          static_cast<int32_t>(std::max<int64_t>(runs.dims[0].count, 1)),
          runs.dims[0].src_stride,
          runs.dims[1].src_stride,
          runs.dims[0].dst_stride,
          runs.dims[1].dst_stride};
}

}  // namespace hisparse
