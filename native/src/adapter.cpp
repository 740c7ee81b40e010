#include "quire/adapter.h"

#include <stdexcept>

namespace quire {
namespace {

const PackedMatrix& matrix_of(const LayerWeights& weights, Adapted which) {
    switch (which) {
        case Adapted::kQuery:
            return weights.query;
        case Adapted::kKey:
            return weights.key;
        case Adapted::kValue:
            return weights.value;
        case Adapted::kOutput:
            return weights.output;
        case Adapted::kGate:
            return weights.gate;
        case Adapted::kUp:
            return weights.up;
        case Adapted::kDown:
            break;
    }
    return weights.down;
}

}  // namespace

Adapter::Adapter(const Decoder& decoder) : decoder_(decoder), layers_(decoder.shape().layers.size()) {}

void Adapter::set(int layer, Adapted which, const MatrixRows& a, const MatrixRows& b, float scale) {
    const DecoderShape& shape = decoder_.shape();
    const MatrixView matrix = matrix_of(decoder_.weights.layers.at(layer), which).view();
    const bool is_dense = which < Adapted::kGate || !shape.layers[layer].sparse;
    if (matrix.panels == nullptr || !is_dense || shape.latent.rank > 0 || a.num_inputs != matrix.num_inputs ||
        b.num_outputs != matrix.num_outputs || a.num_outputs != b.num_inputs) {
        throw std::invalid_argument("the decoder has no matrix of this shape for an adapter");
    }
    if (a.num_outputs % kPanelWidth != 0 || a.num_outputs > shape.adapter_rank) {
        throw std::invalid_argument("the rank of an adapter is a multiple of 16, as large as the decoder allows");
    }
    LowRank& place = layers_[layer][static_cast<int>(which)];
    place.scale = scale;
    place.a.pack(decoder_.kernels(), nullptr, memory_, a, a.type);
    place.b.pack(decoder_.kernels(), nullptr, memory_, b, b.type);
    number_type_ = place.a.view().type;
}

std::size_t Adapter::num_bytes() const {
    std::size_t total = 0;
    for (const auto& layer : layers_) {
        for (const LowRank& each : layer) total += each.a.num_bytes() + each.b.num_bytes();
    }
    return total;
}

}  // namespace quire
