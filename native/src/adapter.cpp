#include "quire/adapter.h"

#include <map>
#include <stdexcept>

namespace quire {
namespace {

// The matrices of a part in a layer: one for each head or expert, or only one.
std::vector<const PackedMatrix*> matrices_of(const LayerWeights& weights, Adapted which) {
    static const std::map<Adapted, PackedMatrix LayerWeights::*> kOfLayer = {
        {Adapted::kQuery, &LayerWeights::query},
        {Adapted::kKey, &LayerWeights::key},
        {Adapted::kValue, &LayerWeights::value},
        {Adapted::kOutput, &LayerWeights::output},
        {Adapted::kGate, &LayerWeights::gate},
        {Adapted::kUp, &LayerWeights::up},
        {Adapted::kDown, &LayerWeights::down},
        {Adapted::kQueryDown, &LayerWeights::query_down},
        {Adapted::kLatent, &LayerWeights::latent},
        {Adapted::kAttentionGate, &LayerWeights::attention_gate},
        {Adapted::kDeltaRate, &LayerWeights::delta_rate},
        {Adapted::kDeltaDecay, &LayerWeights::delta_decay},
    };
    static const std::map<Adapted, PackedMatrix ExpertWeights::*> kOfExpert = {
        {Adapted::kExpertGate, &ExpertWeights::gate},
        {Adapted::kExpertUp, &ExpertWeights::up},
        {Adapted::kExpertDown, &ExpertWeights::down},
    };
    if (const auto found = kOfLayer.find(which); found != kOfLayer.end()) return {&(weights.*found->second)};
    std::vector<const PackedMatrix*> matrices;
    if (const auto found = kOfExpert.find(which); found != kOfExpert.end()) {
        for (const ExpertWeights& expert : weights.experts) matrices.push_back(&(expert.*found->second));
    } else {
        for (const PackedMatrix& head : which == Adapted::kKeyUp ? weights.key_up : weights.value_up) {
            matrices.push_back(&head);
        }
    }
    return matrices;
}

}  // namespace

Adapter::Adapter(const Decoder& decoder) : decoder_(decoder), layers_(decoder.shape().layers.size()) {}

void Adapter::set(int layer, Adapted which, int index, const MatrixRows& a, const MatrixRows& b, float scale) {
    const auto matrices = matrices_of(decoder_.weights.layers.at(layer), which);
    std::vector<LowRank>& places = layers_[layer][static_cast<int>(which)];
    places.resize(matrices.size());
    if (matrices.empty()) throw std::invalid_argument("the decoder has no such matrix for an adapter");
    const MatrixView matrix = matrices.at(index)->view();
    LowRank place = places[0];
    place.scale = scale;
    if (a.num_outputs > 0) place.a = packed(a);
    if (b.num_outputs > 0) place.b = packed(b);
    if (matrix.panels == nullptr || place.empty() || place.b.panels == nullptr ||
        place.a.num_inputs != matrix.num_inputs || place.b.num_outputs != matrix.num_outputs ||
        place.a.num_outputs != place.b.num_inputs) {
        throw std::invalid_argument("the decoder has no matrix of this shape for an adapter");
    }
    if (place.a.num_outputs % kPanelWidth != 0 || place.a.num_outputs > decoder_.shape().adapter_rank) {
        throw std::invalid_argument("the rank of an adapter is a multiple of 16, as large as the decoder allows");
    }
    places[index] = place;
    number_type_ = place.a.type;
}

MatrixView Adapter::packed(const MatrixRows& rows) {
    PackedMatrix matrix;
    matrix.pack(decoder_.kernels(), nullptr, memory_, rows, rows.type);
    return matrix.view();
}

}  // namespace quire
