#include "expert_rows.h"

#include <algorithm>

namespace quire {
namespace {

int list_pieces(const LayerWeights& weights, const std::vector<int>& starts, PackedMatrix ExpertWeights::* which,
                int num_threads, std::vector<ExpertPiece>& pieces) {
    pieces.clear();
    for (int expert = 0; expert < static_cast<int>(weights.experts.size()); ++expert) {
        const int first = starts[expert], count = starts[expert + 1] - first;
        const LinearPieces cut((weights.experts[expert].*which).view(), count, num_threads);
        for (int piece = 0; piece < cut.count(); ++piece) {
            LinearTile tile = cut.tile(piece);
            tile.first_row += first;
            pieces.push_back({expert, tile});
        }
    }
    return static_cast<int>(pieces.size());
}

bool changes(const Adapter& adapter, int layer, int expert) {
    return !adapter.at(layer, Adapted::kExpertGate, expert).empty() ||
           !adapter.at(layer, Adapted::kExpertUp, expert).empty() ||
           !adapter.at(layer, Adapted::kExpertDown, expert).empty();
}

}  // namespace

void ExpertRows::reserve(const DecoderShape& shape, int num_tokens) {
    const std::size_t places = static_cast<std::size_t>(num_tokens) * shape.experts_per_token;
    token.resize(places);
    chosen.resize(places);
    weight.resize(places);
    place_of.resize(places);
    next_.resize(shape.num_experts);
    starts.resize(shape.num_experts + 1);
    const std::size_t row_pieces = places / LinearPieces::kLeastRows + shape.num_experts;
    const auto most = [row_pieces](int size) {
        return row_pieces * LinearPieces::most_panel_pieces(round_up(size, kPanelWidth) / kPanelWidth);
    };
    up_pieces.reserve(most(shape.expert_size));
    down_pieces.reserve(most(shape.hidden_size));
    if (shape.adapter_rank > 0) adapted.reserve(places);
}

void ExpertRows::sort(const DecoderShape& shape, const LayerWeights& weights, int layer, const AdaptedRows& tokens,
                      int num_tokens, int num_threads) {
    const int num_places = num_tokens * shape.experts_per_token;
    std::fill(starts.begin(), starts.end(), 0);
    for (int i = 0; i < num_places; ++i) ++starts[chosen[i] + 1];
    for (int expert = 0; expert < shape.num_experts; ++expert) starts[expert + 1] += starts[expert];
    next_.assign(starts.begin(), starts.end() - 1);
    for (int i = 0; i < num_places; ++i) {
        place_of[i] = next_[chosen[i]]++;
        token[place_of[i]] = i / shape.experts_per_token;
    }
    num_up_pieces = list_pieces(weights, starts, &ExpertWeights::up, num_threads, up_pieces);
    num_down_pieces = list_pieces(weights, starts, &ExpertWeights::down, num_threads, down_pieces);
    adapted.clear();
    for (int expert = 0; expert < shape.num_experts && !tokens.runs().empty(); ++expert) {
        for (int place = starts[expert]; place < starts[expert + 1]; ++place) {
            const Adapter* adapter = tokens.at(token[place]);
            if (adapter != nullptr && changes(*adapter, layer, expert)) adapted.add(adapter, place, place + 1, expert);
        }
    }
    num_runs = static_cast<int>(adapted.runs().size());
}

}  // namespace quire
