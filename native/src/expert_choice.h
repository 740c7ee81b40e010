// Which experts a token goes to, and with which weights.
#pragma once

#include <vector>

#include "quire/decoder.h"

namespace quire {

// Turns the scores of all experts into weights, and chooses the heaviest; among equal ones, those with the lowest ids.
// Writes their ids in ascending order to `chosen`, and what their outputs are multiplied by to `weights`. `offset` is
// added to the weights that experts are chosen by, and may be empty. `ranks` has room for a number of each expert and
// of each group.
void choose_experts(const DecoderShape& shape, const Kernels& kernels, const std::vector<float>& offset, float* scores,
                    float* ranks, int* chosen, float* weights);

}  // namespace quire
