// What adapters add to the products of a step, for one member of the team.
//
//     reduce    low(i) = scale * A x, of each matrix that x enters     a phase of its own, for runs of rows
//     add       output += B * low(i)                                   in a piece of the product, for its tile
#pragma once

#include <array>
#include <cstddef>

#include "activations.h"
#include "adapted_rows.h"

namespace quire {

class LowRankProducts {
  public:
    // `low` and `rounded` have room for the rows of a step, `stride` floats each.
    LowRankProducts(const AdaptedRows& adapted, const Kernels& kernels,
                    const std::array<Buffer<float>, kMostAdaptedAtOnce>& low,
                    const std::array<Buffer<std::byte>, kMostAdaptedAtOnce>& rounded, int stride, int num_rows)
        : adapted_(adapted), kernels_(kernels), low_(low), rounded_(rounded), stride_(stride), num_rows_(num_rows) {}

    template <std::size_t kCount>
    void reduce(ThreadTeam::Member& member, int layer, const std::array<Adapted, kCount>& matrices,
                const LinearInput& input) const {
        const std::vector<AdaptedRun>& runs = adapted_.runs();
        if (runs.empty()) return;
        member.for_pieces(static_cast<int>(runs.size() * kCount), [&](int piece) {
            const AdaptedRun& run = runs[piece / kCount];
            const int place = static_cast<int>(piece % kCount);
            const LowRank& low_rank = run.adapter->at(layer, matrices[place]);
            if (low_rank.empty()) return;
            const MatrixView a = low_rank.a.view();
            const LinearInput output = low(place);
            const LinearTile tile = {
                .first_row = run.first_row, .num_rows = run.num_rows, .num_panels = a.num_panels()};
            kernels_.linear(a, input, output.rows, tile, false);
            for (int row = run.first_row; row < run.first_row + run.num_rows; ++row) {
                float* numbers = output.rows.row(row);
                for (int i = 0; i < a.num_outputs; ++i) numbers[i] *= low_rank.scale;
                kernels_.round_row(output, kernels_.forms_for(low_rank.b.view().type), a.num_outputs, row);
            }
        });
    }

    void add(int layer, Adapted which, int place, const Rows& output, const LinearTile& tile) const {
        adapted_.for_runs(tile, [&](const AdaptedRun& run) {
            const LowRank& low_rank = run.adapter->at(layer, which);
            if (low_rank.empty()) return;
            const LinearTile part = {.first_row = run.first_row,
                                     .num_rows = run.num_rows,
                                     .first_panel = tile.first_panel,
                                     .num_panels = tile.num_panels,
                                     .next_panel = tile.first_panel};
            kernels_.linear(low_rank.b.view(), low(place), output, part, true);
        });
    }

  private:
    LinearInput low(int place) const { return {{low_[place].data(), stride_}, {rounded_[place].data(), num_rows_}}; }

    const AdaptedRows& adapted_;
    const Kernels& kernels_;
    const std::array<Buffer<float>, kMostAdaptedAtOnce>& low_;
    const std::array<Buffer<std::byte>, kMostAdaptedAtOnce>& rounded_;
    const int stride_, num_rows_;
};

}  // namespace quire
