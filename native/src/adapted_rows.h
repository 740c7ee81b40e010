// The rows of a step that have an adapter, in runs of one adapter; long runs are cut, so that threads share them.
#pragma once

#include <algorithm>
#include <vector>

#include "quire/adapter.h"

namespace quire {

struct AdaptedRun {
    const Adapter* adapter;
    int first_row;
    int num_rows;
};

class AdaptedRows {
  public:
    static constexpr int kMostRows = 64;

    explicit AdaptedRows(const StepView& step, const Kernels& kernels) {
        for (int i = 0; i < static_cast<int>(step.adapters.size()); ++i) {
            if (step.adapters[i] == nullptr) continue;
            forms_ = forms_ | kernels.forms_for(step.adapters[i]->number_type());
            add(step.adapters[i], static_cast<int>(step.query_starts[i]), static_cast<int>(step.query_starts[i + 1]));
        }
    }

    const std::vector<AdaptedRun>& runs() const { return runs_; }
    // The forms that the matrices of all adapters take rows in.
    RowForms forms() const { return forms_; }

    // Calls work(run) for the runs in a tile, cut to its rows.
    template <typename Work>
    void for_runs(const LinearTile& tile, Work work) const {
        for (const AdaptedRun& run : runs_) {
            const int first = std::max(run.first_row, tile.first_row);
            const int end = std::min(run.first_row + run.num_rows, tile.first_row + tile.num_rows);
            if (first < end) work(AdaptedRun{run.adapter, first, end - first});
        }
    }

    bool any_in(const LinearTile& tile) const {
        bool found = false;
        for_runs(tile, [&](const AdaptedRun&) { found = true; });
        return found;
    }

  private:
    void add(const Adapter* adapter, int first, int end) {
        while (first < end) {
            const bool follows = !runs_.empty() && runs_.back().adapter == adapter &&
                                 runs_.back().first_row + runs_.back().num_rows == first &&
                                 runs_.back().num_rows < kMostRows;
            if (!follows) runs_.push_back({adapter, first, 0});
            const int count = std::min(end - first, kMostRows - runs_.back().num_rows);
            runs_.back().num_rows += count;
            first += count;
        }
    }

    std::vector<AdaptedRun> runs_;
    RowForms forms_;
};

}  // namespace quire
