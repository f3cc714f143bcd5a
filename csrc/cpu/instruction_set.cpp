// instruction_set: what this library was compiled for, as the compiler's macros say.
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

namespace hisparse {
namespace {

tvm::ffi::String instruction_set() {
#if defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__AVX__)
  return "AVX";
#elif defined(__SSE2__)
  return "SSE2";
#elif defined(__ARM_FEATURE_SVE)
  return "SVE";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "no vectors";
#endif
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(instruction_set, instruction_set);

}  // namespace
}  // namespace hisparse
