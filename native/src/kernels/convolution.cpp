// Short convolutions over the last tokens; the layout of a state is in kernels.h.
#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels_of_set.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

// The inputs of a chunk for an earlier token, that the state has stored.
const float* stored_inputs(const ConvolutionTask& task, int chunk, std::int64_t position) {
    const ConvolutionShape& shape = *task.shape;
    return task.record_at(chunk, task.first_position - 1) + shape.inputs_at(position);
}

// The inputs of a chunk for a token, or for one before it.
const float* inputs_of(const ConvolutionTask& task, int chunk, int token, int back) {
    if (back > token) return stored_inputs(task, chunk, task.first_position + token - back);
    return task.gates.row(task.first_token + token - back) + chunk * task.shape->chunk;
}

void filter_token(const ConvolutionTask& task, int chunk, int token) {
    const ConvolutionShape& shape = *task.shape;
    const std::int64_t position = task.first_position + token;
    const int row = task.first_token + token, first = chunk * shape.chunk;
    for (int i = 0; i < shape.chunk; i += kLanes) {
        Floats total = broadcast(0.0F);
        for (int place = 0; place < shape.filter_width; ++place) {
            const int back = shape.filter_width - 1 - place;
            if (back > position) continue;
            const float* weight = task.filter + static_cast<std::size_t>(place) * shape.size + first;
            total = fma(load(weight + i), load(inputs_of(task, chunk, token, back) + i), total);
        }
        store(task.output.row(row) + first + i, load(task.output_gates.row(row) + first + i) * total);
    }
}

// Stores the inputs of the last tokens, up to this one, and where the state ends.
void put(const ConvolutionTask& task, int chunk, int token) {
    const ConvolutionShape& shape = *task.shape;
    const std::int64_t position = task.first_position + token;
    float* record = task.record_at(chunk, position);
    for (int back = 0; back < shape.num_inputs_kept() && back <= position; ++back) {
        const float* from = inputs_of(task, chunk, token, back);
        float* to = record + shape.inputs_at(position - back);
        if (from != to) std::memcpy(to, from, shape.chunk * sizeof(float));
    }
    // A block may be stored on disk: nothing of the requests that had it before may be left in it.
    const int num_inputs = static_cast<int>(std::min<std::int64_t>(position + 1, shape.num_inputs_kept()));
    float* end = record + shape.record_floats();
    std::fill(record + num_inputs * shape.chunk, end, 0.0F);
    const StateEnd state = {1 + std::max(0, token - (task.num_tokens - task.num_late)),
                            static_cast<std::int32_t>(position)};
    std::memcpy(end - kStateEnd, &state, sizeof state);
}

// Whether these tokens can follow the state.
bool follows(const ConvolutionTask& task, int chunk) {
    if (task.first_position == 0) return true;
    StateEnd state;
    const float* record = task.record_at(chunk, task.first_position - 1);
    std::memcpy(&state, record + task.shape->record_floats() - kStateEnd, sizeof state);
    return state.allows(task.first_position);
}

}  // namespace

void convolve(const ConvolutionTask& task, int chunk) {
    const int first = chunk * task.shape->chunk, end = first + task.shape->chunk;
    if (!follows(task, chunk)) {
        for (int token = 0; token < task.num_tokens; ++token) {
            float* to = task.output.row(task.first_token + token);
            for (int i = first; i < end; ++i) to[i] = std::numeric_limits<float>::quiet_NaN();
        }
        return;
    }
    for (int row = task.first_token; row < task.first_token + task.num_tokens; ++row) {
        float* gate = task.gates.row(row);
        const float* value = task.values.row(row);
        for (int i = first; i < end; i += kLanes) store(gate + i, load(gate + i) * load(value + i));
    }
    for (int token = 0; token < task.num_tokens; ++token) filter_token(task, chunk, token);
    for (int token = 0; token < task.num_tokens; ++token) {
        if (task.is_stored_after(token)) put(task, chunk, token);
    }
}

}  // namespace quire::QUIRE_ISA
