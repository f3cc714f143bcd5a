// The cap on attention logits: cap * tanh(logit / cap).
#pragma once

#include "simd.h"

namespace hisparse {

// tanh of x, relative error about 5e-7.
HISPARSE_INLINE Floats tanh_of(Floats x) {
  const Words bits = bit_cast<Words>(x);
  const Floats size = bit_cast<Floats>(bits & 0x7fffffffu);
  constexpr float kTwoLog2E = 2.88539008f;
  const Floats decay = exp2_of_nonpositive(size * -kTwoLog2E);
  const Words ratio = bit_cast<Words>((1.0f - decay) / (1.0f + decay));
  // Near 0 the difference above cancels, and a few terms of the series suffice.
  const Floats square = x * x;
  Floats series = square * 2.1869488e-2f - 5.3968254e-2f;
  series = series * square + 1.3333333e-1f;
  series = series * square - 3.3333333e-1f;
  series = series * square + 1.0f;
  return size < 0.25f ? x * series : bit_cast<Floats>(ratio | (bits & 0x80000000u));
}

// Caps `count` logits, rounded up to whole vectors.
inline void cap_logits(float* logits, int64_t count, float cap) {
  const float inverse = 1.0f / cap;
  for (int64_t i = 0; i < count; i += kLanes) {
    store(logits + i, tanh_of(Float32::load(logits + i) * inverse) * cap);
  }
}

}  // namespace hisparse
