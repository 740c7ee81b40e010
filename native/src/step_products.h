// The rows of a step, and the products that the team computes with them.
#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "activations.h"
#include "low_rank_products.h"
#include "member_rows.h"
#include "quire/linear_pieces.h"
#include "step_call.h"
#include "xielu.h"

namespace quire {

// What each member of the team has of a step. Every function is a phase, with a barrier after it.
class Decoder::Products {
  protected:
    Products(Decoder& decoder, const StepCall& call, ThreadTeam::Member& member)
        : shape_(decoder.shape_),
          kernels_(decoder.kernels_),
          weights_(decoder.weights),
          a_(*decoder.activations_),
          view_(call),
          member_(member),
          num_threads_(decoder.team_.size()),
          sizes_(decoder.shape_),
          hidden_{a_.hidden.data(), sizes_.hidden},
          normed_{a_.normed.data(), sizes_.hidden},
          update_{a_.update.data(), sizes_.hidden},
          query_{a_.query.data(), sizes_.query},
          attended_{a_.attended.data(), sizes_.query},
          key_{a_.key.data(), sizes_.key},
          value_{a_.value.data(), sizes_.key},
          heads_{a_.heads.data(), sizes_.heads},
          query_down_{a_.query_down.data(), sizes_.query_down},
          gate_{a_.gate.data(), sizes_.gate},
          inner_{a_.inner.data(), sizes_.inner},
          ups_{a_.ups.data(), sizes_.inner},
          layer_inputs_{a_.layer_inputs.data(), sizes_.layer_inputs},
          low_rank_(call.adapted, kernels_, a_.low, sizes_, call.num_tokens),
          expert_low_rank_(a_.experts.adapted, kernels_, a_.low, sizes_, call.num_tokens * shape_.experts_per_token,
                           &a_.experts.num_runs) {}

    template <typename Work>
    void for_rows(int num_rows, Work work) {
        quire::for_rows(member_, num_rows, work);
    }

    LinearPieces pieces_for(const MatrixView& matrix, int num_rows) const {
        return LinearPieces(matrix, num_rows, num_threads_);
    }

    LinearInput rounded(const Rows& rows, int num_rows) const { return {rows, {a_.rounded.data(), num_rows}}; }

    RowForms forms_for(const PackedMatrix& matrix) const { return kernels_.forms_for(matrix.view().type); }

    void round(const LinearInput& input, RowForms forms, int num_inputs) {
        if (!forms.any()) return;
        for_rows(input.rounded.num_rows, [&](int row) { kernels_.round_row(input, forms, num_inputs, row); });
    }

    void linear(const PackedMatrix& packed, const Rows& rows, const Rows& output, int num_rows, bool accumulate) {
        const MatrixView matrix = packed.view();
        const LinearInput input = rounded(rows, num_rows);
        round(input, forms_for(packed), matrix.num_inputs);
        const LinearPieces pieces = pieces_for(matrix, num_rows);
        member_.for_pieces(pieces.count(),
                           [&](int piece) { kernels_.linear(matrix, input, output, pieces.tile(piece), accumulate); });
    }

    // The phase before a product of rows, if any row of the step has an adapter.
    template <std::size_t kCount>
    void reduce(const LowRankProducts& products, const std::array<Adapted, kCount>& matrices,
                const LinearInput& input) {
        if (!view_.adapted.runs().empty()) products.reduce(member_, layer_, matrices, input);
    }

    // The product of all rows with a matrix of the layer that can have adapters.
    void adapted_linear(Adapted which, const PackedMatrix& packed, const Rows& rows, const Rows& output,
                        bool accumulate) {
        const MatrixView matrix = packed.view();
        const LinearInput input = rounded(rows, view_.num_tokens);
        round(input, forms_for(packed) | view_.adapted.forms(), matrix.num_inputs);
        reduce<1>(low_rank_, {which}, input);
        const LinearPieces pieces = pieces_for(matrix, view_.num_tokens);
        member_.for_pieces(pieces.count(), [&](int piece) {
            const LinearTile tile = pieces.tile(piece);
            kernels_.linear(matrix, input, output, tile, accumulate);
            low_rank_.add(layer_, which, 0, output, tile);
        });
    }

    // The product of all rows with a matrix that has bounds. `clipped` has room for its inputs, and may be the rows.
    void bounded_linear(const PackedMatrix& packed, const Rows& rows, const Rows& clipped, const Rows& output) {
        const MatrixView matrix = packed.view();
        const Bounds bounds = *packed.bounds();
        const LinearInput input = rounded(clipped, view_.num_tokens);
        const RowForms forms = forms_for(packed);
        for_rows(view_.num_tokens, [&](int row) {
            const float* from = rows.row(row);
            float* to = clipped.row(row);
            for (int i = 0; i < matrix.num_inputs; ++i)
                to[i] = std::clamp(from[i], bounds.input_low, bounds.input_high);
            kernels_.round_row(input, forms, matrix.num_inputs, row);
        });
        const LinearPieces pieces = pieces_for(matrix, view_.num_tokens);
        member_.for_pieces(pieces.count(), [&](int piece) {
            const LinearTile tile = pieces.tile(piece);
            kernels_.linear(matrix, input, output, tile, false);
            const int first = tile.first_panel * kPanelWidth;
            const int end = std::min(first + tile.num_panels * kPanelWidth, matrix.num_outputs);
            for (int row = tile.first_row; row < tile.first_row + tile.num_rows; ++row) {
                float* to = output.row(row);
                for (int i = first; i < end; ++i) to[i] = std::clamp(to[i], bounds.output_low, bounds.output_high);
            }
        });
    }

    // Writes the norms of the rows of `input` to `output`.
    void normalize(const NormWeights& norm, const Rows& input, const Rows& output, int num_rows) {
        const NormView view = view_of(shape_.norm, norm);
        for_rows(num_rows,
                 [&](int row) { kernels_.normalize(input.row(row), output.row(row), shape_.hidden_size, view); });
    }

    // The norms of the hidden states, in the forms that the products with some matrices need.
    template <typename... Matrices>
    LinearInput normed(const NormWeights& norm, const Matrices&... matrices) {
        const RowForms forms = (forms_for(matrices) | ... | view_.adapted.forms());
        const bool normalizes = !norm.weight.empty();
        const LinearInput input = rounded(normalizes ? normed_ : hidden_, view_.num_tokens);
        const NormView view = view_of(shape_.norm, norm);
        for_rows(view_.num_tokens, [&](int row) {
            if (normalizes) kernels_.normalize(hidden_.row(row), normed_.row(row), shape_.hidden_size, view);
            kernels_.round_row(input, forms, shape_.hidden_size, row);
        });
        return input;
    }

    // hidden += scale * after(matrix * input), then hidden = joined(hidden); the model may lack either norm.
    void join(Adapted which, const PackedMatrix& matrix, const Rows& input, const NormWeights& after,
              const NormWeights& joined) {
        if (matrix.bounds()) {
            bounded_linear(matrix, input, input, update_);
            join_update(after);
        } else if (after.weight.empty() && shape_.residual_scale == 1.0F) {
            adapted_linear(which, matrix, input, hidden_, true);
        } else {
            adapted_linear(which, matrix, input, update_, false);
            join_update(after);
        }
        if (!joined.weight.empty()) normalize(joined, hidden_, hidden_, view_.num_tokens);
    }

    void join_update(const NormWeights& after) {
        const NormView view = view_of(shape_.norm, after);
        for_rows(view_.num_tokens, [&](int row) {
            float* update = update_.row(row);
            if (view.weight != nullptr) kernels_.normalize(update, update, shape_.hidden_size, view);
            for (int i = 0; i < shape_.hidden_size; ++i) update[i] *= shape_.residual_scale;
            kernels_.add(hidden_.row(row), update, shape_.hidden_size);
        });
    }

    float* scratch() const { return a_.scratch.data() + member_.index() * scratch_of(shape_); }

    // Computes several products of one input in one phase: first all pieces of one, then all pieces of the next.
    // `adapted`: the adapters' names of their matrices.
    template <std::size_t kCount>
    void project(const std::array<const PackedMatrix*, kCount>& packed, const std::array<Rows, kCount>& outputs,
                 const LinearInput& input, const std::array<Adapted, kCount>& adapted) {
        reduce(low_rank_, adapted, input);
        MatrixView matrices[kCount];
        std::array<std::optional<LinearPieces>, kCount> pieces;
        int ends[kCount], total = 0;
        for (std::size_t i = 0; i < kCount; ++i) {
            matrices[i] = packed[i]->view();
            pieces[i].emplace(pieces_for(matrices[i], view_.num_tokens));
            ends[i] = total += pieces[i]->count();
        }
        member_.for_pieces(total, [&](int piece) {
            std::size_t which = 0;
            while (piece >= ends[which]) ++which;
            const int own = which == 0 ? piece : piece - ends[which - 1];
            const LinearTile tile = pieces[which]->tile(own);
            kernels_.linear(matrices[which], input, outputs[which], tile, false);
            low_rank_.add(layer_, adapted[which], static_cast<int>(which), outputs[which], tile);
        });
    }

    // Rows whose heads are `step` floats apart.
    struct Heads {
        Rows rows;
        int step;

        Rows of(int head) const { return {rows.data + static_cast<std::size_t>(head) * step, rows.stride}; }
    };

    // Multiplies the first numbers of each head of each row by the head's matrix, and adds the adapters' part.
    void multiply_heads(Adapted which, const std::vector<PackedMatrix>& matrices, const Heads& from, const Heads& to) {
        const MatrixView first = matrices[0].view();
        const RowForms forms = forms_for(matrices[0]) | view_.adapted.forms();
        const auto input = [&](int head) {
            const std::size_t bytes = RoundedRows::bytes(first.num_inputs, view_.num_tokens);
            return LinearInput{from.of(head), {a_.rounded.data() + head * bytes, view_.num_tokens}};
        };
        if (forms.any()) {
            for_rows(view_.num_tokens, [&](int row) {
                for (int head = 0; head < shape_.num_heads; ++head) {
                    kernels_.round_row(input(head), forms, first.num_inputs, row);
                }
            });
        }
        if (!view_.adapted.runs().empty()) low_rank_.reduce_heads(member_, layer_, which, input);
        const LinearPieces pieces = pieces_for(first, view_.num_tokens);
        member_.for_pieces(shape_.num_heads * pieces.count(), [&](int piece) {
            const int head = piece / pieces.count();
            const LinearTile tile = pieces.tile(piece % pieces.count());
            kernels_.linear(matrices[head].view(), input(head), to.of(head), tile, false);
            low_rank_.add_to_head(layer_, which, head, to.of(head), tile);
        });
    }

    // The hidden numbers of a layer's MLP for all rows; in a layer with experts, of the shared MLP.
    void expand_all(const LayerWeights& weights, const LinearInput& input) {
        if (shape_.bounded) {
            bounded_linear(weights.up, input.rows, update_, ups_);
            bounded_linear(weights.gate, input.rows, update_, inner_);
            const int size = round_up(weights.up.view().num_outputs, kPanelWidth);
            return for_rows(view_.num_tokens,
                            [&](int row) { kernels_.gate(inner_.row(row), ups_.row(row), size, shape_.activation); });
        }
        reduce<2>(low_rank_, {Adapted::kGate, Adapted::kUp}, input);
        const MatrixView up = weights.up.view(), gate = weights.gate.view();
        const LinearPieces pieces = pieces_for(up, view_.num_tokens);
        member_.for_pieces(pieces.count(), [&](int piece) {
            const LinearTile tile = pieces.tile(piece);
            if (!low_rank_.any_in(tile)) return expand(gate, up, input, tile);
            expand_adapted(low_rank_, {Adapted::kGate, Adapted::kUp}, {gate, up}, input, tile);
        });
    }

    // inner = activation(gate(input)) * up(input), or activation(up(input)) without a gate.
    void expand(const MatrixView& gate, const MatrixView& up, const LinearInput& input, const LinearTile& tile) const {
        if (shape_.gated) return kernels_.gated_linear(gate, up, input, inner_, tile, shape_.activation);
        kernels_.linear(up, input, inner_, tile, false);
        activate(tile, false);
    }

    void activate(const LinearTile& tile, bool gated) const {
        const int first = tile.first_panel * kPanelWidth, count = tile.num_panels * kPanelWidth;
        const std::vector<float>& numbers = weights_.layers[layer_].xielu;
        for (int row = tile.first_row; row < tile.first_row + tile.num_rows; ++row) {
            float* values = inner_.row(row) + first;
            if (!numbers.empty()) {
                xielu(kernels_, numbers.data(), values, count);
            } else if (gated) {
                kernels_.gate(values, ups_.row(row) + first, count, shape_.activation);
            } else {
                kernels_.activate(values, count, shape_.activation);
            }
        }
    }

    // The same for a tile with rows that have an adapter, whose part is added first. Other rows keep their bits.
    // Takes two matrices: the gate, then up.
    void expand_adapted(const LowRankProducts& products, const std::array<Adapted, 2>& which,
                        const std::array<MatrixView, 2>& matrices, const LinearInput& input,
                        const LinearTile& tile) const {
        const Rows& ups = shape_.gated ? ups_ : inner_;
        kernels_.linear(matrices[1], input, ups, tile, false);
        products.add(layer_, which[1], 1, ups, tile);
        if (shape_.gated) {
            kernels_.linear(matrices[0], input, inner_, tile, false);
            products.add(layer_, which[0], 0, inner_, tile);
        }
        activate(tile, shape_.gated);
    }

    const DecoderShape& shape_;
    const Kernels& kernels_;
    const DecoderWeights& weights_;
    Activations& a_;
    const StepCall& view_;
    ThreadTeam::Member& member_;
    const int num_threads_;
    const ActivationSizes sizes_;
    const Rows hidden_, normed_, update_, query_, attended_, key_, value_, heads_, query_down_, gate_, inner_, ups_;
    const Rows layer_inputs_;
    const LowRankProducts low_rank_, expert_low_rank_;
    int layer_ = 0;
};

}  // namespace quire
