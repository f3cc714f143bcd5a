// Shared by all CPU operations: typed views of checked tensors, errors.
//
// The Python wrappers (hisparse/kernels) check shapes, dtypes and devices. The kernels check
// strides, and indices that would leave a tensor.
#pragma once

#include "arguments.h"
#include "parallel.h"
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace hisparse {

// Rows of contiguous elements: [n] or [n, width].
template <typename T>
struct Rows {
  T* data;
  int64_t stride;

  T* operator[](int64_t row) const { return data + row * stride; }
};

template <typename T>
Rows<T> rows_of(const TensorView& tensor, const char* name) {
  require_unit_stride(tensor, name);
  return {static_cast<T*>(tensor.data_ptr()), tensor.stride(tensor.ndim() - 2)};
}

// Throws if an entry from `first` to `last` - 1 of a row of a table of pages is outside [0, pages). A
// kernel calls it for each row once it met such an entry: until then the message costs nothing.
inline void require_pages(const char* name, const Rows<const int32_t>& table, int64_t row,
                          int64_t first, int64_t last, int64_t pages) {
  for (int64_t i = first; i < last; ++i) {
    const int32_t page = table[row][i];
    if (page < 0 || page >= pages) {
      TVM_FFI_THROW(ValueError) << name << ": got " << page << " in row " << row << ", entry " << i
                                << ", expected 0 to " << pages - 1;
    }
  }
}

// The same for a host page table [rows, width], of whose row r the first counts[r] entries are read.
inline void require_host_pages(const Rows<const int32_t>& table, const int32_t* counts,
                               int64_t rows, int64_t width, int64_t pages) {
  for (int64_t r = 0; r < rows; ++r) {
    require_pages("host_page_table", table, r, 0, std::min<int64_t>(counts[r], width), pages);
  }
}

// Calls `body` with the element type of a tensor of floats.
template <typename Body>
auto with_element_type(const TensorView& tensor, const char* name, Body&& body) {
  const DLDataType dtype = tensor.dtype();
  if (dtype.code == kDLBfloat) return body(BFloat16());
  if (dtype.code == kDLFloat8_e4m3fn) return body(Float8());
#ifdef HISPARSE_HAS_FLOAT16
  if (dtype.code == kDLFloat && dtype.bits == 16) return body(Float16());
#endif
  if (dtype.code != kDLFloat || dtype.bits != 32) {
    TVM_FFI_THROW(ValueError) << name << ": got " << static_cast<int>(dtype.bits)
                              << "-bit elements, expected float32, bfloat16, float16 or "
                              << "float8_e4m3fn";
  }
  return body(Float32());
}

// The same for pages, whose numbers may be integers with scales.
template <typename Body>
auto with_page_type(const TensorView& pages, const char* name, Body&& body) {
  const DLDataType dtype = pages.dtype();
  if (dtype.code == kDLInt && dtype.bits == 8) return body(Int8());
  return with_element_type(pages, name, body);
}

// The elements of a contiguous tensor of floats in float32: its own, or those of a copy.
class AsFloats {
 public:
  AsFloats(const TensorView& tensor, const char* name) {
    with_element_type(tensor, name, [&](auto type) {
      using T = decltype(type);
      const auto* own = data_of<const typename T::Raw>(tensor, name);
      if constexpr (std::is_same_v<T, Float32>) {
        data_ = own;
      } else {
        const int64_t count = tensor.numel();
        copy_.resize(count);
        for (int64_t i = 0; i < count; ++i) copy_[i] = T::one(own[i]);
        data_ = copy_.data();
      }
    });
  }

  const float* data() const { return data_; }

 private:
  std::vector<float> copy_;
  const float* data_;
};

}  // namespace hisparse
