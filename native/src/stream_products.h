// The phases of a step with four residual streams (AltUp; see StreamsSpec in Python), LAuReL and thresholds of gates.
//
// The first stream is in the rows of hidden states, where layers read and change it; the others are in rows of their
// own. During a layer, the place of the first stream keeps its prediction.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "step_products.h"

namespace quire {

class Decoder::StreamProducts : protected Products {
  protected:
    StreamProducts(Decoder& decoder, const StepCall& call, ThreadTeam::Member& member)
        : Products(decoder, call, member) {}

    // Makes the other streams of the embedded rows.
    void open_streams() {
        for (int i = 1; i < kStreams; ++i) {
            linear(weights_.stream_in[i - 1], hidden_, stream(i), view_.num_tokens, false);
        }
        for_rows(view_.num_tokens, [&](int row) {
            for (int i = 1; i < kStreams; ++i) set_length(stream(i).row(row), hidden_.row(row));
        });
    }

    // Predicts all streams from one another, before a layer.
    void predict_streams(const LayerWeights& weights) {
        weigh_streams(weights);
        for_rows(view_.num_tokens, [&](int row) {
            float mixing[kStreams * kStreams];
            multiply(weights.stream_predict, update_.row(row), kStreams * kStreams, mixing);
            float* rows[kStreams] = {hidden_.row(row)};
            for (int i = 1; i < kStreams; ++i) rows[i] = stream(i).row(row);
            kernels_.mix(rows, kStreams, mixing, shape_.hidden_size);
            std::memcpy(stream(0).row(row), hidden_.row(row), shape_.hidden_size * sizeof(float));
        });
    }

    // Corrects all streams by the output of a layer, and leaves what gates the layer's own input in the rows of norms.
    void correct_streams(const LayerWeights& weights) {
        weigh_streams(weights);
        const int size = shape_.hidden_size;
        for_rows(view_.num_tokens, [&](int row) {
            float shares[kStreams];
            multiply(weights.stream_correct, update_.row(row), kStreams, shares);
            float *change = hidden_.row(row), *first = stream(0).row(row), *gating = normed_.row(row);
            for (int d = 0; d < size; ++d) change[d] -= first[d];
            for (int i = 0; i < kStreams; ++i) {
                float* to = stream(i).row(row);
                const float share = 1.0F + shares[i];
                for (int d = 0; d < size; ++d) to[d] += share * change[d];
            }
            std::memcpy(change, first, size * sizeof(float));
            const float* scale = weights.stream_scale.empty() ? nullptr : weights.stream_scale.data();
            for (int d = 0; d < size; ++d) gating[d] = scale == nullptr ? first[d] : first[d] * scale[d];
        });
    }

    // Adds what a layer has made of its own input to the other streams.
    void add_to_streams(const LayerWeights& weights) {
        const NormView norm = view_of(shape_.norm, weights.after_input_norm);
        for_rows(view_.num_tokens, [&](int row) {
            float* update = update_.row(row);
            kernels_.normalize(update, update, shape_.hidden_size, norm);
            for (int i = 1; i < kStreams; ++i) kernels_.add(stream(i).row(row), update, shape_.hidden_size);
        });
    }

    // hidden = the mean of all streams.
    void merge_streams() {
        const int size = shape_.hidden_size;
        for_rows(view_.num_tokens,
                 [&](int row) { std::memcpy(stream(0).row(row), hidden_.row(row), size * sizeof(float)); });
        for (int i = 1; i < kStreams; ++i) {
            linear(weights_.stream_out[i - 1], stream(i), update_, view_.num_tokens, false);
            for_rows(view_.num_tokens, [&](int row) {
                set_length(update_.row(row), stream(0).row(row));
                kernels_.add(hidden_.row(row), update_.row(row), size);
                for (int d = 0; d < size && i == kStreams - 1; ++d) hidden_.row(row)[d] *= 1.0F / kStreams;
            });
        }
    }

    bool has_finite_streams(int row) const {
        for (int i = 1; i < kStreams && shape_.has_streams; ++i) {
            if (!kernels_.all_finite(stream(i).row(row), shape_.hidden_size)) return false;
        }
        return true;
    }

    // Adds LAuReL to the residual stream after attention, whose input is still in the rows of norms.
    void add_laurel(const LayerWeights& weights) {
        linear(weights.laurel_in, normed_, inner_, view_.num_tokens, false);
        linear(weights.laurel_out, inner_, update_, view_.num_tokens, false);
        const NormView norm = view_of(shape_.norm, weights.laurel_norm);
        for_rows(view_.num_tokens, [&](int row) {
            float *hidden = hidden_.row(row), *update = update_.row(row);
            const float* input = normed_.row(row);
            kernels_.normalize(update, update, shape_.hidden_size, norm);
            for (int d = 0; d < shape_.hidden_size; ++d) hidden[d] = (hidden[d] + (input[d] + update[d])) * kRootOfHalf;
        });
    }

    // inner = activation(the part of each gate above a threshold) * up(input); the threshold depends on the whole row.
    void expand_above(const LayerWeights& weights, const LinearInput& input, float deviations) {
        project<2>({&weights.gate, &weights.up}, {inner_, ups_}, input, {Adapted::kGate, Adapted::kUp});
        const int count = weights.gate.view().num_outputs;
        for_rows(view_.num_tokens, [&](int row) {
            float* gates = inner_.row(row);
            const float mean = kernels_.mean(gates, count);
            const float threshold = mean + std::sqrt(kernels_.mean_square(gates, count, mean)) * deviations;
            for (int i = 0; i < count; ++i) {
                const float above = gates[i] - threshold;
                gates[i] = above < 0.0F ? 0.0F : above;  // NaN stays
            }
            kernels_.gate(gates, ups_.row(row), round_up(count, kPanelWidth), shape_.activation);
        });
    }

  private:
    static constexpr float kRootOfHalf = 0.70710678F;
    static constexpr float kShortest = 1e-5F;  // the least mean square of a row that gets another length

    Rows stream(int index) const {
        return {a_.streams.data() + static_cast<std::size_t>(index) * sizes_.hidden, sizes_.streams};
    }

    // The first numbers of each row of updates become the weights of the streams for the row of hidden states.
    void weigh_streams(const LayerWeights& weights) {
        normalize(weights.stream_norm, hidden_, normed_, view_.num_tokens);
        linear(weights.stream_router, normed_, update_, view_.num_tokens, false);
        const float scale = 1.0F / static_cast<float>(shape_.hidden_size);
        for_rows(view_.num_tokens, [&](int row) {
            float* scores = update_.row(row);
            for (int i = 0; i < kStreams; ++i) scores[i] *= scale;
            kernels_.soft_cap(scores, kStreams, 1.0F);
        });
    }

    // output = matrix * the weights of the streams
    static void multiply(const std::vector<float>& matrix, const float* weights, int num_outputs, float* output) {
        for (int j = 0; j < num_outputs; ++j) {
            output[j] = 0.0F;
            for (int i = 0; i < kStreams; ++i) output[j] += matrix[j * kStreams + i] * weights[i];
        }
    }

    // Scales a row so that its mean square is that of another.
    void set_length(float* row, const float* other) const {
        const int size = shape_.hidden_size;
        const float square = std::max(kernels_.mean_square(row, size, 0.0F), kShortest);  // NaN stays
        const float factor = std::sqrt(kernels_.mean_square(other, size, 0.0F)) / std::sqrt(square);
        for (int d = 0; d < size; ++d) row[d] *= factor;
    }
};

}  // namespace quire
