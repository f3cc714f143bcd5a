// outline_score: q.k of every page, with one k for the page, straight from the outlines by host
// page. outline_bytes in hisparse/kernels/sketch/op.py describes their bytes.
#include "dots.h"
#include "parallel.h"
#include "simd.h"
#include "sketch.h"
#include "tensors.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

namespace hisparse {
namespace {

struct OutlineScoreParams {
  const float* query;              // [B, Hq, D]
  const uint8_t* outlines;         // [host pages, Hkv, bytes]
  Rows<const int32_t> host_pages;  // [B, P]
  const int32_t* num_pages;        // [B]
  float* scores;                   // [B, Hq, P]
  int64_t batch, width, num_host_pages;
  int32_t q_heads, kv_heads, dim, half, num_bytes;
};

constexpr int64_t kPagesPerItem = 64;
constexpr int64_t kPagesAhead = 8;

// The scales of kLanes channels, of which the first begins a block.
HISPARSE_INLINE Floats spread_scales(const uint8_t* codes) {
  if constexpr (kLanes <= kBlock) {
    return splat(scale_of(codes[0]));
  } else {
    Ints lanes;
    for (int i = 0; i < kLanes; ++i) lanes[i] = i < kBlock ? i : kLanes + i;
    return __builtin_shuffle(splat(scale_of(codes[0])), splat(scale_of(codes[1])), lanes);
  }
}

// What four bits stand for, before the scale.
HISPARSE_INLINE Floats values_of(Ints fours) {
  const Floats v = __builtin_convertvector(fours, Floats);
  return v * (bit_cast<Floats>(bit_cast<Ints>(v) & 0x7fffffff) * 1.4f + 8.4f);
}

HISPARSE_INLINE float value_of(int32_t fours) {
  return static_cast<float>(fours) * (static_cast<float>(std::abs(fours)) * 1.4f + 8.4f);
}

// Decodes an outline to [2 * half].
HISPARSE_NOINLINE void decode(const OutlineScoreParams& p, const uint8_t* outline, float* out) {
  const uint8_t* scales = outline + p.half;
  const int32_t half = p.half, last = p.num_bytes - half - 1;  // of the scales
  int32_t i = 0;
  // A vector of the high half must not read scales after the last one.
  const int32_t whole = p.dim % (2 * kBlock) == 0 ? half : 0;
  for (; i + kLanes <= whole; i += kLanes) {
    const Ints fours = load_signed_bytes(outline + i);
    store(out + i, values_of(fours << 28 >> 28) * spread_scales(scales + i / kBlock));
    store(out + half + i, values_of(fours >> 4) * spread_scales(scales + (half + i) / kBlock));
  }
  for (; i < half; ++i) {
    const int32_t low = static_cast<int8_t>(outline[i] << 4) >> 4;
    const int32_t high = static_cast<int8_t>(outline[i]) >> 4;
    out[i] = value_of(low) * scale_of(scales[std::min(i / kBlock, last)]);
    out[half + i] = value_of(high) * scale_of(scales[std::min((half + i) / kBlock, last)]);
  }
}

// Scores a run of pages; false if one of them has no outline.
bool score_run(const OutlineScoreParams& p, int64_t b, int64_t first) {
  const int64_t last = std::min(first + kPagesPerItem, p.width);
  const int64_t present = std::clamp<int64_t>(p.num_pages[b], first, last);
  const int32_t group = p.q_heads / p.kv_heads, padded = 2 * p.half;
  const int32_t* host_pages = p.host_pages[b];
  for (int64_t page = first; page < present; ++page) {
    if (host_pages[page] < 0 || host_pages[page] >= p.num_host_pages) return false;
  }
  const int64_t page_bytes = static_cast<int64_t>(p.kv_heads) * p.num_bytes;
  const auto outlines_of = [&](int64_t page) {
    return p.outlines + host_pages[std::min(page, present - 1)] * page_bytes;
  };
  thread_local std::vector<float> decoded, scores;
  decoded.resize(static_cast<size_t>(kVectors) * padded);
  // Rows of scores may be a power of two apart. Written page by page, they would compete for one
  // set of the cache.
  scores.resize(static_cast<size_t>(p.q_heads) * kPagesPerItem);
  const float* vectors[kVectors];
  for (int r = 0; r < kVectors; ++r) vectors[r] = decoded.data() + r * padded;
  for (int64_t page = first; page < present; page += kVectors) {
    const int64_t count = std::min<int64_t>(kVectors, present - page);
    for (int r = 0; r < kVectors; ++r) {
      const uint8_t* later = outlines_of(page + kPagesAhead + r);
      for (int64_t at = 0; at < page_bytes; at += 64) prefetch(later + at);
    }
    for (int32_t head = 0; head < p.kv_heads; ++head) {
      for (int r = 0; r < kVectors; ++r) {
        decode(p, outlines_of(page + r) + head * p.num_bytes, decoded.data() + r * padded);
      }
      for_blocks(group, [&](auto queries, int32_t g) {
        constexpr int G = decltype(queries)::value;
        const int32_t row = head * group + g;
        float found[kVectors * G];
        dots_of<Float32, G, kVectors>(p.query + (b * p.q_heads + row) * p.dim, vectors, 0, p.dim,
                                      found);
        float* out = scores.data() + row * kPagesPerItem + (page - first);
        for (int64_t r = 0; r < count; ++r) {
          for (int j = 0; j < G; ++j) out[j * kPagesPerItem + r] = found[r * G + j];
        }
      });
    }
  }
  for (int32_t h = 0; h < p.q_heads; ++h) {
    float* out = p.scores + (b * p.q_heads + h) * p.width + first;
    std::copy_n(scores.data() + h * kPagesPerItem, present - first, out);
  }
  return true;
}

void outline_score(Arguments& in) {
  const TensorView query = in.tensor(), outlines = in.tensor(), host_page_table = in.tensor(),
                   num_pages = in.tensor(), scores = in.tensor();
  OutlineScoreParams p;
  p.query = data_of<const float>(query, "query");
  p.outlines = data_of<const uint8_t>(outlines, "outlines");
  p.host_pages = rows_of<const int32_t>(host_page_table, "host_page_table");
  p.num_pages = data_of<const int32_t>(num_pages, "num_pages");
  p.scores = data_of<float>(scores, "scores");
  p.batch = query.size(0);
  p.width = scores.size(2);
  p.num_host_pages = outlines.size(0);
  p.q_heads = static_cast<int32_t>(query.size(1));
  p.kv_heads = static_cast<int32_t>(outlines.size(1));
  p.dim = static_cast<int32_t>(query.size(2));
  p.half = (p.dim + 2 * kBlock - 1) / (2 * kBlock) * kBlock;
  p.num_bytes = static_cast<int32_t>(outlines.size(2));
  const int64_t runs = (p.width + kPagesPerItem - 1) / kPagesPerItem;
  // Decoding a value takes about as long as multiplying it twice.
  const double work = static_cast<double>(p.batch * p.width) * (p.q_heads + 2 * p.kv_heads) * p.dim;
  std::atomic<bool> in_range{true};
  parallel_for(p.batch * runs, num_threads(p.batch * runs, work / 20), [&](int64_t item) {
    if (!score_run(p, item / runs, item % runs * kPagesPerItem)) in_range = false;
  });
  if (!in_range) {
    require_host_pages(p.host_pages, p.num_pages, p.batch, p.width, p.num_host_pages);
  }
}

HISPARSE_EXPORT_KERNEL(outline_score)

}  // namespace
}  // namespace hisparse
