// The products of chunk_attention in bfloat16, by Intel's matrix registers (AMX), where compiler,
// processor and Linux have them.
//
// Queries and keys are bfloat16 already, so logits are as exact as in float32. Weights are rounded
// to bfloat16, as GPUs' FlashAttention does; their sum is not.
#pragma once

#include "chunk.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && \
    defined(__AVX512BW__) && defined(__linux__)
#define HISPARSE_CHUNK_AMX

#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

namespace hisparse {

// Whether Linux lets this process use the matrix registers.
inline bool has_matrices() {
  static const bool allowed = [] {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return allowed;
}

// Pairs of a word: of channels in a key, of keys in a column of values.
//   keys     [strips of 16 keys, channels / 2, 16, 2]
//   values   [strips of 16 columns, kTile / 2, 16, 2]
//   queries  [kBlock, channels], channels padded to whole words of a register
struct MatrixProducts {
  using Number = uint16_t;
  using Query = uint16_t;
  static constexpr int32_t kPanel = 32;
  static constexpr int32_t kSide = 16;          // rows of a register, and columns of its sums
  static constexpr int32_t kStrip = 2 * kSide;  // also the numbers in a row
  static_assert(kTile % kStrip == 0 && kBlock % kPanel == 0);

  // Sets this thread's registers up: 16 rows of 64 bytes each.
  struct Session {
    Session() {
      struct alignas(64) {
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
      } config = {};
      config.palette = 1;
      std::fill_n(config.bytes, 8, uint16_t{64});
      std::fill_n(config.rows, 8, uint8_t{kSide});
      // GCC's _tile_loadconfig names eight of these bytes as read.
      asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  static int64_t columns(int64_t width) { return (width + kStrip - 1) / kStrip * kStrip; }
  static int64_t key_numbers(const ChunkParams& p) { return kTile * columns(p.keys.width); }
  static int64_t query_numbers(const ChunkParams& p) { return kBlock * columns(p.keys.width); }

  // Copies a tile of keys and values; keys beyond the last and columns beyond the width are 0.
  static void pack(const ChunkParams& p, int64_t head, int64_t tile, uint16_t* keys,
                   uint16_t* values) {
    const int64_t first = tile * kTile, count = std::min<int64_t>(kTile, p.num_keys - first);
    const int64_t channels = columns(p.keys.width);
    std::fill_n(keys, key_numbers(p), uint16_t{0});
    std::fill_n(values, kTile * columns(p.values.width), uint16_t{0});
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t* key = p.keys.at<BFloat16>(first + i, head);
      uint16_t* to = keys + i / kSide * kSide * channels + i % kSide * 2;
      for (int64_t d = 0; d + 1 < p.keys.width; d += 2) std::memcpy(to + d * kSide, key + d, 4);
      if (p.keys.width % 2) to[(p.keys.width - 1) * kSide] = key[p.keys.width - 1];
      const uint16_t* value = p.values.at<BFloat16>(first + i, head);
      to = values + i / 2 * 2 * kSide + i % 2;
      for (int64_t d = 0; d < p.values.width; ++d) {
        to[d / kSide * kSide * kTile + d % kSide * 2] = value[d];
      }
    }
  }

  // Copies row i of a block's queries.
  static void pack_query(const ChunkParams& p, const uint16_t* query, int64_t i,
                         uint16_t* queries) {
    std::copy_n(query, p.keys.width, queries + i * columns(p.keys.width));
  }

  // logits [kPanel, kTile], in powers of 2, of a panel's queries and `count` keys; raises `tops`.
  static void score(const ChunkParams& p, const uint16_t* queries, const uint16_t* keys,
                    int64_t count, float* logits, Floats* tops) {
    const int64_t channels = columns(p.keys.width), bytes = 2 * channels;
    finish_stores();
    for (int64_t t = 0; t < count; t += kStrip, keys += kStrip * channels) {
      zero_sums();
      for (int64_t d = 0; d < channels; d += kStrip) {
        multiply(queries + d, bytes, keys + d * kSide, keys + kSide * channels + d * kSide);
      }
      store_sums(logits + t, kTile);
    }
    const Floats scale = splat(p.scale * kLog2E);
    for (int r = 0; r < kPanel; ++r, logits += kTile) {
      for (int64_t t = 0; t < count; t += kLanes) {
        const Floats scaled = Float32::load(logits + t) * scale;
        store(logits + t, scaled);
        tops[r] = maximum(tops[r], scaled);
      }
    }
  }

  // out [kPanel, columns] = out * factors + weights . values [count, columns]
  static void add(const ChunkParams& p, const float* weights, const uint16_t* values, int64_t count,
                  const float* factors, float* out) {
    const int64_t width = columns(p.values.width), whole = columns(count);
    alignas(64) uint16_t rounded[kPanel * kTile];
    for (int r = 0; r < kPanel; ++r) {
      for (int64_t t = 0; t < whole; t += kStrip) {
        const float* from = weights + r * kTile + t;
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + kSide),
                                                  _mm512_loadu_ps(from));
        std::memcpy(rounded + r * kTile + t, &both, sizeof(both));
      }
      if (factors[r] == 1) continue;
      for (int64_t d = 0; d < width; d += kLanes) {
        store(out + r * width + d, Float32::load(out + r * width + d) * factors[r]);
      }
    }
    finish_stores();
    for (int64_t d = 0; d < width; d += kStrip, values += kStrip * kTile) {
      load_sums(out + d, width);
      for (int64_t t = 0; t < whole; t += kStrip) {
        multiply(rounded + t, 2 * kTile, values + t * kSide, values + kSide * kTile + t * kSide);
      }
      store_sums(out + d, width);
    }
  }

 private:
  // GCC's _tile_loadd names no memory that it reads, so stores could come after it.
  static HISPARSE_INLINE void finish_stores() { asm volatile("" ::: "memory"); }

  // Registers 0 to 3 hold the sums of 32 rows and 32 columns.
  static HISPARSE_INLINE void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  static HISPARSE_INLINE void load_sums(const float* from, int64_t stride) {
    _tile_loadd(0, from, 4 * stride);
    _tile_loadd(1, from + kSide, 4 * stride);
    _tile_loadd(2, from + kSide * stride, 4 * stride);
    _tile_loadd(3, from + kSide * stride + kSide, 4 * stride);
  }

  static HISPARSE_INLINE void store_sums(float* to, int64_t stride) {
    _tile_stored(0, to, 4 * stride);
    _tile_stored(1, to + kSide, 4 * stride);
    _tile_stored(2, to + kSide * stride, 4 * stride);
    _tile_stored(3, to + kSide * stride + kSide, 4 * stride);
  }

  // Adds rows [32, 32], `bytes` apart, times two strips of 16 columns, [32 / 2, 16, 2] each.
  static HISPARSE_INLINE void multiply(const uint16_t* rows, int64_t bytes, const uint16_t* left,
                                       const uint16_t* right) {
    _tile_loadd(4, rows, bytes);
    _tile_loadd(6, left, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, rows + kSide * bytes / 2, bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
};

}  // namespace hisparse

#endif
