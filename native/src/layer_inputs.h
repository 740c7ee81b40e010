// The inputs of each layer for a token, which are computed once for all layers; see LayerInputsSpec in Python.
#pragma once

#include "member_rows.h"
#include "quire/decoder.h"

namespace quire {

// Completes the inputs of all layers for a token. They begin as the product of LAYER_INPUTS and its embedding.
inline void compute_inputs(const DecoderShape& shape, const Kernels& kernels, const DecoderWeights& weights,
                           std::int64_t token, float* inputs, float* scratch) {
    const LayerInputsShape& each = shape.layer_inputs;
    const int size = static_cast<int>(shape.layers.size()) * each.size;
    const NormView norm = view_of(shape.norm, weights.layer_inputs_norm);
    const bool is_known = each.num_tokens == 0 || token < each.num_tokens;
    weights.layer_embedding.look_up(is_known ? token : 0, scratch);
    for (int i = 0; i < size; ++i) inputs[i] *= each.input_scale;
    for (int i = 0; i < size; i += each.size) kernels.normalize(inputs + i, inputs + i, each.size, norm);
    for (int i = 0; i < size; ++i) inputs[i] = (inputs[i] + scratch[i] * each.embedding_scale) * each.scale;
}

// Adds what a layer has made of its input, in `update`, to the hidden state of a token, and scales the sum.
inline void add_input(const DecoderShape& shape, const Kernels& kernels, const LayerWeights& weights, float* update,
                      float* hidden) {
    if (shape.layer_inputs.size > 0) {
        kernels.normalize(update, update, shape.hidden_size, view_of(shape.norm, weights.after_input_norm));
        kernels.add(hidden, update, shape.hidden_size);
    }
    for (int i = 0; i < shape.hidden_size; ++i) hidden[i] *= weights.scale;
}

}  // namespace quire
