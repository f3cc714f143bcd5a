// Keys in the host pool, for kernels that score pages by their keys.
#pragma once

#include "tensors.h"

namespace hisparse {

struct HostKeys {
  const char* data;  // [pages, heads, page_size, dim]; strides in elements
  int64_t page_stride, head_stride, token_stride;
  int64_t num_pages;
  int32_t heads, page_size, dim;
};

inline HostKeys host_keys_of(TensorView keys) {
  HostKeys found;
  found.data = data_of<const char>(keys, "keys");
  found.page_stride = keys.stride(0);
  found.head_stride = keys.stride(1);
  found.token_stride = keys.stride(2);
  found.num_pages = keys.size(0);
  found.heads = static_cast<int32_t>(keys.size(1));
  found.page_size = static_cast<int32_t>(keys.size(2));
  found.dim = static_cast<int32_t>(keys.size(3));
  return found;
}

// Reports a page outside the pool.
inline void check_in_pool(bool in_pool, const HostKeys& keys) {
  if (!in_pool) {
    TVM_FFI_THROW(ValueError) << "host_page_table: a page is outside [0, " << keys.num_pages
                              << "), the pages of the keys";
  }
}

}  // namespace hisparse
