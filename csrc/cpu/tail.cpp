#include "tail.h"

#include "dots.h"

#include <cmath>
#include <vector>

namespace hisparse {

Tails::Tails(Arguments& in) : keys_(in.optional()) {
  in.skip(1);  // values
  scales_ = in.optional();
  const std::optional<TensorView> pages = in.optional();
  lens_ = in.data_or_null<const int32_t>("tail.lens");
  if (!keys_) return;
  require_unit_stride(*keys_, "tail.kv.k");
  pages_ = data_of<const int32_t>(*pages, "tail.pages");
  rows_ = pages->size(0);
  const auto check = [](const char* name, int32_t got, int64_t most) {
    if (got < 0 || got > most) {
      TVM_FFI_THROW(ValueError) << name << ": got " << got << ", expected 0 to " << most;
    }
  };
  for (int64_t row = 0; row < rows_; ++row) {
    check("tail.pages", pages_[row], keys_->size(0) - 1);
    check("tail.lens", lens_[row], keys_->size(2));
  }
}

void Tails::score(int64_t row, const float* query, int64_t count, float scale, float* lse) const {
  const int64_t heads = keys_->size(1), dim = keys_->size(3), group = count / heads;
  with_page_type(*keys_, "tail.kv.k", [&](auto type) {
    for (int64_t head = 0; head < heads; ++head) {
      score_head<decltype(type)>(row, head, query + head * group * dim,
                                 static_cast<int32_t>(group), scale, lse + head * group);
    }
  });
}

// Queries [group, D] of one head.
template <typename T>
void Tails::score_head(int64_t row, int64_t head, const float* query, int32_t group, float scale,
                       float* lse) const {
  const int64_t tokens = lens_[row];
  const auto dim = static_cast<int32_t>(keys_->size(3));
  const auto* page = static_cast<const typename T::Raw*>(keys_->data_ptr()) +
                     pages_[row] * keys_->stride(0) + head * keys_->stride(1);
  std::vector<const typename T::Raw*> keys(tokens);
  for (int64_t t = 0; t < tokens; ++t) keys[t] = page + t * keys_->stride(2);
  const int64_t room = (tokens + kLanes - 1) / kLanes * kLanes;
  std::vector<float> parts(group * dim), logits(group * room), totals(group);
  split_in_parts<Parts<T>>(query, group, dim, scale, parts.data());
  group_dots<T>(parts.data(), group, keys.data(), 0, tokens, dim, logits.data(), room);
  for_blocks(group, [&](auto queries, int32_t g) {
    constexpr int G = decltype(queries)::value;
    float* own = logits.data() + g * room;
    for (int64_t t = 0; scales_ && t < tokens; ++t) {
      const float unit = scale_of(row, head, t);
      for (int j = 0; j < G; ++j) own[t * G + j] *= unit;
    }
    exponentiate<G>(own, tokens, lse + g, &totals[g]);
  });
  for (int32_t g = 0; g < group; ++g) lse[g] += std::log(totals[g]);
}

// The power of two that scales a key: E8M0, the exponent of a float.
float Tails::scale_of(int64_t row, int64_t head, int64_t token) const {
  const auto* scales = static_cast<const uint8_t*>(scales_->data_ptr());
  const uint32_t exponent = scales[pages_[row] * scales_->stride(0) + head * scales_->stride(1) +
                                   token * scales_->stride(2)];
  return bit_cast<float>(exponent << 23);
}

}  // namespace hisparse
