// Pools of pages: [P, H, S, D], or [L, P, H, S, D] for all layers at once, with any strides.
#pragma once

#include "copy.h"
#include "tensors.h"

namespace hisparse {

struct Pool {
  char* data;
  int64_t item_bytes;
  int64_t layers, pages, heads, size, width;
  int64_t layer_stride, page_stride, head_stride, token_stride, item_stride;  // bytes

  explicit Pool(const TensorView& t)
      : data(static_cast<char*>(t.data_ptr())),
        item_bytes(t.dtype().bits * t.dtype().lanes / 8),
        layers(t.ndim() == 5 ? t.size(0) : 1),
        pages(t.size(-4)),
        heads(t.size(-3)),
        size(t.size(-2)),
        width(t.size(-1)),
        layer_stride(t.ndim() == 5 ? t.stride(0) * item_bytes : 0),
        page_stride(t.stride(-4) * item_bytes),
        head_stride(t.stride(-3) * item_bytes),
        token_stride(t.stride(-2) * item_bytes),
        item_stride(t.stride(-1) * item_bytes) {}
};

// Copies a page of as many heads as `dst` has.
inline BlockCopy page_copy(const Pool& src, const Pool& dst) {
  return BlockCopy({{dst.heads, src.head_stride, dst.head_stride},
                    {src.size, src.token_stride, dst.token_stride},
                    {src.width, src.item_stride, dst.item_stride}},
                   src.item_bytes);
}

}  // namespace hisparse
