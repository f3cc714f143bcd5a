// The bytes of a page's sketch; hisparse/kernels/sketch_layout.py describes them.
#pragma once

#include "simd.h"
#include "tensors.h"

#include <cstdint>

namespace hisparse {

constexpr int32_t kBlock = 8;              // channels whose base values share a scale
constexpr int32_t kScaleOffset = 107 << 3;

struct SketchLayout {
  int32_t dim, page_size, num_channels;

  constexpr int32_t blocks() const { return (dim + kBlock - 1) / kBlock; }
  constexpr int32_t code_bytes() const { return (page_size + 3) / 4; }
  constexpr int32_t block_scales() const { return dim + num_channels * code_bytes(); }
  constexpr int32_t mask() const { return block_scales() + blocks(); }
  constexpr int32_t channel_scales() const { return mask() + blocks(); }
  constexpr int32_t num_bytes() const { return (channel_scales() + num_channels + 3) / 4 * 4; }
};

HISPARSE_INLINE float scale_of(uint8_t code) {
  return bit_cast<float>((static_cast<uint32_t>(code) + kScaleOffset) << 20);
}

// A page's sketches, of all heads, lie side by side.
inline void require_sketches(const TensorView& sketches) {
  if (sketches.stride(2) != 1 || sketches.stride(1) != sketches.size(2)) {
    TVM_FFI_THROW(ValueError) << "sketches: got gaps between its rows, expected none";
  }
}

}  // namespace hisparse
