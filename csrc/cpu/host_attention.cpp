// Attention over pages by a thread that knows neither Python nor CUDA: as a host function of a stream
// (csrc/host_call.cu) it runs in that stream's order.
#include "tensors.h"

#include <tvm/ffi/string.h>

#include <omp.h>

#include <list>
#include <mutex>
#include <string>

namespace hisparse {

void paged_attention(Arguments& in);

namespace {

// What went wrong first since take_host_error().
std::mutex error_lock;
std::string first_error;

// A call of paged_attention on tensors that stay where they are. A row attends the pages before the
// first -1 of its page table, all of which are full.
class HostAttention {
 public:
  explicit HostAttention(Arguments& in) : threads_(omp_get_max_threads()) {
    for (int i = 0; i < kTensors; ++i) {
      if (const std::optional<TensorView> given = in.optional()) {
        arguments_.emplace_back(keep(*given));
      } else {
        arguments_.emplace_back(nullptr);
      }
    }
    for (int i = 0; i < 2; ++i) arguments_.emplace_back(in.number<double>());
    for (int i = 0; i < 2; ++i) arguments_.emplace_back(in.number<int64_t>());
  }

  void run() {
    omp_set_num_threads(threads_);  // Of this thread only, which is one of CUDA's.
    try {
      count_tokens();
      Arguments in(reinterpret_cast<const TVMFFIAny*>(arguments_.data()),
                   static_cast<int32_t>(arguments_.size()));
      paged_attention(in);
    } catch (const tvm::ffi::Error& error) {
      fail(error.message());
    } catch (const std::exception& error) {
      fail(error.what());
    }
  }

 private:
  // Of paged_attention's.
  enum { kKeys = 1, kPageTable = 4, kSeqLens, kOut, kLse, kTensors };

  struct Kept {
    std::vector<int64_t> sizes, strides;
    DLTensor tensor;
  };

  DLTensor* keep(const TensorView& given) {
    Kept& kept = kept_.emplace_back();
    for (int i = 0; i < given.ndim(); ++i) {
      kept.sizes.push_back(given.size(i));
      kept.strides.push_back(given.stride(i));
    }
    kept.tensor = {given.data_ptr(), given.device(),      given.ndim(), given.dtype(),
                   kept.sizes.data(), kept.strides.data(), 0};
    return &kept.tensor;
  }

  TensorView tensor(int i) const { return arguments_[i].cast<TensorView>(); }

  void count_tokens() const {
    const TensorView table = tensor(kPageTable);
    const auto pages = rows_of<const int32_t>(table, "page_table");
    int32_t* tokens = data_of<int32_t>(tensor(kSeqLens), "seq_lens");
    const auto page_size = static_cast<int32_t>(tensor(kKeys).size(2));
    for (int64_t r = 0; r < table.size(0); ++r) {
      const int32_t* end = std::find(pages[r], pages[r] + table.size(1), -1);
      tokens[r] = static_cast<int32_t>(end - pages[r]) * page_size;
    }
  }

  // No row attends anything, and whoever asks next learns why.
  void fail(const std::string& what) const {
    std::fill_n(data_of<float>(tensor(kOut), "out"), tensor(kOut).numel(), 0.0f);
    std::fill_n(data_of<float>(tensor(kLse), "lse"), tensor(kLse).numel(), -INFINITY);
    const std::lock_guard<std::mutex> lock(error_lock);
    if (first_error.empty()) first_error = what;
  }

  int threads_;
  std::list<Kept> kept_;
  std::vector<tvm::ffi::AnyView> arguments_;
};

void run(void* call) { static_cast<HostAttention*>(call)->run(); }

int64_t host_function() { return reinterpret_cast<int64_t>(&run); }

int64_t prepare_attention(Arguments& in) {
  return reinterpret_cast<int64_t>(new HostAttention(in));
}

void drop_attention(int64_t call) { delete reinterpret_cast<HostAttention*>(call); }

// Empty: nothing went wrong.
tvm::ffi::String take_host_error() {
  const std::lock_guard<std::mutex> lock(error_lock);
  return std::exchange(first_error, std::string());
}

HISPARSE_EXPORT_KERNEL(prepare_attention)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_function, host_function);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(drop_attention, drop_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(take_host_error, take_host_error);

}  // namespace
}  // namespace hisparse
