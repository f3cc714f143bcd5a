// Kernel calls of a layer, which later layers of the same shapes make again in one call.
//
// Python records the calls once. Then it has no arguments to check, to allocate or to convert: it
// passes the tensors that change, and the calls follow each other here.
#include "tensors.h"

#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

namespace hisparse {
namespace {

using tvm::ffi::Any;
using tvm::ffi::AnyView;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::PackedArgs;

// A tensor as a kernel gets it, with sizes and strides of its own.
class Argument {
 public:
  explicit Argument(const TensorView& tensor)
      : shape_(tensor.shape().begin(), tensor.shape().end()),
        strides_(tensor.strides().begin(), tensor.strides().end()),
        tensor_{tensor.data_ptr(), tensor.device(), tensor.ndim(), tensor.dtype(),
                shape_.data(),     strides_.data(), 0} {}
  Argument(const Argument&) = delete;

  // Whether `other` has the same dtype, sizes and strides.
  bool fits(const TensorView& other) const {
    const DLDataType dtype = other.dtype();
    return tensor_.dtype.code == dtype.code && tensor_.dtype.bits == dtype.bits &&
           std::equal(shape_.begin(), shape_.end(), other.shape().begin(), other.shape().end()) &&
           std::equal(strides_.begin(), strides_.end(), other.strides().begin(),
                      other.strides().end());
  }

  char* data() const { return static_cast<char*>(tensor_.data); }
  void move_to(char* data) { tensor_.data = data; }
  DLTensor* view() { return &tensor_; }

 private:
  std::vector<int64_t> shape_, strides_;
  DLTensor tensor_;
};

class Recorded {
 public:
  explicit Recorded(const PackedArgs& inputs) {
    for (int i = 0; i < inputs.size(); ++i) {
      const Argument& input = inputs_.emplace_back(inputs[i].cast<TensorView>());
      const auto starts = [&](const Argument& other) { return other.data() == input.data(); };
      same_.push_back(std::find_if(inputs_.begin(), inputs_.end(), starts) - inputs_.begin());
    }
  }

  // Adds a call: its function, and for each argument the place of the input that it lies in, -1 for
  // none, and the argument.
  void add(const PackedArgs& given) {
    Call& call = calls_.emplace_back();
    call.function = given[0].cast<Function>();
    for (int i = 1; i < given.size(); i += 2) {
      call.arguments.push_back(argument(given[i].cast<int64_t>(), given[i + 1]));
    }
  }

  // Makes the calls with other inputs, unless these do not fit: then it makes none.
  bool run(const PackedArgs& given) {
    std::vector<char*> data;
    for (const Argument& input : inputs_) {
      const size_t at = data.size();
      const auto now = given[static_cast<int>(at)].cast<TensorView>();
      data.push_back(static_cast<char*>(now.data_ptr()));
      if (!input.fits(now) || data[at] != data[same_[at]]) return false;
    }
    for (const Moved& each : moved_) each.argument->move_to(data[each.input] + each.offset);
    for (const Call& call : calls_) {
      Any result;
      call.function.CallPacked(call.arguments.data(), static_cast<int>(call.arguments.size()),
                               &result);
    }
    return true;
  }

 private:
  struct Call {
    Function function;
    std::vector<AnyView> arguments;
  };
  struct Moved {
    Argument* argument;
    int64_t input;
    int64_t offset;  // bytes from the input's first element to the argument's
  };

  AnyView argument(int64_t input, const AnyView& given) {
    const auto tensor = given.try_cast<TensorView>();
    if (!tensor) return given;  // a number, or None
    Argument& own = tensors_.emplace_back(*tensor);
    if (input >= 0) moved_.push_back({&own, input, own.data() - inputs_[input].data()});
    return own.view();
  }

  std::deque<Argument> inputs_, tensors_;
  std::vector<size_t> same_;  // the first input that starts where each does: V may be a part of K
  std::deque<Call> calls_;
  std::vector<Moved> moved_;
};

// Takes the inputs; returns a function that adds a call, and one of other inputs that makes all calls
// and returns whether the inputs fit.
Array<Function> record_calls(const PackedArgs& inputs) {
  auto recorded = std::make_shared<Recorded>(inputs);
  return {
      Function::FromPacked([recorded](PackedArgs call, Any*) { recorded->add(call); }),
      Function::FromPacked([recorded](PackedArgs now, Any* fit) { *fit = recorded->run(now); }),
  };
}

// out [n] in float32 or bfloat16 = from [n] float32, rounded to the nearest, at ties to even.
void write_output(Arguments& in) {
  const TensorView from = in.tensor(), out = in.tensor();
  const int64_t count = from.numel();
  const auto* numbers = static_cast<const float*>(from.data_ptr());
  if (out.dtype().code != kDLBfloat) {
    std::copy_n(numbers, count, static_cast<float*>(out.data_ptr()));
    return;
  }
  auto* rounded = static_cast<uint16_t*>(out.data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = bit_cast<uint32_t>(numbers[i]);
    const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    rounded[i] = std::isnan(numbers[i]) ? 0x7fc0u : nearest;
  }
}

HISPARSE_EXPORT_KERNEL(write_output)

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_record_calls(void*, const TVMFFIAny* inputs,
                                                         int32_t count, TVMFFIAny* functions) {
  TVM_FFI_SAFE_CALL_BEGIN();
  const auto* given = reinterpret_cast<const AnyView*>(inputs);
  *reinterpret_cast<Any*>(functions) = record_calls(PackedArgs(given, count));
  TVM_FFI_SAFE_CALL_END();
}

}  // namespace
}  // namespace hisparse
