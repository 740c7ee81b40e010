// A recurrent layer of a step, for one member of the team: between the products with its inputs and with its output.
#pragma once

#include "member_rows.h"
#include "step_call.h"

namespace quire {

// The rows of a step: inputs before and after the filter, the outputs of states, and gates.
struct RecurrentRows {
    Rows inputs, filtered, outputs, gates;

    Rows inputs_at(int first) const { return {inputs.data + first, inputs.stride}; }
};

// The rows of a convolution are gates, values, output gates and outputs.
inline void convolve_rows(ThreadTeam::Member& member, const DecoderShape& shape, const Kernels& kernels,
                          const StepCall& call, int group, ConvolutionTask task) {
    const int num_chunks = shape.convolution.num_chunks();
    task.shape = &shape.convolution;
    member.for_pieces(call.num_sequences * num_chunks, [&](int piece) {
        const int sequence = piece / num_chunks;
        ConvolutionTask own = task;
        own.block_table = call.tables[group] + sequence * call.table_strides[group];
        own.first_token = static_cast<int>(call.query_starts[sequence]);
        own.num_tokens = static_cast<int>(call.query_starts[sequence + 1]) - own.first_token;
        own.num_late = call.num_late(sequence, shape.convolution.num_late);
        own.first_position = call.positions[own.first_token];
        kernels.convolve(own, piece % num_chunks);
    });
}

class RecurrentLayer {
  public:
    RecurrentLayer(const DecoderShape& shape, const Kernels& kernels, const StepCall& call, const RecurrentRows& rows)
        : shape_(shape), kernels_(kernels), call_(call), rows_(rows) {}

    // Adds the tokens of all sequences to their states, and writes their gated outputs to the rows of gates.
    void run(ThreadTeam::Member& member, const LayerShape& layer, const LayerWeights& weights, const PagedKv& kv,
             float* scratch) const {
        const DeltaShape& delta = shape_.delta;
        const int num_records = delta.num_records();
        member.for_pieces(call_.num_sequences * num_records, [&](int piece) {
            const DeltaTask task = task_of(piece / num_records, layer.kv_group, weights, kv);
            kernels_.delta(task, piece % num_records, scratch);
        });
        const NormView norm = view_of(shape_.delta_norm, weights.delta_norm);
        if (delta.mamba) {
            return for_rows(member, call_.num_tokens, [&](int row) { finish_mamba(row, norm); });
        }
        for_rows(member, call_.num_tokens, [&](int row) {
            float* normed = rows_.filtered.row(row);
            for (int head = 0; head < delta.num_heads; ++head) {
                kernels_.normalize(rows_.outputs.row(row) + head * delta.value_dim,
                                   normed + delta.output_place(head) * delta.value_dim, delta.value_dim, norm);
            }
            kernels_.gate(rows_.gates.row(row), normed, delta.value_numbers(), Activation::kSilu);
        });
    }

  private:
    // Gates the outputs of a token, and normalises those of each group, if the model has that norm.
    void finish_mamba(int row, NormView norm) const {
        const DeltaShape& delta = shape_.delta;
        const int of_group = delta.heads_per_key() * delta.value_dim;
        float* gated = rows_.gates.row(row);
        kernels_.gate(gated, rows_.outputs.row(row), delta.value_numbers(), Activation::kSilu);
        if (norm.weight == nullptr) return;
        for (int group = 0; group < delta.num_key_heads; ++group) {
            kernels_.normalize(gated, gated, of_group, norm);
            gated += of_group;
            norm.weight += of_group;
        }
    }

    DeltaTask task_of(int sequence, int group, const LayerWeights& weights, const PagedKv& kv) const {
        DeltaTask task;
        task.shape = &shape_.delta;
        task.filter = weights.filter.data();
        if (!weights.filter_bias.empty()) task.filter_bias = weights.filter_bias.data();
        task.skip = weights.mamba_skip.data();
        task.decay_offsets = weights.delta_decay_offsets.data();
        task.decay_speeds = weights.delta_decay_speeds.data();
        task.kv = kv;
        task.inputs = rows_.inputs;
        task.filtered = rows_.filtered;
        task.output = rows_.outputs;
        task.block_table = call_.tables[group] + sequence * call_.table_strides[group];
        task.first_token = static_cast<int>(call_.query_starts[sequence]);
        task.num_tokens = static_cast<int>(call_.query_starts[sequence + 1]) - task.first_token;
        task.num_late = call_.num_late(sequence, shape_.delta.num_late);
        task.first_position = call_.positions[task.first_token];
        return task;
    }

    const DecoderShape& shape_;
    const Kernels& kernels_;
    const StepCall& call_;
    const RecurrentRows rows_;
};

}  // namespace quire
