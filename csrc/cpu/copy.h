// Strided copies of equal blocks, as few and as long as the two layouts allow.
#pragma once

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace hisparse {

struct Dim {
  int64_t count;
  int64_t src_stride;  // bytes
  int64_t dst_stride;  // bytes
};

// Blocks that are copied side by side, line by line: several streams keep more of a core's misses in
// flight than one does (measured: a third more bytes a second out of scattered pages).
constexpr int kAtOnce = 4;

// One copy. `ahead` is the source of a later copy. Its lines are prefetched here, because hardware
// prefetchers cannot predict where a scattered block begins.
struct Move {
  char* dst;
  const char* src;
  const char* ahead;
};

constexpr int64_t kLine = 64;

#ifdef __SSE2__
// Copies a line of the cache past the caches; the target is aligned to lines.
inline void stream_line(char* dst, const char* src) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i) {
    const auto half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src) + i);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst) + i, half);
  }
#else
  for (int i = 0; i < 4; ++i) {
    const auto quarter = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src) + i);
    _mm_stream_si128(reinterpret_cast<__m128i*>(dst) + i, quarter);
  }
#endif
}
#endif

// A block of bytes, repeated along up to three dimensions.
class BlockCopy {
 public:
  // `dims` in any order; neighbours in memory on both sides are merged. Three at most.
  BlockCopy(std::initializer_list<Dim> dims, int64_t item_bytes) : inner_bytes_(item_bytes) {
    // Sorted by insertion: GCC 12 warns that std::sort might leave so short an array.
    Dim sorted[3];
    int count = 0;
    for (const Dim& dim : dims) {
      if (dim.count == 1) continue;
      int place = count++;
      for (; place > 0 && dim.src_stride < sorted[place - 1].src_stride; --place) {
        sorted[place] = sorted[place - 1];
      }
      sorted[place] = dim;
    }
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

  // Copies `count` blocks at once, kAtOnce at most.
  void operator()(const Move* moves, int count) const {
    each_stretch([&](int64_t from, int64_t to) {
      for (int m = 0; m < count; ++m) {
        for (int64_t at = 0; at < inner_bytes_; at += kLine) {
          __builtin_prefetch(moves[m].ahead + from + at);
        }
        std::memcpy(moves[m].dst + to, moves[m].src + from, static_cast<size_t>(inner_bytes_));
      }
    });
  }

  // The same, past the caches where the blocks consist of whole lines. A plain store reads the line
  // that it replaces: streamed copies of cold pages take .7 of the time, and .94 together with
  // attention that reads them next.
  void stream(const Move* moves, int count) const {
#ifdef __SSE2__
    if (has_whole_lines(moves, count)) {
      each_stretch([&](int64_t from, int64_t to) {
        for (int64_t at = 0; at < inner_bytes_; at += kLine) {
          for (int m = 0; m < count; ++m) {
            __builtin_prefetch(moves[m].ahead + from + at);
            stream_line(moves[m].dst + to + at, moves[m].src + from + at);
          }
        }
      });
      // Other threads see these stores before any later one.
      _mm_sfence();
      return;
    }
#endif
    (*this)(moves, count);
  }

 private:
  // Calls `body` with the offsets of each stretch of `inner_bytes_`, in the source and the target.
  template <typename Body>
  void each_stretch(Body&& body) const {
    for (int64_t a = 0; a < outer_[2].count; ++a) {
      for (int64_t b = 0; b < outer_[1].count; ++b) {
        int64_t from = a * outer_[2].src_stride + b * outer_[1].src_stride;
        int64_t to = a * outer_[2].dst_stride + b * outer_[1].dst_stride;
        for (int64_t c = 0; c < outer_[0].count; ++c) {
          body(from, to);
          from += outer_[0].src_stride;
          to += outer_[0].dst_stride;
        }
      }
    }
  }

  bool has_whole_lines(const Move* moves, int count) const {
    uint64_t bits = static_cast<uint64_t>(inner_bytes_);
    for (const Dim& dim : outer_) bits |= static_cast<uint64_t>(dim.dst_stride);
    for (int m = 0; m < count; ++m) bits |= reinterpret_cast<uintptr_t>(moves[m].dst);
    return bits % kLine == 0;
  }

  Dim outer_[3] = {{1, 0, 0}, {1, 0, 0}, {1, 0, 0}};
  int num_outer_ = 0;
  int64_t inner_bytes_;
  int64_t bytes_ = 1;
};

}  // namespace hisparse
