// A step, as computed by each member of the team.
#pragma once

#include <vector>

#include "adapted_rows.h"
#include "attention_pieces.h"
#include "quire/decoder.h"

namespace quire {

// The part of a step that a member holds by value, because it may be late (see ThreadTeam::run).
struct StepCall : StepView {
    StepCall(const StepView& view, const StepResultView& results, const Kernels& kernels)
        : StepView(view), results(results), adapted(view, kernels) {}

    StepResultView results;
    AdaptedRows adapted;
    std::vector<AttentionPieces>* pieces = nullptr;  // per KV group
    std::vector<int> num_attention_pieces;           // per KV group
    std::vector<bool> is_second;                     // whether each token is of the second type; empty: none is
    std::vector<int> sources;                        // the rows of the whole step that these are; empty: all
};

}  // namespace quire
