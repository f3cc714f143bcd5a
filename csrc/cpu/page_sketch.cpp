// page_sketch: a base value for each channel of a page, and two bits a token where it varies most, or
// four bits a token everywhere.
#include "parallel.h"
#include "simd.h"
#include "sketch.h"
#include "tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

namespace hisparse {
namespace {

struct PageSketchParams {
  const char* keys;              // [P, S, Hkv, D]
  int64_t page, token, head;     // strides of keys in bytes
  Rows<uint8_t> sketches;        // [host pages, Hkv, bytes]
  const void* host_pages;        // [P] int32 or int64
  bool wide_pages;               // host_pages are int64
  int64_t num_pages, num_host_pages;
  int32_t heads;
  SketchLayout layout;

  int64_t host_page(int64_t i) const {
    return wide_pages ? static_cast<const int64_t*>(host_pages)[i]
                      : static_cast<const int32_t*>(host_pages)[i];
  }
};

// One thread's scratch for a page of one head. Rows are padded to whole vectors.
struct Workspace {
  int32_t width;
  std::vector<float> keys, high, low, base;
  std::vector<uint64_t> ranges;  // of channels, [D]
  std::vector<uint8_t> chosen;   // [D]
  std::vector<uint32_t> codes;   // of 16 tokens, [width]

  explicit Workspace(const SketchLayout& l)
      : width((l.dim + kLanes - 1) / kLanes * kLanes),
        keys(static_cast<size_t>(width) * l.page_size), high(width), low(width), base(width),
        ranges(l.dim), chosen(l.dim), codes(width) {}

  const float* token(int32_t t) const { return keys.data() + static_cast<size_t>(t) * width; }
};

// The code of the smallest scale that is not below `scale`.
HISPARSE_INLINE uint8_t scale_code(float scale) {
  const int32_t bits = bit_cast<int32_t>(scale);
  const int32_t code = ((bits + ((1 << 20) - 1)) >> 20) - kScaleOffset;
  return static_cast<uint8_t>(std::clamp(code, 0, kMostScale));
}

// Keys in float32, their range, and in `base` their mean, summed in the order of tokens.
template <typename K>
void read_keys(const PageSketchParams& p, const char* keys, Workspace& w) {
  const SketchLayout& l = p.layout;
  for (int32_t t = 0; t < l.page_size; ++t) {
    const auto* from = reinterpret_cast<const typename K::Raw*>(keys + t * p.token);
    float* to = w.keys.data() + static_cast<size_t>(t) * w.width;
    int32_t d = 0;
    for (; d + kLanes <= l.dim; d += kLanes) store(to + d, K::load(from + d));
    for (; d < l.dim; ++d) to[d] = K::one(from[d]);
  }
  const Floats divisor = splat(static_cast<float>(l.page_size));
  for (int32_t d = 0; d < w.width; d += kLanes) {
    Floats high = Float32::load(w.token(0) + d), low = high, total = high;
    for (int32_t t = 1; t < l.page_size; ++t) {
      const Floats x = Float32::load(w.token(t) + d);
      high = x > high ? x : high;
      low = x < low ? x : low;
      total += x;
    }
    store(w.high.data() + d, high);
    store(w.low.data() + d, low);
    store(w.base.data() + d, total / divisor);
  }
}

// The channels with the largest ranges, of equal ones the first; their base is in the middle.
void choose_channels(const SketchLayout& l, Workspace& w) {
  if (l.num_channels == 0) return;
  const auto key = [&](int32_t d) {
    // Floats that are not negative are ordered as their bits are.
    const uint32_t bits = bit_cast<uint32_t>(w.high[d] - w.low[d]);
    return static_cast<uint64_t>(bits) << 32 | static_cast<uint32_t>(~d);
  };
  for (int32_t d = 0; d < l.dim; ++d) w.ranges[d] = key(d);
  const auto last = w.ranges.begin() + l.num_channels - 1;
  std::nth_element(w.ranges.begin(), last, w.ranges.end(), std::greater<uint64_t>());
  for (int32_t d = 0; d < l.dim; ++d) {
    w.chosen[d] = key(d) >= *last;
    if (w.chosen[d]) w.base[d] = w.high[d] * 0.5f + w.low[d] * 0.5f;
  }
}

// Rounds the base values to 8 bits, with a scale for each block.
void write_base(const SketchLayout& l, Workspace& w, uint8_t* out) {
  // Adding this constant leaves no bits for a fraction, which rounds to the nearest, ties to even.
  const float magic = 12582912.0f;
  for (int32_t block = 0; block < l.blocks(); ++block) {
    const int32_t first = block * kBlock, last = std::min(first + kBlock, l.dim);
    float top = 0;
    for (int32_t d = first; d < last; ++d) top = std::max(top, std::abs(w.base[d]));
    const uint8_t code = scale_code(top / 127);
    const float scale = scale_of(code);
    out[l.block_scales() + block] = code;
    for (int32_t d = first; d < last; ++d) {
      const float whole = (std::clamp(w.base[d] / scale, -127.0f, 127.0f) + magic) - magic;
      out[d] = static_cast<uint8_t>(static_cast<int8_t>(whole));
      w.base[d] = whole * scale;
    }
  }
}

// Two bits a token for tokens [first, last) of every channel, 16 tokens at most.
void encode_tokens(const Workspace& w, const float* scales, int32_t first, int32_t last,
                   uint32_t* codes) {
  for (int32_t d = 0; d < w.width; d += kLanes) {
    const Floats base = Float32::load(w.base.data() + d), scale = Float32::load(scales + d);
    Ints packed = {};
    for (int32_t t = first; t < last; ++t) {
      const Floats x = Float32::load(w.token(t) + d) - base;
      // Comparisons give -1 where they hold.
      packed |= -((x >= -scale) + (x >= 0.0f) + (x >= scale)) << (t - first) * 2;
    }
    std::memcpy(codes + d, &packed, sizeof(packed));
  }
}

// Four bits for every token and channel, in the order in which sketch_score multiplies them.
void write_nibbles(const SketchLayout& l, Workspace& w, const float* scales, uint8_t* out) {
  auto* codes = reinterpret_cast<uint8_t*>(w.codes.data());  // of a token, [width]
  for (int32_t t = 0; t < l.page_size; ++t) {
    for (int32_t d = 0; d < l.dim; ++d) {
      const float code = (w.token(t)[d] - w.base[d]) / scales[d] + 8;
      codes[d] = static_cast<uint8_t>(std::max(std::min(15.0f, code), 0.0f));
    }
    std::fill(codes + l.dim, codes + l.blocks() * kBlock, uint8_t{0});
    const int32_t place = t % 4 * 4 + t % kWordTokens / 4;
    uint8_t* to = out + l.codes() + t / kWordTokens * l.code_bytes() + place * 4;
    for (int32_t block = 0; block < l.blocks(); ++block) {
      uint32_t low, high;
      std::memcpy(&low, codes + block * kBlock, 4);
      std::memcpy(&high, codes + block * kBlock + 4, 4);
      low |= high << 4;
      std::memcpy(to + block * 64, &low, 4);
    }
  }
}

void write_detail(const SketchLayout& l, Workspace& w, uint8_t* out) {
  std::vector<float>& scales = w.high;  // Reuses the maxima's memory.
  const float part = l.bits == 4 ? 0.125f : 0.5f;
  for (int32_t d = 0, place = 0; d < l.dim; ++d) {
    const uint8_t code = scale_code(std::max(w.high[d] - w.base[d], w.base[d] - w.low[d]) * part);
    scales[d] = scale_of(code);
    if (!w.chosen[d]) continue;
    if (l.bits == 2) out[l.channels() + d / 8] |= static_cast<uint8_t>(1 << d % 8);
    out[l.channel_scales() + place++] = code;
  }
  if (l.bits == 4) return write_nibbles(l, w, scales.data(), out);
  for (int32_t t = 0; t < l.page_size; t += 16) {
    const int32_t last = std::min(t + 16, l.page_size), bytes = (last - t + 3) / 4;
    encode_tokens(w, scales.data(), t, last, w.codes.data());
    uint8_t* packed = out + l.codes() + t / 4;
    for (int32_t d = 0; d < l.dim; ++d) {
      if (!w.chosen[d]) continue;
      std::copy_n(reinterpret_cast<const uint8_t*>(&w.codes[d]), bytes, packed);
      packed += l.code_bytes();
    }
  }
}

template <typename K>
void run(const PageSketchParams& p) {
  const SketchLayout& l = p.layout;
  const double work = static_cast<double>(p.num_pages) * p.heads * l.dim * (l.page_size + 16);
  parallel_for(p.num_pages, num_threads(p.num_pages, work / 4), [&](int64_t page) {
    const int64_t host_page = p.host_page(page);
    if (host_page < 0) return;
    Workspace w(l);
    for (int32_t head = 0; head < p.heads; ++head) {
      uint8_t* out = p.sketches[host_page] + static_cast<int64_t>(head) * l.num_bytes();
      std::fill_n(out, l.num_bytes(), uint8_t{0});
      read_keys<K>(p, p.keys + page * p.page + head * p.head, w);
      choose_channels(l, w);
      write_base(l, w, out);
      if (l.num_channels > 0) write_detail(l, w, out);
    }
  });
}

void page_sketch(Arguments& in) {
  const TensorView keys = in.tensor(), sketches = in.tensor(), host_pages = in.tensor();
  const auto num_channels = in.number<int64_t>(), numbered = in.number<int64_t>(),
             bits = in.number<int64_t>();
  require_unit_stride(keys, "keys");
  PageSketchParams p;
  const int64_t bytes = keys.dtype().bits / 8;
  p.keys = static_cast<const char*>(keys.data_ptr());
  p.page = keys.stride(0) * bytes;
  p.token = keys.stride(1) * bytes;
  p.head = keys.stride(2) * bytes;
  p.sketches = {static_cast<uint8_t*>(sketches.data_ptr()), sketches.stride(0)};
  p.host_pages = data_of<const void>(host_pages, "host_pages");
  p.wide_pages = host_pages.dtype().bits == 64;
  p.num_pages = keys.size(0);
  p.num_host_pages = sketches.size(0);
  p.heads = static_cast<int32_t>(keys.size(2));
  p.layout = {static_cast<int32_t>(keys.size(3)), static_cast<int32_t>(keys.size(1)),
              static_cast<int32_t>(num_channels), numbered != 0, static_cast<int32_t>(bits)};
  require_sketches(sketches, p.layout);
  for (int64_t i = 0; i < p.num_pages; ++i) {
    if (p.host_page(i) >= p.num_host_pages) {
      TVM_FFI_THROW(ValueError) << "host_pages: got " << p.host_page(i) << ", expected at most "
                                << p.num_host_pages - 1;
    }
  }
  with_element_type(keys, "keys", [&](auto type) { run<decltype(type)>(p); });
}

HISPARSE_EXPORT_KERNEL(page_sketch)

}  // namespace
}  // namespace hisparse
