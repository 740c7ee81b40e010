// The heads of a token between their products and attention: norms, positions, and storing keys and values.
#pragma once

#include <cstring>

#include "member_rows.h"
#include "quire/decoder.h"

namespace quire {

// The heads of one layer.
class HeadRows {
  public:
    HeadRows(const DecoderShape& shape, const Kernels& kernels, const LayerShape& layer, const LayerWeights& weights,
             const PagedKv& kv)
        : shape_(shape),
          kernels_(kernels),
          layer_(layer),
          weights_(weights),
          kv_(kv),
          head_dim_(shape.head_dim_of(layer)),
          num_kv_heads_(shape.kv_heads_of(layer)),
          half_(layer.rope < 0 ? 0 : shape.ropes[layer.rope].rotary_dim / 2) {}

    // Normalises and rotates the queries of a token.
    void prepare_query(float* query, const float* cosines, std::int64_t position) const {
        prepare(query, shape_.num_heads, weights_.query_norm, cosines);
        const float factor = layer_.rope < 0 ? 1.0F : shape_.ropes[layer_.rope].query_factor(position);
        for (int d = 0; d < shape_.num_heads * head_dim_ && factor != 1.0F; ++d) query[d] *= factor;
    }

    // Normalises and rotates the keys of a token, and stores them with the values.
    void store_keys(float* keys, float* values, const float* cosines, std::int64_t slot) const {
        if (layer_.keys_are_values) std::memcpy(values, keys, num_kv_heads_ * head_dim_ * sizeof(float));
        prepare(keys, num_kv_heads_, weights_.key_norm, cosines);
        const NormView value_norm = view_of(shape_.head_norm, weights_.value_norm);
        for (int head = 0; head < num_kv_heads_; ++head) {
            float *key = keys + head * head_dim_, *value = values + head * head_dim_;
            for (int d = 0; d < head_dim_ && !weights_.key_centre.empty(); ++d) {
                key[d] -= weights_.key_centre[head * head_dim_ + d];
            }
            if (value_norm.weight != nullptr) kernels_.normalize(value, value, head_dim_, value_norm);
            kernels_.write_kv(kv_, slot, head, key, value);
        }
    }

  private:
    void prepare(float* heads, int num_heads, const NormWeights& weights, const float* cosines) const {
        NormView norm = view_of(shape_.head_norm, weights);
        const HeadNorm scope = norm.weight == nullptr ? HeadNorm::kNone : shape_.qk_norm;
        if (scope == HeadNorm::kAllHeads) kernels_.normalize(heads, heads, num_heads * head_dim_, norm);
        const bool each = scope == HeadNorm::kEachHead;
        for (float* head = heads; head < heads + num_heads * head_dim_; head += head_dim_) {
            if (half_ > 0 && shape_.rotates_first) kernels_.rotate(head, cosines, cosines + half_, half_);
            if (each || scope == HeadNorm::kHead) kernels_.normalize(head, head, head_dim_, norm);
            if (each) norm.weight += head_dim_;
            if (half_ > 0 && !shape_.rotates_first) kernels_.rotate(head, cosines, cosines + half_, half_);
        }
    }

    const DecoderShape& shape_;
    const Kernels& kernels_;
    const LayerShape& layer_;
    const LayerWeights& weights_;
    const PagedKv& kv_;
    const int head_dim_, num_kv_heads_, half_;
};

}  // namespace quire
