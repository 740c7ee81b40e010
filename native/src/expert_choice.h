// Chooses the experts of a token, and computes the weights of experts.
#pragma once

#include <vector>

#include "quire/decoder.h"

namespace quire {

// Turns the scores of all experts into weights, and chooses the highest; among equal ones, the lowest ids. Writes the
// ids in ascending order to `chosen`, and the factors of the outputs to `weights`. `offset` is added to the weights
// only for the choice, and may be empty. `ranks` has room for a number for each expert and each group.
void choose_experts(const DecoderShape& shape, const Kernels& kernels, const std::vector<float>& offset, float* scores,
                    float* ranks, int* chosen, float* weights);

// The weight of the shared MLP from its score.
float sigmoid(const Kernels& kernels, float score);

}  // namespace quire
