// encode_fp8, decode_fp8: keys and values as e4m3 with a power of two as scale for each vector.
#include "parallel.h"
#include "simd.h"
#include "tensors.h"

#include <limits>

namespace hisparse {
namespace {

constexpr int kFractionBits = 23;
// Scales as hisparse/kernels/reference/fp8.py derives them.
constexpr uint32_t kCarry = (1u << kFractionBits) - 0x580000u;
constexpr int32_t kShift = 8, kLeastScale = 112;
constexpr float kLargestHalf = 61440.0f;  // Largest encoded magnitude of a float16.
constexpr int64_t kVectorsPerTask = 64;
constexpr double kElementsPerNs = 2.0;

// Rounds to the nearest number of e4m3, ties to even: one number, or a vector. x is below 432,
// infinite or NaN.
template <typename Signed, typename Word, typename Number>
HISPARSE_INLINE Word to_e4m3(Number x) {
  const Word bits = bit_cast<Word>(x), sign = bits >> 24 & 0x80u, positive = bits & 0x7fffffffu;
  const Signed magnitude = bit_cast<Signed>(positive);
  // Drops 20 bits of the fraction; 120 is the difference of the exponents' biases.
  const Word normal = (positive - (120u << 23) + 0x7ffffu + (positive >> 20 & 1u)) >> 20;
  // Subnormal ones are multiples of 2^-9: so are all numbers next to 2^14.
  const Word subnormal = bit_cast<Word>(bit_cast<Number>(positive) + 0x1p14f) - (141u << 23);
  const Word number = magnitude < (121 << 23) ? subnormal : normal;
  const Word beyond = magnitude > 0x7f800000 ? Word{} + 0x7fu : Word{} + 0x7eu;  // NaN, infinity
  return sign | (magnitude < 0x7f800000 ? number : beyond);
}

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

// NaN stays NaN.
template <typename Number>
HISPARSE_INLINE Number within(Number x, Number most) {
  const Number least = -most;
  return x > most ? most : x < least ? least : x;
}

template <typename T>
void encode(const typename T::Raw* x, int64_t width, float most, uint8_t* codes, uint8_t* scale) {
  const Floats mosts = splat(most);
  // Bits of floats without their sign are in the order of the numbers.
  Ints largests = {};
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) {
    largests = maximum(largests, bit_cast<Ints>(within(T::load(x + d), mosts)) & 0x7fffffff);
  }
  int32_t largest = 0;
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, largests[lane]);
  for (; d < width; ++d) {
    largest = std::max(largest, bit_cast<int32_t>(within(T::one(x[d]), most)) & 0x7fffffff);
  }
  const uint32_t carried = (static_cast<uint32_t>(largest) + kCarry) >> kFractionBits;
  const int32_t found = std::max(static_cast<int32_t>(carried) - kShift, kLeastScale);
  *scale = static_cast<uint8_t>(found);
  const float inverse = bit_cast<float>(static_cast<uint32_t>(254 - found) << kFractionBits);
  for (d = 0; d + kLanes <= width; d += kLanes) {
    store_bytes(codes + d, to_e4m3<Ints, Words>(within(T::load(x + d), mosts) * inverse));
  }
  for (; d < width; ++d) {
    const uint32_t code = to_e4m3<int32_t, uint32_t>(within(T::one(x[d]), most) * inverse);
    codes[d] = static_cast<uint8_t>(code);
  }
}

void encode_all(const Vectors& x, const TensorView& like, const Vectors& codes,
                const Vectors& scales, int64_t count, int which) {
  const bool is_half = like.dtype().code == kDLFloat && like.dtype().bits == 16;
  const float most = is_half ? kLargestHalf : std::numeric_limits<float>::infinity();
  with_element_type(like, "k", [&](auto type) {
    using T = decltype(type);
    const int64_t tasks = (count + kVectorsPerTask - 1) / kVectorsPerTask;
    parallel_for(tasks, num_threads(tasks, count * x.width / kElementsPerNs), [&](int64_t task) {
      const int64_t last = std::min(count, (task + 1) * kVectorsPerTask);
      for (int64_t i = task * kVectorsPerTask; i < last; ++i) {
        encode<T>(x.at<const typename T::Raw>(i), x.width, most, codes.at<uint8_t>(i),
                  scales.at<uint8_t>(i) + which);
      }
    });
  });
}

void encode_fp8(TensorView k, TensorView v, TensorView k_codes, TensorView v_codes,
                TensorView scales) {
  const int64_t count = k.size(0) * k.size(1);
  if (count == 0) return;
  const Vectors to(scales, "scales");
  encode_all(Vectors(k, "k"), k, Vectors(k_codes, "codes"), to, count, 0);
  encode_all(Vectors(v, "v"), v, Vectors(v_codes, "codes"), to, count, 1);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(encode_fp8, encode_fp8);

}  // namespace
}  // namespace hisparse
