// page_summary: maxima and minima of the keys of each page, channel by channel.
#include "parallel.h"
#include "simd.h"
#include "tensors.h"

#include <algorithm>
#include <type_traits>

namespace hisparse {
namespace {

struct PageSummaryParams {
  const char* keys;               // [P, S, Hkv, D]
  int64_t page, token, head;      // strides of keys in bytes
  char* summaries;                // [host pages, Hkv, 2D]: maxima, then minima
  const void* host_pages;         // [P] int32 or int64
  bool wide_pages;                // host_pages are int64
  int64_t num_pages, num_host_pages;
  int32_t page_size, heads, dim;

  int64_t host_page(int64_t i) const {
    return wide_pages ? static_cast<const int64_t*>(host_pages)[i]
                      : static_cast<const int32_t*>(host_pages)[i];
  }
};

// Rounds outward: the stored value is never below x if `up`, else never above it.
template <typename T>
typename T::Raw round_outward(float x, bool up) {
  if constexpr (std::is_same_v<T, Float32>) {
    return x;
  } else {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const bool away = (bits & 0xffffu) != 0 && (up ? x > 0 : x < 0);
    return static_cast<uint16_t>((bits >> 16) + away);
  }
}

template <typename K, typename T>
void summarize(const PageSummaryParams& p, int64_t page, int32_t head, typename T::Raw* out) {
  const char* keys = p.keys + page * p.page + head * p.head;
  const auto key = [&](int32_t t, int32_t d) {
    return reinterpret_cast<const typename K::Raw*>(keys + t * p.token) + d;
  };
  int32_t d = 0;
  for (; d + kLanes <= p.dim; d += kLanes) {
    Floats high = K::load(key(0, d)), low = high;
    for (int32_t t = 1; t < p.page_size; ++t) {
      const Floats x = K::load(key(t, d));
      high = maximum(high, x);
      low = -maximum(-low, -x);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      out[d + lane] = round_outward<T>(high[lane], true);
      out[p.dim + d + lane] = round_outward<T>(low[lane], false);
    }
  }
  for (; d < p.dim; ++d) {
    float high = K::one(*key(0, d)), low = high;
    for (int32_t t = 1; t < p.page_size; ++t) {
      high = std::max(high, K::one(*key(t, d)));
      low = std::min(low, K::one(*key(t, d)));
    }
    out[d] = round_outward<T>(high, true);
    out[p.dim + d] = round_outward<T>(low, false);
  }
}

template <typename K, typename T>
void run(const PageSummaryParams& p) {
  const double work = static_cast<double>(p.num_pages) * p.page_size * p.heads * p.dim;
  parallel_for(p.num_pages, num_threads(p.num_pages, work / 16), [&](int64_t page) {
    const int64_t host_page = p.host_page(page);
    if (host_page < 0) return;
    typename T::Raw* out =
        reinterpret_cast<typename T::Raw*>(p.summaries) + host_page * p.heads * 2 * p.dim;
    for (int32_t head = 0; head < p.heads; ++head) {
      summarize<K, T>(p, page, head, out + head * 2 * p.dim);
    }
  });
}

void page_summary(TensorView keys, TensorView summaries, TensorView host_pages) {
  require_unit_stride(keys, "keys");
  PageSummaryParams p;
  const int64_t bytes = keys.dtype().bits / 8;
  p.keys = static_cast<const char*>(keys.data_ptr());
  p.page = keys.stride(0) * bytes;
  p.token = keys.stride(1) * bytes;
  p.head = keys.stride(2) * bytes;
  p.summaries = vector_of<char>(summaries, "summaries");
  p.host_pages = vector_of<const void>(host_pages, "host_pages");
  p.wide_pages = host_pages.dtype().bits == 64;
  p.num_pages = keys.size(0);
  p.num_host_pages = summaries.size(0);
  p.page_size = static_cast<int32_t>(keys.size(1));
  p.heads = static_cast<int32_t>(keys.size(2));
  p.dim = static_cast<int32_t>(keys.size(3));
  if (!summaries.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << "summaries: got gaps between its rows, expected none";
  }
  for (int64_t i = 0; i < p.num_pages; ++i) {
    if (p.host_page(i) >= p.num_host_pages) {
      TVM_FFI_THROW(ValueError) << "host_pages: got " << p.host_page(i) << ", expected at most "
                                << p.num_host_pages - 1;
    }
  }
  const bool narrow = summaries.dtype().code == kDLBfloat;
  with_element_type(keys, "keys", [&](auto type) {
    using K = decltype(type);
    narrow ? run<K, BFloat16>(p) : run<K, Float32>(p);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(page_summary, page_summary);

}  // namespace
}  // namespace hisparse
