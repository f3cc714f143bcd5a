// select: checks and launch.
#include "hisparse/select.cuh"

#include "launch.h"

namespace hisparse {
namespace {

// Below it another block costs more than it gains.
constexpr int32_t kPagesPerBlock = 1024;

// With the ranks of so many pages.
int64_t shared_bytes(int32_t pages) {
  return static_cast<int64_t>(sizeof(SelectShared)) + int64_t{4} * pages;
}

bool fits_shared(const OnDevice& on, int32_t pages) {
  return shared_bytes(pages) <= on.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

int threads_for(int32_t width, int32_t log_blocks) {
  return block_threads(pages_of_block(width, log_blocks), kItems);
}

// Blocks for a selection: as many as the device runs at once, as far as they have enough to do.
int32_t log_blocks_for(const OnDevice& on, int64_t selections, int32_t width) {
  if (!on.has_clusters()) return 0;
  const int64_t most = kMaxThreads * on.attribute(cudaDevAttrMultiProcessorCount);
  int32_t log = 0;
  while (1 << log < kMaxCluster && width > kPagesPerBlock << log &&
         (selections * threads_for(width, log + 1) << (log + 1)) <= most) {
    ++log;
  }
  return log;
}

template <typename Score, bool kNear>
void launch(const OnDevice& on, int64_t requests, SelectParams p) {
  for (p.log_blocks = log_blocks_for(on, requests * p.out_heads, p.width); p.log_blocks >= 0;
       --p.log_blocks) {
    const int32_t pages = pages_of_block(p.width, p.log_blocks);
    const bool in_shared = fits_shared(on, pages);
    const auto kernel =
        in_shared ? select_kernel<Score, true, kNear> : select_kernel<Score, false, kNear>;
    const dim3 grid(static_cast<unsigned>(requests << p.log_blocks),
                    static_cast<unsigned>(p.out_heads));
    if (on.launch("select", kernel, grid, threads_for(p.width, p.log_blocks),
                  shared_bytes(in_shared ? pages : 0), p, 1u << p.log_blocks)) {
      return;
    }
  }
}

template <typename Score>
void launch(const OnDevice& on, int64_t requests, const SelectParams& p) {
  p.within >= 0 ? launch<Score, true>(on, requests, p) : launch<Score, false>(on, requests, p);
}

}  // namespace

// Words of scratch that a selection needs: 0 if the shared memory of one block is enough, or if a
// head's scores are its pages' ranks.
int64_t select_scratch_words(Arguments& in) {
  const TensorView scores = in.tensor();
  const bool near = in.number<double>() >= 0;
  if (!near && scores.size(1) <= in.number<int64_t>()) return 0;
  return fits_shared(OnDevice(scores), pages_of_block(size32(scores, 2), 0)) ? 0 : scores.size(2);
}

// After the results comes `scratch`, [B, H, words] of int32.
void select(Arguments& in) {
  SelectParams p{};
  const TensorView scores = in.tensor();
  p.num_pages = in.data<const int32_t>("num_pages");
  if (const auto forced = in.optional()) {
    p.forced = static_cast<const uint8_t*>(forced->data_ptr());
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
  p.within = static_cast<float>(in.number<double>());
  p.drop_last = in.number<bool>();
  const int64_t requests = lengths.size(0);
  if (lengths.numel() == 0) return;
  p.scores = scores.data_ptr();
  p.pages = data_of<int32_t>(pages, "pages");
  p.lengths = data_of<int32_t>(lengths, "lengths");
  p.scratch = scratch.size(2) == 0 ? nullptr : data_of<uint32_t>(scratch, "scratch");
  p.request_stride = scores.stride(0);
  p.head_stride = scores.stride(1);
  p.page_stride = scores.stride(2);
  const int32_t heads = size32(scores, 1);
  p.out_heads = size32(lengths, 1);
  p.voters = std::max(1, heads / p.out_heads);
  p.sharers = std::max(1, p.out_heads / heads);
  p.width = size32(scores, 2);
  p.max_pages = size32(pages, 2);
  const OnDevice on(scores);
  if (scores.dtype().bits == 32) {
    launch<float>(on, requests, p);
  } else if (scores.dtype().code == kDLBfloat) {
    launch<BFloat16>(on, requests, p);
  } else {
    launch<Float16>(on, requests, p);
  }
}

HISPARSE_EXPORT_KERNEL(select_scratch_words)
HISPARSE_EXPORT_KERNEL(select)

}  // namespace hisparse
