// A step, as computed by each member of the team.
#pragma once

#include <algorithm>
#include <vector>

#include "adapted_rows.h"
#include "attention_pieces.h"
#include "quire/decoder.h"

namespace quire {

// The part of a step that a member holds by value, because it may be late (see ThreadTeam::run).
struct StepCall : StepView {
    StepCall(const StepView& view, const StepResultView& results, const Kernels& kernels)
        : StepView(view), results(results), adapted(view, kernels) {}

    // The last tokens of a sequence that may have to be taken back: those with logits, because others than the first of
    // them can be guesses; at least one.
    int num_late(int sequence, int most) const {
        const std::int64_t *first = logit_indices, *end = first + num_logits;
        const auto count = std::lower_bound(first, end, query_starts[sequence + 1]) -
                           std::lower_bound(first, end, query_starts[sequence]);
        return std::clamp(static_cast<int>(count), 1, most);
    }

    StepResultView results;
    AdaptedRows adapted;
    std::vector<AttentionPieces>* pieces = nullptr;  // per KV group
    std::vector<int> num_attention_pieces;           // per KV group
    std::vector<int> sources;                        // the rows of the whole step that these are; empty: all
};

}  // namespace quire
