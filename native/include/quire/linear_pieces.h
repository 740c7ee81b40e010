// Cuts the product of some rows with a matrix into pieces for a team of threads.
//
//     panels ►                a piece: up to kMostRows rows and kMostPanels panels
//     rows   │ 0 │ 2 │ 4 │
//       ▼    │ 1 │ 3 │ 5 │    in this order, so that a thread reads its weights in one stream
//
// A piece has as many rows as possible, so that its weights are read from memory once. It has many panels, so that
// a stream of weights is long. If there are too few pieces for the team, they get smaller: fewer panels first, then
// fewer rows. No cut changes the order of a sum.
#pragma once

#include <algorithm>

#include "quire/kernels.h"

namespace quire {

class LinearPieces {
  public:
    static constexpr int kLeastPanels = 4, kMostPanels = 16, kLeastRows = 16, kMostRows = 256;

    LinearPieces(const MatrixView& matrix, int num_rows, int num_threads)
        : num_panels_(matrix.num_panels()), num_rows_(num_rows) {
        constexpr int kPiecesPerThread = 4;
        row_pieces_ = pieces_of(num_rows, kMostRows);
        const int wanted = std::max(1, kPiecesPerThread * num_threads / std::max(1, row_pieces_));
        panels_per_piece_ = std::clamp(num_panels_ / wanted / kLeastPanels * kLeastPanels, kLeastPanels, kMostPanels);
        const int for_every_thread = pieces_of(num_threads, pieces_of(num_panels_, panels_per_piece_));
        row_pieces_ = std::max(row_pieces_, std::min(for_every_thread, num_rows / kLeastRows));
    }

    // The maximum number of pieces that panels are cut into, for any team.
    static int most_panel_pieces(int num_panels) { return pieces_of(num_panels, kLeastPanels); }

    int count() const { return row_pieces_ * pieces_of(num_panels_, panels_per_piece_); }

    LinearTile tile(int piece) const {
        const int row_piece = piece % row_pieces_, panel = piece / row_pieces_ * panels_per_piece_;
        const int first_row = start_of(row_piece), next = panel + panels_per_piece_;
        return {.first_row = first_row,
                .num_rows = start_of(row_piece + 1) - first_row,
                .first_panel = panel,
                .num_panels = std::min(panels_per_piece_, num_panels_ - panel),
                .next_panel = next < num_panels_ ? next : panel};
    }

  private:
    static int pieces_of(int count, int per_piece) { return (count + per_piece - 1) / per_piece; }
    // Splits the rows evenly.
    int start_of(int row_piece) const { return static_cast<int>(std::int64_t{num_rows_} * row_piece / row_pieces_); }

    int num_panels_, num_rows_, row_pieces_, panels_per_piece_;
};

}  // namespace quire
