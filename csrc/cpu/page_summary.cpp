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

template <typename T, bool up>
HISPARSE_INLINE void store_outward(typename T::Raw* p, Floats x) {
  if constexpr (std::is_same_v<T, Float32>) {
    store(p, x);
  } else {
    const Words bits = bit_cast<Words>(x);
    // True is -1.
    const Words away = bit_cast<Words>(((bits & 0xffffu) != 0) & (up ? x > 0 : x < 0));
    store_halves(p, (bits >> 16) - away);
  }
}

// Keys of one head in a page.
template <typename K>
struct HeadKeys {
  const char* data;
  int64_t token;  // stride in bytes
  int32_t page_size;

  const typename K::Raw* at(int32_t t, int32_t d) const {
    return reinterpret_cast<const typename K::Raw*>(data + t * token) + d;
  }
};

// Maxima and minima of C vectors of channels, from d on.
template <typename K, typename T, int C>
HISPARSE_INLINE void summarize_columns(const HeadKeys<K>& keys, int32_t d, typename T::Raw* maxima,
                                       typename T::Raw* minima) {
  Floats high[C], negated_low[C];
  unroll<C>([&](auto c) HISPARSE_INLINED {
    high[c] = K::load(keys.at(0, d + c * kLanes));
    negated_low[c] = -high[c];
  });
  for (int32_t t = 1; t < keys.page_size; ++t) {
    unroll<C>([&](auto c) HISPARSE_INLINED {
      const Floats x = K::load(keys.at(t, d + c * kLanes));
      high[c] = maximum(high[c], x);
      negated_low[c] = maximum(negated_low[c], -x);
    });
  }
  unroll<C>([&](auto c) HISPARSE_INLINED {
    store_outward<T, true>(maxima + d + c * kLanes, high[c]);
    store_outward<T, false>(minima + d + c * kLanes, -negated_low[c]);
  });
}

template <typename K, typename T>
void summarize(const PageSummaryParams& p, int64_t page, int32_t head, typename T::Raw* out) {
  // Tokens lie apart, so a few neighbouring lines of each are read at a time.
  constexpr int C = 4;
  const HeadKeys<K> keys{p.keys + page * p.page + head * p.head, p.token, p.page_size};
  typename T::Raw* minima = out + p.dim;
  int32_t d = 0;
  for (; d + C * kLanes <= p.dim; d += C * kLanes) {
    summarize_columns<K, T, C>(keys, d, out, minima);
  }
  for (; d + kLanes <= p.dim; d += kLanes) summarize_columns<K, T, 1>(keys, d, out, minima);
  for (; d < p.dim; ++d) {
    float high = K::one(*keys.at(0, d)), low = high;
    for (int32_t t = 1; t < p.page_size; ++t) {
      high = std::max(high, K::one(*keys.at(t, d)));
      low = std::min(low, K::one(*keys.at(t, d)));
    }
    out[d] = round_outward<T>(high, true);
    minima[d] = round_outward<T>(low, false);
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

void page_summary(Arguments& in) {
  const TensorView keys = in.tensor(), summaries = in.tensor(), host_pages = in.tensor();
  require_unit_stride(keys, "keys");
  PageSummaryParams p;
  const int64_t bytes = keys.dtype().bits / 8;
  p.keys = static_cast<const char*>(keys.data_ptr());
  p.page = keys.stride(0) * bytes;
  p.token = keys.stride(1) * bytes;
  p.head = keys.stride(2) * bytes;
  p.summaries = data_of<char>(summaries, "summaries");
  p.host_pages = data_of<const void>(host_pages, "host_pages");
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

HISPARSE_EXPORT_KERNEL(page_summary)

}  // namespace
}  // namespace hisparse
