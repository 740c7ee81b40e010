// The rows of a product that have an adapter, in runs of one adapter; long runs are cut, so that threads share them.
#pragma once

#include <algorithm>
#include <vector>

#include "quire/adapter.h"

namespace quire {

struct AdaptedRun {
    const Adapter* adapter;
    int first_row;
    int num_rows;
    int index = 0;  // the expert that the rows go to
};

class AdaptedRows {
  public:
    static constexpr int kMostRows = 64;

    AdaptedRows() = default;
    explicit AdaptedRows(const StepView& step, const Kernels& kernels) {
        for (int i = 0; i < static_cast<int>(step.adapters.size()); ++i) {
            if (step.adapters[i] == nullptr) continue;
            forms_ = forms_ | kernels.forms_for(step.adapters[i]->number_type());
            add(step.adapters[i], static_cast<int>(step.query_starts[i]), static_cast<int>(step.query_starts[i + 1]));
        }
    }

    // In the order of their rows.
    const std::vector<AdaptedRun>& runs() const { return runs_; }
    // The forms of rows that the adapters' matrices need.
    RowForms forms() const { return forms_; }

    // The adapter of a row, null if it has none.
    const Adapter* at(int row) const {
        const auto run = first_from(row);
        return run != runs_.end() && run->first_row <= row ? run->adapter : nullptr;
    }

    // Calls work(run) for the runs in a tile, cut to its rows.
    template <typename Work>
    void for_runs(const LinearTile& tile, Work work) const {
        const int tile_end = tile.first_row + tile.num_rows;
        for (auto run = first_from(tile.first_row); run != runs_.end() && run->first_row < tile_end; ++run) {
            const int first = std::max(run->first_row, tile.first_row);
            const int end = std::min(run->first_row + run->num_rows, tile_end);
            work(AdaptedRun{run->adapter, first, end - first, run->index});
        }
    }

    bool any_in(const LinearTile& tile) const {
        const auto run = first_from(tile.first_row);
        return run != runs_.end() && run->first_row < tile.first_row + tile.num_rows;
    }

    void clear() { runs_.clear(); }
    void reserve(std::size_t num_runs) { runs_.reserve(num_runs); }

    // Appends rows.
    void add(const Adapter* adapter, int first, int end, int index = 0) {
        while (first < end) {
            const bool follows = !runs_.empty() && runs_.back().adapter == adapter && runs_.back().index == index &&
                                 runs_.back().first_row + runs_.back().num_rows == first &&
                                 runs_.back().num_rows < kMostRows;
            if (!follows) runs_.push_back({adapter, first, 0, index});
            const int count = std::min(end - first, kMostRows - runs_.back().num_rows);
            runs_.back().num_rows += count;
            first += count;
        }
    }

  private:
    // The first run that includes or follows a row.
    std::vector<AdaptedRun>::const_iterator first_from(int row) const {
        return std::partition_point(runs_.begin(), runs_.end(),
                                    [row](const AdaptedRun& run) { return run.first_row + run.num_rows <= row; });
    }

    std::vector<AdaptedRun> runs_;
    RowForms forms_;
};

}  // namespace quire
