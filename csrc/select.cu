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
int64_t select_scratch_words(Arguments& in) {
  const TensorView scores = in.tensor();
  if (scores.size(1) <= in.number<int64_t>()) return 0;
  return fits_shared(OnDevice(scores), size32(scores, 2)) ? 0 : scores.size(2);
}

// After the results comes `scratch`, [B, H, words] of int32.
void select(Arguments& in) {
  SelectParams p{};
  const TensorView scores = in.tensor();
  p.num_pages = in.data<const int32_t>("num_pages");
  if (const auto forced = in.optional()) {
    p.forced = static_cast<const bool*>(forced->data_ptr());
    p.forced_request_stride = forced->stride(0);
    p.forced_page_stride = forced->stride(1);
  }
  if (const auto rest = in.optional()) {
    p.rest = static_cast<const float*>(rest->data_ptr());
    p.rest_request_stride = rest->stride(0);
    p.rest_head_stride = rest->stride(1);
  }
  p.invalid_scores = in.data_or_null<unsigned long long>("invalid_scores");
  const TensorView pages = in.tensor(), lengths = in.tensor(), scratch = in.tensor();
  p.drop_last = in.number<bool>();
  const int64_t selections = lengths.numel();
  if (selections == 0) return;
  p.scores = scores.data_ptr();
  p.pages = data_of<int32_t>(pages, "pages");
  p.lengths = data_of<int32_t>(lengths, "lengths");
  p.scratch = scratch.size(2) == 0 ? nullptr : data_of<uint32_t>(scratch, "scratch");
  p.request_stride = scores.stride(0);
  p.head_stride = scores.stride(1);
  p.page_stride = scores.stride(2);
  p.heads = size32(scores, 1);
  p.out_heads = size32(lengths, 1);
  p.width = size32(scores, 2);
  p.max_pages = size32(pages, 2);
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

HISPARSE_EXPORT_KERNEL(select_scratch_words)
HISPARSE_EXPORT_KERNEL(select)

}  // namespace hisparse
