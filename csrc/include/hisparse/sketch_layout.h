// The bytes of a page's sketch; hisparse/kernels/sketch/layout.py describes them.
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
constexpr int32_t kMostScale = 247;        // the code of 1,920; see sketch/layout.py
constexpr int32_t kCopyBytes = 16;         // GPUs copy multiples of it
constexpr int32_t kEight = 8;              // detailed channels of a matrix that GPUs multiply
constexpr int32_t kWordTokens = 16;        // tokens of one

struct SketchLayout {
  int32_t dim, page_size, num_channels;
  bool numbered;  // whether GPUs read it; else CPUs do
  int32_t bits = 2;  // of a code; 4: of all channels, on CPUs

  HISPARSE_ANYWHERE static constexpr int32_t round_up(int32_t n, int32_t unit) {
    return (n + unit - 1) / unit * unit;
  }
  HISPARSE_ANYWHERE constexpr int32_t blocks() const { return (dim + kBlock - 1) / kBlock; }
  // Detailed channels of whole matrices, and rows of tokens, of a numbered sketch.
  HISPARSE_ANYWHERE constexpr int32_t slots() const { return round_up(num_channels, kEight); }
  HISPARSE_ANYWHERE constexpr int32_t words() const {
    return (page_size + kWordTokens - 1) / kWordTokens;
  }
  // Of the codes: of kWordTokens tokens, if numbered or of four bits, else of one channel.
  HISPARSE_ANYWHERE constexpr int32_t code_bytes() const {
    if (bits == 4) return 64 * blocks();
    return numbered ? slots() * (kWordTokens / 4) : (page_size + 3) / 4;
  }
  // Of a numbered sketch: the first slot whose codes are bytes of a lane, not words.
  HISPARSE_ANYWHERE constexpr int32_t first_byte() const { return slots() / 32 * 32; }

  HISPARSE_ANYWHERE constexpr int32_t codes() const {
    if (bits == 4) return 2 * dim + blocks();
    return numbered ? round_up(dim, kCopyBytes) : dim;
  }
  HISPARSE_ANYWHERE constexpr int32_t channel_scales() const {
    if (bits == 4) return dim;
    return codes() + (numbered ? words() : num_channels) * code_bytes();
  }
  HISPARSE_ANYWHERE constexpr int32_t channels() const {  // or the mask
    const int32_t end = channel_scales() + num_channels;
    return numbered ? round_up(end, 4) : end;
  }
  HISPARSE_ANYWHERE constexpr int32_t channel_width() const {
    return !numbered ? 0 : dim <= 256 ? 1 : 2;
  }
  HISPARSE_ANYWHERE constexpr int32_t block_scales() const {
    if (bits == 4) return 2 * dim;
    return channels() + (numbered ? num_channels * channel_width() : blocks());
  }
  HISPARSE_ANYWHERE constexpr int32_t num_bytes() const {
    if (bits == 4) return round_up(codes() + words() * code_bytes(), 4);
    const int32_t end = block_scales() + blocks();
    if (!numbered) return round_up(end, 4);
    // Numbers of whole slots can be read.
    const int32_t read = channels() + slots() * channel_width();
    return round_up(end > read ? end : read, kCopyBytes);
  }

  constexpr bool operator==(const SketchLayout& other) const {
    return dim == other.dim && page_size == other.page_size &&
           num_channels == other.num_channels && numbered == other.numbered && bits == other.bits;
  }

  // The code of a token in a detailed channel of a sketch.
  HISPARSE_ANYWHERE constexpr uint32_t code_of(const uint8_t* sketch, int32_t slot,
                                               int32_t token) const {
    const uint8_t* at = sketch + codes();
    if (bits == 4) {
      const int32_t place = token % 4 * 4 + token % kWordTokens / 4;
      at += token / kWordTokens * code_bytes() + slot / kBlock * 64 + place * 4 + slot % 4;
      return *at >> slot % kBlock / 4 * 4 & 15u;
    }
    if (!numbered) return at[slot * code_bytes() + token / 4] >> token % 4 * 2 & 3u;
    const bool word = slot < first_byte();
    const int32_t size = word ? 4 : 1;  // bytes of a lane
    const int32_t lane = token % 8 * 4 + (word ? slot % 32 / 8 : slot % 8 / 2);
    const int32_t bit = token % kWordTokens / 8 * 2 + slot % 2 * 4 * size +
                        (word ? slot % 8 / 2 * 4 : 0);
    at += token / kWordTokens * code_bytes() + slot / (8 * size) * 32 * size + lane * size;
    return at[bit / 8] >> bit % 8 & 3u;
  }
};

// A layout that is known when a kernel is compiled, or only when it runs.
template <int32_t D, int32_t S, int32_t N, bool kNumbered = true, int32_t B = 2>
struct KnownLayout {
  static constexpr int32_t kDim = D, kTokens = S, kChannels = N, kBits = B;

  constexpr KnownLayout() = default;
  HISPARSE_ANYWHERE constexpr explicit KnownLayout(const SketchLayout&) {}
  HISPARSE_ANYWHERE static constexpr SketchLayout get() { return {D, S, N, kNumbered, B}; }
};
template <bool kNumbered = true, int32_t B = 2>
struct AnyLayout {
  static constexpr int32_t kDim = 128, kTokens = 0, kChannels = 1 << 30;  // unknown
  static constexpr int32_t kBits = B;

  SketchLayout layout;

  HISPARSE_ANYWHERE constexpr explicit AnyLayout(const SketchLayout& of) : layout(of) {}
  HISPARSE_ANYWHERE constexpr SketchLayout get() const {
    return {layout.dim, layout.page_size, layout.num_channels, kNumbered, B};
  }
};

}  // namespace hisparse
