// Work on the rows of a step, divided among the members of the team.
#pragma once

#include <algorithm>

#include "quire/decoder.h"

namespace quire {

// The number of rows that members claim at a time, if one row is little work.
constexpr int kRowsPerPiece = 4;

// Calls work(row) for every row, in pieces of several rows.
template <typename Work>
void for_rows(ThreadTeam::Member& member, int num_rows, Work work) {
    member.for_pieces((num_rows + kRowsPerPiece - 1) / kRowsPerPiece, [&](int piece) {
        const int first = piece * kRowsPerPiece, end = std::min(num_rows, first + kRowsPerPiece);
        for (int row = first; row < end; ++row) work(row);
    });
}

inline NormView view_of(const NormShape& shape, const NormWeights& weights) {
    return {.weight = weights.weight.data(),
            .bias = weights.bias.empty() ? nullptr : weights.bias.data(),
            .epsilon = shape.epsilon,
            .center = shape.center,
            .unit_offset = shape.unit_offset};
}

}  // namespace quire
