// Attention over pages by a thread that knows neither Python nor CUDA: as a host function of a stream
// (csrc/host_call.cu) it runs in that stream's order.
#include "tensors.h"

#include <tvm/ffi/string.h>

#include <omp.h>

#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <string>

namespace hisparse {

void paged_attention(Arguments& in);

namespace {

// Of an engine's calls, what went wrong first since take_host_error().
struct Errors {
  std::mutex lock;
  std::string first;
};

// A call of paged_attention on tensors that stay where they are. A row attends the pages before the
// first -1 of its page table, all of which are full.
class HostAttention {
 public:
  // Takes paged_attention's arguments but seq_lens.
  HostAttention(std::shared_ptr<Errors> errors, int threads, int64_t layer, Arguments& in)
      : errors_(std::move(errors)), threads_(threads), layer_(layer) {
    for (int i = 0; i < kTensors; ++i) {
      if (i == kSeqLens) {
        tokens_.resize(tensor(kPageTable).size(0));
        lens_ = {tokens_.data(), {kDLCPU, 0}, 1, {kDLInt, 32, 1}, &rows_, &one_, 0};
        rows_ = static_cast<int64_t>(tokens_.size());
        arguments_.emplace_back(&lens_);
      } else if (const std::optional<TensorView> given = in.optional()) {
        arguments_.emplace_back(keep(*given));
      } else {
        arguments_.emplace_back(nullptr);
      }
    }
    for (int i = 0; i < 2; ++i) arguments_.emplace_back(in.number<double>());
    for (int i = 0; i < 2; ++i) arguments_.emplace_back(in.number<int64_t>());
  }

  HostAttention(const HostAttention&) = delete;

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

  void count_tokens() {
    const TensorView table = tensor(kPageTable);
    const auto pages = rows_of<const int32_t>(table, "page_table");
    const auto page_size = static_cast<int32_t>(tensor(kKeys).size(2));
    for (int64_t r = 0; r < rows_; ++r) {
      const int32_t* end = std::find(pages[r], pages[r] + table.size(1), -1);
      tokens_[r] = static_cast<int32_t>(end - pages[r]) * page_size;
    }
  }

  // No row attends anything, and whoever asks next learns why.
  void fail(const std::string& what) const {
    std::fill_n(data_of<float>(tensor(kOut), "out"), tensor(kOut).numel(), 0.0f);
    std::fill_n(data_of<float>(tensor(kLse), "lse"), tensor(kLse).numel(), -INFINITY);
    const std::lock_guard<std::mutex> lock(errors_->lock);
    if (!errors_->first.empty()) return;
    errors_->first = "layer " + std::to_string(layer_) + ", attention in host memory: " + what;
  }

  std::shared_ptr<Errors> errors_;
  int threads_;
  int64_t layer_;
  std::vector<int32_t> tokens_;
  int64_t rows_ = 0, one_ = 1;  // Of tokens_: its size and stride.
  DLTensor lens_;
  std::list<Kept> kept_;
  std::vector<tvm::ffi::AnyView> arguments_;
};

// The calls of an engine, on so many threads. Graphs make those that are kept.
struct HostCalls {
  int threads = 1;
  std::shared_ptr<Errors> errors = std::make_shared<Errors>();
  std::list<HostAttention> kept;
};

HostCalls* calls_of(int64_t handle) { return reinterpret_cast<HostCalls*>(handle); }

void run(void* call) { static_cast<HostAttention*>(call)->run(); }

void run_once(void* call) {
  const std::unique_ptr<HostAttention> own(static_cast<HostAttention*>(call));
  own->run();
}

int64_t host_function(bool keeps) { return reinterpret_cast<int64_t>(keeps ? &run : &run_once); }

int64_t make_host_calls(int64_t threads) {
  auto* calls = new HostCalls;
  calls->threads = static_cast<int>(threads);
  return reinterpret_cast<int64_t>(calls);
}

void drop_host_calls(int64_t handle) { delete calls_of(handle); }

// The argument of host_function(): it is kept, or gone when that ends.
int64_t prepare_attention(Arguments& in) {
  HostCalls* calls = calls_of(in.number<int64_t>());
  const bool keeps = in.number<bool>();
  const auto layer = in.number<int64_t>();
  auto& [threads, errors, kept] = *calls;
  if (!keeps) return reinterpret_cast<int64_t>(new HostAttention(errors, threads, layer, in));
  return reinterpret_cast<int64_t>(&kept.emplace_back(errors, threads, layer, in));
}

// Empty: nothing went wrong.
tvm::ffi::String take_host_error(int64_t handle) {
  Errors& errors = *calls_of(handle)->errors;
  const std::lock_guard<std::mutex> lock(errors.lock);
  return std::exchange(errors.first, std::string());
}

HISPARSE_EXPORT_KERNEL(prepare_attention)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_function, host_function);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_host_calls, make_host_calls);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(drop_host_calls, drop_host_calls);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(take_host_error, take_host_error);

}  // namespace
}  // namespace hisparse
