// The tokens of a step whose results are wanted. Layers whose keys nobody reads compute only these.
//
//     tokens of a step   0 1 2 3 4 5 6 | 7 | 8 9 10      three sequences; results of 6, 7 and 10 are wanted
//     wanted rows        6, 7, 10                        the first layers compute eleven rows, the others three
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "quire/decoder.h"

namespace quire {

// Of each sequence, the tokens from the first wanted one on, because attention takes consecutive tokens.
class WantedRows {
  public:
    explicit WantedRows(const StepView& step) : view_(step) {
        std::vector<bool> wanted(step.num_tokens, false);
        for (int i = 0; i < step.num_logits; ++i) wanted[step.logit_indices[i]] = true;
        for (int i = 0; i < step.num_states; ++i) wanted[step.state_indices[i]] = true;
        std::vector<std::int64_t> row_of(step.num_tokens, 0);
        starts_.push_back(0);
        for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
            bool is_wanted = false;
            for (auto token = step.query_starts[sequence]; token < step.query_starts[sequence + 1]; ++token) {
                is_wanted = is_wanted || wanted[token];
                if (!is_wanted) continue;
                row_of[token] = static_cast<std::int64_t>(sources_.size());
                sources_.push_back(static_cast<int>(token));
            }
            starts_.push_back(static_cast<std::int64_t>(sources_.size()));
        }
        for (int i = 0; i < step.num_logits; ++i) logit_indices_.push_back(row_of[step.logit_indices[i]]);
        for (int i = 0; i < step.num_states; ++i) state_indices_.push_back(row_of[step.state_indices[i]]);
        view_.num_tokens = static_cast<int>(sources_.size());
        view_.query_starts = starts_.data();
        view_.positions = take(step.positions, positions_);
        view_.logit_indices = logit_indices_.data();
        view_.state_indices = state_indices_.data();
        view_.given = take(step.given, given_);
        view_.ends_seen = take(step.ends_seen, ends_seen_);
        view_.token_ids = nullptr;
        view_.coordinates = nullptr;  // the angles are computed
        view_.slots.clear();
    }
    WantedRows(const WantedRows&) = delete;
    WantedRows& operator=(const WantedRows&) = delete;

    // The step of these rows alone, for layers that store no keys.
    const StepView& view() const { return view_; }
    // The row of the whole step that each row was.
    const std::vector<int>& sources() const { return sources_; }

    // Moves the rows of these tokens to the beginning.
    void gather(const Rows& rows, int size) const {
        if (size == 0) return;  // rows that this model lacks
        for (int row = 0; row < static_cast<int>(sources_.size()); ++row) {
            if (sources_[row] != row) std::memcpy(rows.row(row), rows.row(sources_[row]), size * sizeof(float));
        }
    }

  private:
    // Returns the numbers of these rows, of numbers for each token of the whole step; null: there are none.
    const std::int64_t* take(const std::int64_t* of_tokens, std::vector<std::int64_t>& taken) const {
        if (of_tokens == nullptr) return nullptr;
        for (const int source : sources_) taken.push_back(of_tokens[source]);
        return taken.data();
    }

    StepView view_;
    std::vector<int> sources_;
    std::vector<std::int64_t> starts_, positions_, given_, ends_seen_, logit_indices_, state_indices_;
};

}  // namespace quire
