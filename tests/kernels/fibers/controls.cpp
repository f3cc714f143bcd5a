// What tests set on the library of fibers.
#include "pools.h"

namespace {

void set_seed(int64_t seed) {
  // Neighbouring seeds give unlike orders, and none gives the 0 that xorshift never leaves.
  fibers::random_state = (static_cast<uint64_t>(seed) + 1) * 0x9E3779B97F4A7C15u;
  // Its first numbers are much alike for all small seeds.
  for (int i = 0; i < 16; ++i) fibers::random_below(2);
}

void set_shared_limit(int64_t bytes) {
  fibers::shared_limit = bytes < 0 ? fibers::kSharedBytes : static_cast<size_t>(bytes);
}

void set_pinned(tvm::ffi::TensorView tensor, bool pinned) {
  if (pinned) {
    fibers::unpinned.erase(tensor.data_ptr());
  } else {
    fibers::unpinned.insert(tensor.data_ptr());
    // A tensor of an earlier test may have been here.
    hisparse::known_pinned().erase(tensor.data_ptr());
  }
}

void set_max_cluster(int64_t blocks) {
  fibers::max_cluster = blocks < 0 ? fibers::kMaxCluster : static_cast<int>(blocks);
}

void set_piece_bytes(int64_t bytes) { fibers::piece_bytes = static_cast<uintptr_t>(bytes); }

void set_races(bool recorded) { fibers::records_races = recorded; }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_seed, set_seed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_shared_limit, set_shared_limit);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_pinned, set_pinned);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_max_cluster, set_max_cluster);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_piece_bytes, set_piece_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_races, set_races);
