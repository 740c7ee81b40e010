// The tokens of a step sorted by expert, so that the weights of an expert are read once.
//
//     tokens    0 1 2 3            chosen     {1, 4}  {1, 2}  {0, 4}  {1, 4}
//     places    of 0: 2  of 1: 0 1 3  of 2: 1  of 4: 0 2 3       the products of an expert: its places, cut into pieces
#pragma once

#include <atomic>
#include <vector>

#include "adapted_rows.h"
#include "quire/decoder.h"
#include "quire/linear_pieces.h"

namespace quire {

// A tile of the product of one expert.
struct ExpertPiece {
    int expert;
    LinearTile tile;
};

struct ExpertRows {
    std::vector<int> token;     // per place
    std::vector<int> chosen;    // [num_tokens, experts_per_token], ascending
    std::vector<float> weight;  // of the chosen ones
    std::vector<int> place_of;  // of the chosen ones
    std::vector<int> starts;    // per expert: its first place; and the end of the last
    std::vector<ExpertPiece> up_pieces, down_pieces;
    AdaptedRows adapted;  // the places whose adapter changes their expert
    // The numbers of pieces and runs. Atomic: one member sets them while others may read them.
    std::atomic<int> num_up_pieces{0}, num_down_pieces{0}, num_runs{0};

    void reserve(const DecoderShape& shape, int num_tokens);

    // Returns the weight of the expert at a place, for the token there.
    float weight_at(int place, int per_token) const {
        int chosen_at = token[place] * per_token;
        while (place_of[chosen_at] != place) ++chosen_at;
        return weight[chosen_at];
    }

    // Sorts the chosen experts of a layer; `tokens`: the rows that have an adapter. Allocates nothing.
    void sort(const DecoderShape& shape, const LayerWeights& weights, int layer, const AdaptedRows& tokens,
              int num_tokens, int num_threads);

  private:
    std::vector<int> next_;  // per expert
};

}  // namespace quire
