// Shared by CPU and CUDA operations: the arguments of a call, one after the other.
//
// A kernel takes the tensors of its operation's declaration (hisparse/kernels/*/op.py) in that
// order, None for one that is absent, then its results, and then numbers.
#pragma once

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <optional>
#include <type_traits>

namespace hisparse {

using tvm::ffi::TensorView;

inline void require_unit_stride(const TensorView& tensor, const char* name) {
  const int last = tensor.ndim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) {
    TVM_FFI_THROW(ValueError) << name << ": got stride " << tensor.stride(last)
                              << " in its last dimension, expected 1";
  }
}

// The elements of a tensor whose rows are dense.
template <typename T>
T* data_of(const TensorView& tensor, const char* name) {
  require_unit_stride(tensor, name);
  return static_cast<T*>(tensor.data_ptr());
}

class Arguments {
 public:
  Arguments(const TVMFFIAny* arguments, int32_t count)
      : next_(reinterpret_cast<const tvm::ffi::AnyView*>(arguments)), end_(next_ + count) {}

  TensorView tensor() { return next().cast<TensorView>(); }

  std::optional<TensorView> optional() {
    const tvm::ffi::AnyView value = next();
    if (value == nullptr) return std::nullopt;
    return value.cast<TensorView>();
  }

  // The next tensor's elements; its rows have to be dense.
  template <typename T>
  T* data(const char* name) {
    return data_of<T>(tensor(), name);
  }

  // The same of a tensor that may be absent: null.
  template <typename T>
  T* data_or_null(const char* name) {
    const std::optional<TensorView> given = optional();
    return given ? data_of<T>(*given, name) : nullptr;
  }

  // Tensors that this kernel has no use for.
  void skip(int count) {
    for (int i = 0; i < count; ++i) next();
  }

  template <typename T>
  T number() {
    return next().cast<T>();
  }

 private:
  const tvm::ffi::AnyView& next() {
    if (next_ == end_) TVM_FFI_THROW(TypeError) << "got too few arguments";
    return *next_++;
  }

  const tvm::ffi::AnyView* next_;
  const tvm::ffi::AnyView* end_;
};

// A call of an exported kernel.
template <typename Answer>
void answer(Answer (*kernel)(Arguments&), const TVMFFIAny* arguments, int32_t count,
            TVMFFIAny* result) {
  Arguments in(arguments, count);
  if constexpr (std::is_void_v<Answer>) {
    kernel(in);
  } else {
    *reinterpret_cast<tvm::ffi::Any*>(result) = kernel(in);
  }
}

}  // namespace hisparse

// Exports hisparse::NAME, a function of Arguments&, under its name.
#define HISPARSE_EXPORT_KERNEL(NAME)                                                            \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##NAME(void*, const TVMFFIAny* arguments,          \
                                                     int32_t count, TVMFFIAny* result) {         \
    TVM_FFI_SAFE_CALL_BEGIN();                                                                   \
    ::hisparse::answer(NAME, arguments, count, result);                                          \
    TVM_FFI_SAFE_CALL_END();                                                                     \
  }
