// Log-sum-exps of the logits of tail pages, one page a row, as the device pool stores their keys.
#pragma once

#include "tensors.h"

#include <optional>

namespace hisparse {

class Tails {
 public:
  // Takes keys [N, Hr, S, D] or None, values, scales [N, Hr, S, 2], pages [R] and lens [R].
  explicit Tails(Arguments& in);

  // R, or 0 if there are no keys.
  int64_t rows() const { return rows_; }

  // Of one row: query [count, D], times `scale`, -> lse [count]; -inf for an empty page.
  void score(int64_t row, const float* query, int64_t count, float scale, float* lse) const;

 private:
  template <typename T>
  void score_head(int64_t row, int64_t head, const float* query, int32_t group, float scale,
                  float* lse) const;
  float scale_of(int64_t row, int64_t head, int64_t token) const;

  std::optional<TensorView> keys_, scales_;
  const int32_t *pages_ = nullptr, *lens_ = nullptr;
  int64_t rows_ = 0;
};

}  // namespace hisparse
