// select: checks and launch.
#include "hisparse/select.cuh"

#include "launch.h"

namespace hisparse {
namespace {

int64_t shared_bytes(int32_t width) {
  return static_cast<int64_t>(sizeof(SelectShared)) + int64_t{4} * width;
}

bool fits_shared(const OnDevice& on, int32_t width) {
  return shared_bytes(width) <= on.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

template <typename Score>
void launch(const OnDevice& on, dim3 grid, const SelectParams& p) {
  const int threads = block_threads(p.width, kItems);
  if (fits_shared(on, p.width)) {
    on.launch("select", select_kernel<Score, true>, grid, threads, shared_bytes(p.width), p);
  } else {
    on.launch("select", select_kernel<Score, false>, grid, threads, sizeof(SelectShared), p);
  }
}

}  // namespace

// Words of scratch that a selection needs: 0 if the shared memory of the tensor's device is enough,
// or if a head's scores are its pages' ranks.
int64_t select_scratch_words(TensorView scores, int64_t out_heads) {
  if (scores.size(1) <= out_heads) return 0;
  return fits_shared(OnDevice(scores), size32(scores, 2)) ? 0 : scores.size(2);
}

// `scratch` is [B, H, words] of int32. Empty tensors `forced`, `rest` and `invalid_scores` stand for
// none.
void select(TensorView scores, TensorView num_pages, TensorView forced, TensorView rest,
            TensorView pages, TensorView lengths, TensorView invalid_scores, TensorView scratch,
            bool drop_last) {
  const int64_t selections = lengths.numel();
  if (selections == 0) return;
  SelectParams p;
  p.scores = scores.data_ptr();
  p.forced = forced.size(0) == 0 ? nullptr : static_cast<const bool*>(forced.data_ptr());
  p.rest = rest.size(0) == 0 ? nullptr : static_cast<const float*>(rest.data_ptr());
  p.num_pages = data_of<const int32_t>(num_pages, "num_pages");
  p.pages = data_of<int32_t>(pages, "pages");
  p.lengths = data_of<int32_t>(lengths, "lengths");
  p.invalid_scores = invalid_scores.size(0) == 0
                         ? nullptr
                         : data_of<unsigned long long>(invalid_scores, "invalid_scores");
  p.scratch = scratch.size(2) == 0 ? nullptr : data_of<uint32_t>(scratch, "scratch");
  p.request_stride = scores.stride(0);
  p.head_stride = scores.stride(1);
  p.page_stride = scores.stride(2);
  p.forced_request_stride = forced.stride(0);
  p.forced_page_stride = forced.stride(1);
  p.rest_request_stride = rest.stride(0);
  p.rest_head_stride = rest.stride(1);
  p.heads = size32(scores, 1);
  p.out_heads = size32(lengths, 1);
  p.width = size32(scores, 2);
  p.max_pages = size32(pages, 2);
  p.drop_last = drop_last;
  const OnDevice on(scores);
  const dim3 grid(static_cast<unsigned>(selections));
  if (scores.dtype().bits == 32) {
    launch<float>(on, grid, p);
  } else if (scores.dtype().code == kDLBfloat) {
    launch<BFloat16>(on, grid, p);
  } else {
    launch<Float16>(on, grid, p);
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_scratch_words, select_scratch_words);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select, select);

}  // namespace hisparse
