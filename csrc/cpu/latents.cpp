// encode_latents, decode_latents: latents as rows of e4m3 codes, float32 scales and bfloat16.
#include "latents.h"
#include "parallel.h"
#include "quantize.h"
#include "simd.h"
#include "tensors.h"

#include <atomic>
#include <cstring>

namespace hisparse {
namespace {

constexpr int64_t kTokensPerTask = 16;
constexpr double kElementsPerNs = 2.0;
// Largest number of bfloat16 that float16 has.
constexpr float kLargestRope = 65280.0f;

// Rounds to the nearest bfloat16, ties to even; NaN stays NaN.
HISPARSE_INLINE uint16_t to_bfloat16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

template <typename T>
void encode_row(const typename T::Raw* x, const LatentRow& row, bool is_half, uint8_t* out) {
  const float most = largest_encoded<ToE4M3>(is_half);
  for (int32_t first = 0, tile = 0; first < row.rank; first += row.tile, ++tile) {
    uint8_t exponent;
    encode<ToE4M3, T>(x + first, row.tile, most, out + first, &exponent);
    const uint32_t scale = static_cast<uint32_t>(exponent) << kFractionBits;
    std::memcpy(out + row.scales_at + 4 * tile, &scale, 4);
  }
  for (int32_t d = 0; d < row.rope; ++d) {
    const float number = T::one(x[row.rank + d]);
    const uint16_t rounded = to_bfloat16(is_half ? within(number, kLargestRope) : number);
    std::memcpy(out + row.rope_at + 2 * d, &rounded, 2);
  }
}

void encode_latents(Arguments& in) {
  const TensorView latents = in.tensor(), out = in.tensor();
  const auto rank = in.number<int64_t>(), tile = in.number<int64_t>(),
             scales_at = in.number<int64_t>(), rope_at = in.number<int64_t>();
  const int64_t count = latents.size(0), width = latents.size(1);
  if (count == 0) return;
  const LatentRow row{static_cast<int32_t>(rank), static_cast<int32_t>(tile),
                      static_cast<int32_t>(scales_at), static_cast<int32_t>(rope_at),
                      static_cast<int32_t>(width - rank)};
  const bool is_half = latents.dtype().code == kDLFloat && latents.dtype().bits == 16;
  const int64_t num_bytes = out.size(1);
  uint8_t* rows = data_of<uint8_t>(out, "out");
  std::memset(rows, 0, count * num_bytes);
  with_element_type(latents, "latents", [&](auto type) {
    using T = decltype(type);
    const auto tokens = rows_of<const typename T::Raw>(latents, "latents");
    const int64_t tasks = (count + kTokensPerTask - 1) / kTokensPerTask;
    parallel_for(tasks, num_threads(tasks, count * width / kElementsPerNs), [&](int64_t task) {
      const int64_t last = std::min(count, (task + 1) * kTokensPerTask);
      for (int64_t i = task * kTokensPerTask; i < last; ++i) {
        encode_row<T>(tokens[i], row, is_half, rows + i * num_bytes);
      }
    });
  });
}

template <typename Out>
bool decode_pages(const TensorView& pages, const TensorView& table, const LatentRow& row, Out* out) {
  const int64_t size = pages.size(1), width = row.rank + row.rope, count = table.size(0);
  const auto* from = static_cast<const uint8_t*>(pages.data_ptr());
  const int32_t* ids = data_of<const int32_t>(table, "table");
  std::atomic<bool> in_range{true};
  const double work = static_cast<double>(count) * size * width / kElementsPerNs;
  parallel_for(count, num_threads(count, work), [&](int64_t i) {
    if (ids[i] < 0) return;
    if (ids[i] >= pages.size(0)) {
      in_range = false;
      return;
    }
    const uint8_t* page = from + ids[i] * pages.stride(0);
    for (int64_t t = 0; t < size; ++t) {
      decode_row(page + t * pages.stride(1), row, out + (i * size + t) * width);
    }
  });
  return in_range;
}

void decode_latents(Arguments& in) {
  const TensorView pages = in.tensor(), table = in.tensor(), out = in.tensor();
  const auto rank = in.number<int64_t>(), tile = in.number<int64_t>(),
             scales_at = in.number<int64_t>(), rope_at = in.number<int64_t>();
  require_unit_stride(pages, "pages");
  const LatentRow row{static_cast<int32_t>(rank), static_cast<int32_t>(tile),
                      static_cast<int32_t>(scales_at), static_cast<int32_t>(rope_at),
                      static_cast<int32_t>(out.size(2) - rank)};
  const bool in_range =
      out.dtype().code == kDLBfloat
          ? decode_pages(pages, table, row, data_of<uint16_t>(out, "out"))
          : decode_pages(pages, table, row, data_of<float>(out, "out"));
  if (!in_range) {
    const auto* ids = static_cast<const int32_t*>(table.data_ptr());
    const int32_t* end = ids + table.size(0);
    const int32_t* found = std::find_if(ids, end, [&](int32_t id) { return id >= pages.size(0); });
    TVM_FFI_THROW(ValueError) << "table: got " << *found << " in entry " << found - ids
                              << ", expected at most " << pages.size(0) - 1;
  }
}

HISPARSE_EXPORT_KERNEL(encode_latents)
HISPARSE_EXPORT_KERNEL(decode_latents)

}  // namespace
}  // namespace hisparse
