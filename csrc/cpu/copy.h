// Strided copies of equal blocks, as few and as long as the two layouts allow.
#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace hisparse {

struct Dim {
  int64_t count;
  int64_t src_stride;  // bytes
  int64_t dst_stride;  // bytes
};

// A block of bytes, repeated along up to three dimensions.
class BlockCopy {
 public:
  // `dims` in any order; neighbours in memory on both sides are merged. Three at most.
  BlockCopy(std::initializer_list<Dim> dims, int64_t item_bytes) : inner_bytes_(item_bytes) {
    Dim sorted[3];
    int count = 0;
    for (const Dim& dim : dims) {
      if (dim.count != 1) sorted[count++] = dim;
    }
    std::sort(sorted, sorted + count,
              [](const Dim& a, const Dim& b) { return a.src_stride < b.src_stride; });
    for (int i = 0; i < count; ++i) {
      const Dim& dim = sorted[i];
      bytes_ *= dim.count;
      if (num_outer_ == 0 && dim.src_stride == inner_bytes_ && dim.dst_stride == inner_bytes_) {
        inner_bytes_ *= dim.count;
      } else {
        outer_[num_outer_++] = dim;
      }
    }
    bytes_ *= item_bytes;
  }

  int64_t bytes() const { return bytes_; }

  // `ahead` is the source of a copy to come: its lines are fetched meanwhile, for no hardware
  // prefetcher foresees where a scattered block begins.
  void operator()(char* dst, const char* src, const char* ahead) const {
    for (int64_t a = 0; a < outer_[2].count; ++a) {
      for (int64_t b = 0; b < outer_[1].count; ++b) {
        const int64_t skip = a * outer_[2].src_stride + b * outer_[1].src_stride;
        char* to = dst + a * outer_[2].dst_stride + b * outer_[1].dst_stride;
        for (int64_t c = 0; c < outer_[0].count; ++c) {
          const int64_t at = skip + c * outer_[0].src_stride;
          copy_bytes(to, src + at, ahead + at, inner_bytes_);
          to += outer_[0].dst_stride;
        }
      }
    }
  }

 private:
  static void copy_bytes(char* dst, const char* src, const char* ahead, int64_t count) {
#ifdef __AVX512F__
    if (count % 64 == 0) {
      for (int64_t at = 0; at < count; at += 64) {
        __builtin_prefetch(ahead + at);
        _mm512_storeu_si512(dst + at, _mm512_loadu_si512(src + at));
      }
      return;
    }
#endif
    for (int64_t at = 0; at < count; at += 64) __builtin_prefetch(ahead + at);
    std::memcpy(dst, src, static_cast<size_t>(count));
  }

  Dim outer_[3] = {{1, 0, 0}, {1, 0, 0}, {1, 0, 0}};
  int num_outer_ = 0;
  int64_t inner_bytes_;
  int64_t bytes_ = 1;
};

}  // namespace hisparse
