// page_summary: maxima and minima of the keys of each page, channel by channel.
// Numbers in eight bits are those of hisparse/kernels/summary/reference.py.
#include "parallel.h"
#include "simd.h"
#include "tensors.h"

#include <algorithm>
#include <type_traits>
#include <vector>

namespace hisparse {
namespace {

struct PageSummaryParams {
  const char* keys;               // [P, S, Hkv, D]
  int64_t page, token, head;      // strides of keys in bytes
  char* summaries;                // [host pages, ranges, Hkv, 2D]: maxima, then minima
  float* scales;                  // [host pages, ranges, Hkv] of summaries in eight bits, or null
  const void* host_pages;         // [P] int32 or int64
  bool wide_pages;                // host_pages are int64
  int64_t num_pages, num_host_pages;
  int32_t ranges, range_size, heads, dim;

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

// The greater number, or NaN if one of them is.
template <typename Number>
HISPARSE_INLINE Number greater(Number a, Number b) {
  return (b > a) | (b != b) ? b : a;
}

// The e4m3 code, in the low byte, of the least number that is not below x: x or the next one.
template <typename Signed, typename Word, typename Number>
HISPARSE_INLINE Word code_at_least(Number x) {
  const Word bits = bit_cast<Word>(x), sign = bits >> 24 & 0x80u, positive = bits & 0x7fffffffu;
  const Signed magnitude = bit_cast<Signed>(positive);
  const Number size = bit_cast<Number>(positive);
  // Drops 20 bits of the fraction; 120 is the difference of the exponents' biases.
  const Word exact = positive - (120u << 23);
  const Word normal = (sign == 0u ? exact + 0xfffffu : exact) >> 20;
  // Subnormal ones are multiples of 2^-9: so are all numbers next to 2^14.
  const Number nearest = size + 0x1p14f, read = nearest - 0x1p14f;
  const Word code = bit_cast<Word>(nearest) - (141u << 23);
  const Word above = read < size ? code + 1u : code, below = read > size ? code - 1u : code;
  const Word subnormal = sign == 0u ? above : below;
  const Word number = magnitude < (121 << 23) ? subnormal : normal;
  // No number is above 448, the largest one: NaN.
  const Word most = sign == 0u ? Word{} + 0x7fu : Word{} + 0x7eu;
  const Word limited = number < most ? number : most;
  return sign | (magnitude > 0x7f800000 ? Word{} + 0x7fu : limited);
}

// A maximum that is subnormal in e4m3 and whose minimum is not: the least normal number, or zero.
template <typename Signed, typename Number>
HISPARSE_INLINE Number outside_subnormals(Number high, Number low) {
  const Signed most = Signed{} + 0x7fffffff, least_normal = Signed{} + (121 << 23);
  const Signed high_size = bit_cast<Signed>(high) & most, low_size = bit_cast<Signed>(low) & most;
  const Number raised = high > 0 ? Number{} + 0x1p-6f : Number{};
  return (high_size < least_normal) & (low_size >= least_normal) ? raised : high;
}

// Codes of a maximum and a minimum. The least number above -x is the negative of that below x.
template <typename Signed, typename Word, typename Number>
HISPARSE_INLINE void codes_outward(Number high, Number low, Word* maximum, Word* minimum) {
  const Number raised = outside_subnormals<Signed>(high, low);
  const Number lowered = outside_subnormals<Signed>(-low, -high);
  *maximum = code_at_least<Signed, Word>(raised);
  *minimum = code_at_least<Signed, Word>(lowered) ^ 0x80u;
}

// Writes codes of a range [2D] to `out` and returns their scale, the least power of two over which
// all are within +-448.
float encode_range(const float* range, int32_t dim, uint8_t* out) {
  uint32_t largest = 0;
  for (int32_t i = 0; i < 2 * dim; ++i) {
    largest = std::max(largest, bit_cast<uint32_t>(range[i]) & 0x7fffffffu);
  }
  // A NaN has any fraction; the bits of infinity leave room for the carry.
  const uint32_t carried = (std::min(largest, 0x7f800000u) + 0x1fffffu) >> 23;
  const uint32_t exponent = std::clamp(static_cast<int32_t>(carried) - 8, 27, 227);
  const float inverse = bit_cast<float>((254u - exponent) << 23);
  const float* minima = range + dim;
  int32_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    Words high, low;
    codes_outward<Ints>(Float32::load(range + d) * inverse, Float32::load(minima + d) * inverse,
                        &high, &low);
    store_bytes(out + d, high);
    store_bytes(out + dim + d, low);
  }
  for (; d < dim; ++d) {
    uint32_t high, low;
    codes_outward<int32_t>(range[d] * inverse, minima[d] * inverse, &high, &low);
    out[d] = static_cast<uint8_t>(high);
    out[dim + d] = static_cast<uint8_t>(low);
  }
  return bit_cast<float>(exponent << 23);
}

// Keys of one head in a range of tokens.
template <typename K>
struct HeadKeys {
  const char* data;
  int64_t token;  // stride in bytes
  int32_t size;   // tokens

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
  for (int32_t t = 1; t < keys.size; ++t) {
    unroll<C>([&](auto c) HISPARSE_INLINED {
      const Floats x = K::load(keys.at(t, d + c * kLanes));
      high[c] = greater(high[c], x);
      negated_low[c] = greater(negated_low[c], -x);
    });
  }
  unroll<C>([&](auto c) HISPARSE_INLINED {
    store_outward<T, true>(maxima + d + c * kLanes, high[c]);
    store_outward<T, false>(minima + d + c * kLanes, -negated_low[c]);
  });
}

// Maxima and minima of `keys`, to [2D] at `out`.
template <typename K, typename T>
void summarize(const HeadKeys<K>& keys, int32_t dim, typename T::Raw* out) {
  // Tokens lie apart, so a few neighbouring lines of each are read at a time.
  constexpr int C = 4;
  typename T::Raw* minima = out + dim;
  int32_t d = 0;
  for (; d + C * kLanes <= dim; d += C * kLanes) {
    summarize_columns<K, T, C>(keys, d, out, minima);
  }
  for (; d + kLanes <= dim; d += kLanes) summarize_columns<K, T, 1>(keys, d, out, minima);
  for (; d < dim; ++d) {
    float high = K::one(*keys.at(0, d)), negated_low = -high;
    for (int32_t t = 1; t < keys.size; ++t) {
      const float x = K::one(*keys.at(t, d));
      high = greater(high, x);
      negated_low = greater(negated_low, -x);
    }
    out[d] = round_outward<T>(high, true);
    minima[d] = round_outward<T>(-negated_low, false);
  }
}

// Writes one range of one head to row `row` of the summaries.
template <typename K, typename T>
void store_range(const PageSummaryParams& p, const HeadKeys<K>& keys, int64_t row) {
  auto* out = reinterpret_cast<typename T::Raw*>(p.summaries) + row * 2 * p.dim;
  if constexpr (std::is_same_v<T, Float8>) {
    thread_local std::vector<float> range;
    range.resize(2 * p.dim);
    summarize<K, Float32>(keys, p.dim, range.data());
    p.scales[row] = encode_range(range.data(), p.dim, out);
  } else {
    summarize<K, T>(keys, p.dim, out);
  }
}

template <typename K, typename T>
void run(const PageSummaryParams& p) {
  const int64_t size = int64_t{p.ranges} * p.range_size;
  const double work = static_cast<double>(p.num_pages) * size * p.heads * p.dim;
  parallel_for(p.num_pages, num_threads(p.num_pages, work / 16), [&](int64_t page) {
    const int64_t host_page = p.host_page(page);
    if (host_page < 0) return;
    for (int32_t range = 0; range < p.ranges; ++range) {
      const char* tokens = p.keys + page * p.page + range * p.range_size * p.token;
      for (int32_t head = 0; head < p.heads; ++head) {
        const HeadKeys<K> keys{tokens + head * p.head, p.token, p.range_size};
        store_range<K, T>(p, keys, (host_page * p.ranges + range) * p.heads + head);
      }
    }
  });
}

void page_summary(Arguments& in) {
  const TensorView keys = in.tensor(), summaries = in.tensor(), host_pages = in.tensor();
  require_unit_stride(keys, "keys");
  PageSummaryParams p;
  p.scales = in.data_or_null<float>("scales");
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
  p.ranges = static_cast<int32_t>(summaries.size(1));
  p.range_size = static_cast<int32_t>(keys.size(1)) / p.ranges;
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
    p.scales != nullptr ? run<K, Float8>(p) : narrow ? run<K, BFloat16>(p) : run<K, Float32>(p);
  });
}

HISPARSE_EXPORT_KERNEL(page_summary)

}  // namespace
}  // namespace hisparse
