// Strided copies of equal blocks, as few and as long as the two layouts allow.
#pragma once

#ifdef __AVX512F__
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
    for (int64_t a = 0; a < outer_[2].count; ++a) {
      for (int64_t b = 0; b < outer_[1].count; ++b) {
        int64_t from = a * outer_[2].src_stride + b * outer_[1].src_stride;
        int64_t to = a * outer_[2].dst_stride + b * outer_[1].dst_stride;
        for (int64_t c = 0; c < outer_[0].count; ++c) {
          copy_bytes(moves, count, from, to, inner_bytes_);
          from += outer_[0].src_stride;
          to += outer_[0].dst_stride;
        }
      }
    }
  }

 private:
  static void copy_bytes(const Move* moves, int count, int64_t from, int64_t to, int64_t bytes) {
#ifdef __AVX512F__
    if (bytes % 64 == 0 && count == kAtOnce) {
      for (int64_t at = 0; at < bytes; at += 64) {
        for (int m = 0; m < kAtOnce; ++m) {
          __builtin_prefetch(moves[m].ahead + from + at);
          _mm512_storeu_si512(moves[m].dst + to + at,
                              _mm512_loadu_si512(moves[m].src + from + at));
        }
      }
      return;
    }
#endif
    for (int m = 0; m < count; ++m) {
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(moves[m].ahead + from + at);
      std::memcpy(moves[m].dst + to, moves[m].src + from, static_cast<size_t>(bytes));
    }
  }

  Dim outer_[3] = {{1, 0, 0}, {1, 0, 0}, {1, 0, 0}};
  int num_outer_ = 0;
  int64_t inner_bytes_;
  int64_t bytes_ = 1;
};

}  // namespace hisparse
