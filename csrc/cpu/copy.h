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

  // `streaming`: past the caches, for more bytes than they hold.
  void operator()(char* dst, const char* src, bool streaming) const {
    for (int64_t a = 0; a < outer_[2].count; ++a) {
      for (int64_t b = 0; b < outer_[1].count; ++b) {
        const char* from = src + a * outer_[2].src_stride + b * outer_[1].src_stride;
        char* to = dst + a * outer_[2].dst_stride + b * outer_[1].dst_stride;
        for (int64_t c = 0; c < outer_[0].count; ++c) {
          copy_bytes(to, from, inner_bytes_, streaming);
          from += outer_[0].src_stride;
          to += outer_[0].dst_stride;
        }
      }
    }
  }

  // Hides the latency of the next block's first lines, which no hardware prefetcher foresees.
  void prefetch(const char* src) const {
    const int64_t ahead = std::min<int64_t>(inner_bytes_, kPrefetchBytes);
    for (int64_t at = 0; at < ahead; at += 64) __builtin_prefetch(src + at);
  }

 private:
  static constexpr int64_t kPrefetchBytes = 1024;

  static void copy_bytes(char* dst, const char* src, int64_t count, bool streaming) {
#ifdef __AVX512F__
    if (count % 64 == 0) {
      if (streaming && reinterpret_cast<uintptr_t>(dst) % 64 == 0) {
        for (int64_t at = 0; at < count; at += 64) {
          _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), _mm512_loadu_si512(src + at));
        }
      } else {
        for (int64_t at = 0; at < count; at += 64) {
          _mm512_storeu_si512(dst + at, _mm512_loadu_si512(src + at));
        }
      }
      return;
    }
#else
    (void)streaming;
#endif
    std::memcpy(dst, src, static_cast<size_t>(count));
  }

  Dim outer_[3] = {{1, 0, 0}, {1, 0, 0}, {1, 0, 0}};
  int num_outer_ = 0;
  int64_t inner_bytes_;
  int64_t bytes_ = 1;
};

}  // namespace hisparse
