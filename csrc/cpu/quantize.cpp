// quantize: keys and values in eight bits with a power of two as scale for each vector.
#include "parallel.h"
#include "quantize.h"
#include "simd.h"
#include "tensors.h"

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

HISPARSE_EXPORT_KERNEL(quantize)

}  // namespace
}  // namespace hisparse
