// Numbers of a page's sketch.
#pragma once

#include "simd.h"
#include "sketch_layout.h"
#include "tensors.h"

#include <cstdint>

namespace hisparse {

HISPARSE_INLINE float scale_of(uint8_t code) {
  return bit_cast<float>((static_cast<uint32_t>(code) + kScaleOffset) << 20);
}

// A page's sketches, of all heads, lie side by side; they have a mask.
inline void require_sketches(const TensorView& sketches, const SketchLayout& layout) {
  if (layout.numbered) {
    TVM_FFI_THROW(ValueError) << "layout: got sketches with the numbers of their channels, which "
                              << "GPUs read, expected sketches without";
  }
  if (sketches.stride(2) != 1 || sketches.stride(1) != sketches.size(2)) {
    TVM_FFI_THROW(ValueError) << "sketches: got gaps between its rows, expected none";
  }
}

}  // namespace hisparse
