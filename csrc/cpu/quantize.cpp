// quantize, dequantize: keys and values in eight bits with a power of two as scale for each vector.
#include "parallel.h"
#include "quantize.h"
#include "simd.h"
#include "tensors.h"

#include <cmath>
#include <type_traits>

namespace hisparse {
namespace {

constexpr int64_t kVectorsPerTask = 64;
constexpr double kElementsPerNs = 2.0;

// Vectors of a tensor of up to two dimensions beside their own: [outer, inner, D].
struct Vectors {
  char* data;
  int64_t outer, inner;  // strides, bytes
  int64_t inner_count, width;

  Vectors(const TensorView& t, const char* name) {
    require_unit_stride(t, name);
    const int64_t bytes = t.dtype().bits / 8;
    data = static_cast<char*>(t.data_ptr());
    outer = t.stride(0) * bytes;
    inner = t.stride(1) * bytes;
    inner_count = t.size(1);
    width = t.size(2);
  }

  template <typename Raw>
  Raw* at(int64_t i) const {
    return reinterpret_cast<Raw*>(data + i / inner_count * outer + i % inner_count * inner);
  }
};

template <typename To>
void encode_all(const Vectors& x, const TensorView& like, const Vectors& codes,
                const Vectors& scales, int64_t count, int which) {
  const bool is_half = like.dtype().code == kDLFloat && like.dtype().bits == 16;
  const float most = largest_encoded<To>(is_half);
  with_element_type(like, "k", [&](auto type) {
    using T = decltype(type);
    const int64_t tasks = (count + kVectorsPerTask - 1) / kVectorsPerTask;
    parallel_for(tasks, num_threads(tasks, count * x.width / kElementsPerNs), [&](int64_t task) {
      const int64_t last = std::min(count, (task + 1) * kVectorsPerTask);
      for (int64_t i = task * kVectorsPerTask; i < last; ++i) {
        encode<To, T>(x.at<const typename T::Raw>(i), x.width, most, codes.at<uint8_t>(i),
                      scales.at<uint8_t>(i) + which);
      }
    });
  });
}

template <typename To>
void run(const TensorView& k, const TensorView& v, const TensorView& k_codes,
         const TensorView& v_codes, const TensorView& scales) {
  const int64_t count = k.size(0) * k.size(1);
  if (count == 0) return;
  const Vectors to(scales, "scales");
  encode_all<To>(Vectors(k, "k"), k, Vectors(k_codes, "codes"), to, count, 0);
  encode_all<To>(Vectors(v, "v"), v, Vectors(v_codes, "codes"), to, count, 1);
}

void quantize(Arguments& in) {
  const TensorView k = in.tensor(), v = in.tensor(), k_codes = in.tensor(), v_codes = in.tensor(),
                   scales = in.tensor();
  const auto code = k_codes.dtype().code;
  if (code == kDLInt) return run<ToInt8>(k, v, k_codes, v_codes, scales);
  if (code == kDLFloat8_e4m3fn) return run<ToE4M3>(k, v, k_codes, v_codes, scales);
  TVM_FFI_THROW(ValueError) << "codes: got DLPack's dtype " << static_cast<int>(code)
                            << ", expected int8 or float8_e4m3fn";
}

// A tensor [..., D] as vectors, whatever its strides.
struct AnyVectors {
  TensorView tensor;
  int64_t width, stride;  // of elements
  bool dense;

  explicit AnyVectors(const TensorView& t)
      : tensor(t), width(t.size(t.ndim() - 1)), stride(t.stride(t.ndim() - 1)),
        dense(t.IsContiguous()) {}

  int64_t count() const { return width == 0 ? 0 : tensor.numel() / width; }

  template <typename Raw>
  Raw* at(int64_t i) const {
    int64_t offset = dense ? i * width : 0;
    for (int dim = tensor.ndim() - 2; !dense && dim >= 0; --dim) {
      offset += i % tensor.size(dim) * tensor.stride(dim);
      i /= tensor.size(dim);
    }
    return static_cast<Raw*>(tensor.data_ptr()) + offset;
  }
};

// A code's number; NaN too, which the element types leave out.
template <typename From>
HISPARSE_INLINE float number_of(typename From::Raw code) {
  if (std::is_same_v<From, Float8> && (code & 0x7f) == 0x7f) return NAN;
  return From::one(code);
}

// What is written: decoded numbers have few bits, and none is cut off.
struct AsFloat32 {
  using Raw = float;
  static HISPARSE_INLINE Raw of(float x) { return x; }
};
struct AsBFloat16 {
  using Raw = uint16_t;
  static HISPARSE_INLINE Raw of(float x) { return bit_cast<uint32_t>(x) >> 16; }
};
struct AsFloat16 {
  using Raw = uint16_t;
  static HISPARSE_INLINE Raw of(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u;
    const float positive = std::abs(x);
    if (!(positive < 65536.0f)) return sign | (positive > 0 ? 0x7c00u : 0x7e00u);
    // Subnormal ones are multiples of 2^-24; the others differ by 112 in the exponent's bias.
    if (positive < 0x1p-14f) return sign | static_cast<uint32_t>(positive * 0x1p24f);
    return sign | ((bit_cast<uint32_t>(positive) >> 13) - (112u << 10));
  }
};

// out [..., D] = codes [..., D] times scales [..., 2], of keys (which = 0) or values (1).
template <typename From, typename To>
void decode_all(const AnyVectors& codes, const AnyVectors& scales, const AnyVectors& out, int which) {
  const int64_t count = codes.count(), tasks = (count + kVectorsPerTask - 1) / kVectorsPerTask;
  const double elements = static_cast<double>(count) * codes.width;
  parallel_for(tasks, num_threads(tasks, elements / kElementsPerNs), [&](int64_t task) {
    const int64_t last = std::min(count, (task + 1) * kVectorsPerTask);
    for (int64_t i = task * kVectorsPerTask; i < last; ++i) {
      const uint32_t exponent = scales.at<const uint8_t>(i)[which * scales.stride];
      const float scale = bit_cast<float>(exponent << kFractionBits);
      const auto* from = codes.at<const typename From::Raw>(i);
      auto* to = out.at<typename To::Raw>(i);
      const auto decode = [&](int64_t stride, int64_t out_stride) HISPARSE_INLINED {
        for (int64_t d = 0; d < codes.width; ++d) {
          to[d * out_stride] = To::of(number_of<From>(from[d * stride]) * scale);
        }
      };
      codes.stride == 1 && out.stride == 1 ? decode(1, 1) : decode(codes.stride, out.stride);
    }
  });
}

void dequantize(Arguments& in) {
  const TensorView k = in.tensor(), v = in.tensor(), scales = in.tensor(), out_k = in.tensor(),
                   out_v = in.tensor();
  const auto decode = [&](const TensorView& codes, const TensorView& out, int which) {
    const auto from = [&](auto code) {
      using From = decltype(code);
      const AnyVectors x(codes), y(scales), to(out);
      if (out.dtype().code == kDLBfloat) return decode_all<From, AsBFloat16>(x, y, to, which);
      if (out.dtype().bits == 16) return decode_all<From, AsFloat16>(x, y, to, which);
      decode_all<From, AsFloat32>(x, y, to, which);
    };
    codes.dtype().code == kDLInt ? from(Int8()) : from(Float8());
  };
  decode(k, out_k, 0);
  decode(v, out_v, 1);
}

HISPARSE_EXPORT_KERNEL(quantize)
HISPARSE_EXPORT_KERNEL(dequantize)

}  // namespace
}  // namespace hisparse
