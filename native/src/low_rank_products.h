// Adds adapters to the products of a step, for one member of the team.
//
//     reduce    low(i) = scale * A x, for each matrix that x enters    a separate phase, for runs of rows
//     add       output += B * low(i)                                   in a piece of the product, for its tile
//
// Both also for products by head, where each head of a row is multiplied by its own matrix.
#pragma once

#include <array>
#include <cstddef>

#include "activations.h"
#include "adapted_rows.h"

namespace quire {

class LowRankProducts {
  public:
    // `memory` has room for these rows. `num_runs`: the number of runs, if one member counts them during the step.
    LowRankProducts(const AdaptedRows& adapted, const Kernels& kernels, const LowRankMemory& memory,
                    const ActivationSizes& sizes, int num_rows, const std::atomic<int>* num_runs = nullptr)
        : adapted_(adapted),
          kernels_(kernels),
          memory_(memory),
          sizes_(sizes),
          num_rows_(num_rows),
          num_runs_(num_runs) {}

    bool any_in(const LinearTile& tile) const { return adapted_.any_in(tile); }

    template <std::size_t kCount>
    void reduce(ThreadTeam::Member& member, int layer, const std::array<Adapted, kCount>& matrices,
                const LinearInput& input) const {
        const int num_runs = num_runs_ == nullptr ? static_cast<int>(adapted_.runs().size()) : num_runs_->load();
        member.for_pieces(num_runs * static_cast<int>(kCount), [&](int piece) {
            const AdaptedRun& run = adapted_.runs()[piece / kCount];
            const int place = static_cast<int>(piece % kCount);
            reduce_run(run.adapter->at(layer, matrices[place], run.index), input, low(place), run);
        });
    }

    // For input(head) of each head.
    template <typename Input>
    void reduce_heads(ThreadTeam::Member& member, int layer, Adapted which, Input input) const {
        const int num_heads = sizes_.num_heads;
        member.for_pieces(static_cast<int>(adapted_.runs().size()) * num_heads, [&](int piece) {
            const AdaptedRun& run = adapted_.runs()[piece / num_heads];
            const int head = piece % num_heads;
            reduce_run(run.adapter->at(layer, which, head), input(head), low_of_head(head), run);
        });
    }

    void add(int layer, Adapted which, int place, const Rows& output, const LinearTile& tile) const {
        adapted_.for_runs(tile, [&](const AdaptedRun& run) {
            add_run(run.adapter->at(layer, which, run.index), low(place), output, tile, run);
        });
    }

    void add_to_head(int layer, Adapted which, int head, const Rows& output, const LinearTile& tile) const {
        adapted_.for_runs(tile, [&](const AdaptedRun& run) {
            add_run(run.adapter->at(layer, which, head), low_of_head(head), output, tile, run);
        });
    }

  private:
    void reduce_run(const LowRank& low_rank, const LinearInput& input, const LinearInput& output,
                    const AdaptedRun& run) const {
        if (low_rank.empty()) return;
        const LinearTile tile = {
            .first_row = run.first_row, .num_rows = run.num_rows, .num_panels = low_rank.a.num_panels()};
        kernels_.linear(low_rank.a, input, output.rows, tile, false);
        for (int row = run.first_row; row < run.first_row + run.num_rows; ++row) {
            float* numbers = output.rows.row(row);
            for (int i = 0; i < low_rank.a.num_outputs; ++i) numbers[i] *= low_rank.scale;
            kernels_.round_row(output, kernels_.forms_for(low_rank.b.type), low_rank.a.num_outputs, row);
        }
    }

    void add_run(const LowRank& low_rank, const LinearInput& input, const Rows& output, const LinearTile& tile,
                 const AdaptedRun& run) const {
        if (low_rank.empty()) return;
        const LinearTile part = {.first_row = run.first_row,
                                 .num_rows = run.num_rows,
                                 .first_panel = tile.first_panel,
                                 .num_panels = tile.num_panels,
                                 .next_panel = tile.first_panel};
        kernels_.linear(low_rank.b, input, output, part, true);
    }

    LinearInput low(int place) const {
        return {{memory_.numbers[place].data(), sizes_.low}, {memory_.rounded[place].data(), num_rows_}};
    }

    LinearInput low_of_head(int head) const {
        const std::size_t bytes = RoundedRows::bytes(sizes_.low, num_rows_);
        return {
            {memory_.numbers[0].data() + static_cast<std::size_t>(head) * sizes_.low, sizes_.num_heads * sizes_.low},
            {memory_.rounded[0].data() + head * bytes, num_rows_}};
    }

    const AdaptedRows& adapted_;
    const Kernels& kernels_;
    const LowRankMemory& memory_;
    const ActivationSizes& sizes_;
    const int num_rows_;
    const std::atomic<int>* const num_runs_;
};

}  // namespace quire
