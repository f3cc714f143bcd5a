// The bytes of a page's sketch; SketchLayout in hisparse/kernels/sketch/op.py describes them.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HISPARSE_ANYWHERE __host__ __device__
#else
#define HISPARSE_ANYWHERE
#endif

namespace hisparse {

constexpr int32_t kBlock = 8;              // channels whose base values share a scale
constexpr int32_t kScaleOffset = 107 << 3;
constexpr int32_t kMostScale = 247;        // the code of 1,920; see sketch/op.py
constexpr int32_t kCopyBytes = 16;         // GPUs copy multiples of it

struct SketchLayout {
  int32_t dim, page_size, num_channels;
  bool numbered;  // whether the detailed channels' numbers follow, for GPUs

  HISPARSE_ANYWHERE constexpr int32_t blocks() const { return (dim + kBlock - 1) / kBlock; }
  HISPARSE_ANYWHERE constexpr int32_t code_bytes() const { return (page_size + 3) / 4; }
  HISPARSE_ANYWHERE constexpr int32_t block_scales() const {
    return dim + num_channels * code_bytes();
  }
  HISPARSE_ANYWHERE constexpr int32_t mask() const { return block_scales() + blocks(); }
  HISPARSE_ANYWHERE constexpr int32_t channel_scales() const { return mask() + blocks(); }
  HISPARSE_ANYWHERE constexpr int32_t channel_width() const {
    return !numbered ? 0 : dim <= 256 ? 1 : 2;
  }
  HISPARSE_ANYWHERE constexpr int32_t channels() const {
    const int32_t end = channel_scales() + num_channels;
    return channel_width() == 2 ? (end + 1) / 2 * 2 : end;
  }
  HISPARSE_ANYWHERE constexpr int32_t num_bytes() const {
    const int32_t unit = numbered ? kCopyBytes : 4;
    return (channels() + num_channels * channel_width() + unit - 1) / unit * unit;
  }
};

// A layout that is known when a kernel is compiled, or only when it runs.
template <int32_t D, int32_t S, int32_t N, bool kNumbered = true>
struct KnownLayout {
  static constexpr int32_t kDim = D, kTokens = S, kChannels = N;

  constexpr KnownLayout() = default;
  HISPARSE_ANYWHERE constexpr explicit KnownLayout(const SketchLayout&) {}
  HISPARSE_ANYWHERE static constexpr SketchLayout get() { return {D, S, N, kNumbered}; }
};
struct AnyLayout {
  static constexpr int32_t kDim = 128, kTokens = 0, kChannels = 1 << 30;  // unknown

  SketchLayout layout;

  HISPARSE_ANYWHERE constexpr explicit AnyLayout(const SketchLayout& of) : layout(of) {}
  HISPARSE_ANYWHERE constexpr SketchLayout get() const { return layout; }
};

}  // namespace hisparse
