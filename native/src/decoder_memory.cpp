// The memory of a decoder: what it borrows and owns, its size, and its allocation.
#include <algorithm>

#include "activations.h"
#include "quire/decoder.h"

namespace quire {

std::size_t activation_bytes(const DecoderShape& shape, int num_tokens, int num_logits, int num_threads) {
    const ActivationSizes sizes(shape);
    const std::size_t of_latents = sizes.heads + sizes.query_down;
    const std::size_t of_delta = sizes.gate + sizes.delta_inputs + sizes.delta_filtered;
    const std::size_t per_token = 3 * sizes.hidden + 2 * sizes.query + 2 * sizes.key + sizes.layer_inputs +
                                  sizes.streams + sizes.angles + of_latents + of_delta;
    const std::size_t assignments = std::max(1, shape.experts_per_token);
    std::size_t floats = num_tokens * (per_token + assignments * sizes.inner);
    if (shape.num_experts > 0) {
        floats += num_tokens * (sizes.experts + sizes.ranks + 2 * assignments * sizes.hidden);
    }
    floats += static_cast<std::size_t>(num_logits) * 2 * sizes.hidden;
    floats += num_threads * scratch_of(shape) + sizes.gate_floats(num_tokens);
    std::size_t of_adapters = 0;
    for (int place = 0; place < kMostAdaptedAtOnce; ++place) {
        of_adapters += sizes.low_floats(place, num_tokens) * sizeof(float) + sizes.low_rounded_bytes(place, num_tokens);
    }
    return floats * sizeof(float) + of_adapters + sizes.rounded_bytes(num_tokens, num_tokens * assignments, num_logits);
}

std::size_t Decoder::weight_bytes() const {
    std::size_t total = weights.embedding_in.num_bytes() + weights.embedding_out.num_bytes() + weights.head.num_bytes();
    total += weights.layer_inputs.num_bytes();
    for (const auto* matrices : {&weights.stream_in, &weights.stream_out}) {
        for (const PackedMatrix& each : *matrices) total += each.num_bytes();
    }
    const auto table = [](const EmbeddingRows& rows, int count) {
        return rows.data == nullptr ? 0 : count * rows.bytes_of_row();
    };
    const int num_inputs = shape_.layer_inputs.num_tokens;
    total += table(weights.embedding, shape_.vocab_size);
    total += table(weights.layer_embedding, num_inputs > 0 ? num_inputs : shape_.vocab_size);
    const auto norm = [](const NormWeights& norm) { return (norm.weight.size() + norm.bias.size()) * sizeof(float); };
    for (const auto* table : {&weights.positions, &weights.token_types, &weights.distance_bias}) {
        total += table->size() * sizeof(float);
    }
    for (const NormWeights* each : {&weights.embedding_norm, &weights.final_norm, &weights.layer_inputs_norm,
                                    &weights.token_norm, &weights.state_norm}) {
        total += norm(*each);
    }
    for (const LayerWeights& layer : weights.layers) {
        for (const NormWeights* each :
             {&layer.attention_norm, &layer.after_attention_norm, &layer.joined_attention_norm, &layer.mlp_norm,
              &layer.after_mlp_norm, &layer.joined_mlp_norm, &layer.query_norm, &layer.key_norm, &layer.query_down_norm,
              &layer.latent_norm, &layer.delta_norm, &layer.after_input_norm, &layer.router_norm, &layer.experts_norm,
              &layer.after_experts_norm, &layer.after_shared_norm, &layer.laurel_norm, &layer.stream_norm}) {
            total += norm(*each);
        }
        for (const PackedMatrix* each :
             {&layer.query, &layer.key, &layer.value, &layer.output, &layer.query_down, &layer.latent, &layer.gate,
              &layer.up, &layer.down, &layer.router, &layer.shared_router, &layer.attention_gate, &layer.delta_rate,
              &layer.delta_decay, &layer.input_gate, &layer.input_output, &layer.laurel_in, &layer.laurel_out,
              &layer.stream_router}) {
            total += each->num_bytes();
        }
        for (const auto* of_heads : {&layer.key_up, &layer.value_up}) {
            for (const PackedMatrix& each : *of_heads) total += each.num_bytes();
        }
        total += (layer.sinks.size() + layer.router_offset.size() + layer.expert_factors.size()) * sizeof(float);
        total += (layer.filter.size() + layer.filter_bias.size() + layer.mamba_skip.size()) * sizeof(float);
        total += layer.delta_decay_offsets.size() * sizeof(float);
        total +=
            (layer.stream_predict.size() + layer.stream_correct.size() + layer.stream_scale.size()) * sizeof(float);
        total += layer.delta_decay_speeds.size() * sizeof(double);
        for (const ExpertWeights& expert : layer.experts) {
            total += expert.gate.num_bytes() + expert.up.num_bytes() + expert.down.num_bytes();
        }
    }
    return total;
}

Decoder::Decoder(DecoderShape shape, const Kernels& kernels, ThreadTeam& team)
    : shape_(std::move(shape)), kernels_(kernels), team_(team), activations_(std::make_unique<Activations>()) {
    int num_groups = 0;
    for (const LayerShape& layer : shape_.layers) num_groups = std::max(num_groups, layer.kv_group + 1);
    activations_->attention_pieces.resize(num_groups);
    first_reader_ = static_cast<int>(shape_.layers.size());
    while (first_reader_ > 0 && !shape_.layers[first_reader_ - 1].has_keys) --first_reader_;
    if (first_reader_ < static_cast<int>(shape_.layers.size())) activations_->wanted_pieces.resize(num_groups);
    weights.layers.resize(shape_.layers.size());
    for (std::size_t i = 0; i < shape_.layers.size(); ++i) {
        if (shape_.value_norm) weights.layers[i].value_norm.weight.assign(shape_.head_dim_of(shape_.layers[i]), 1.0F);
        if (shape_.layers[i].sparse) weights.layers[i].experts.resize(shape_.num_experts);
        if (shape_.latent.rank == 0) continue;
        for (auto* of_heads : {&weights.layers[i].key_up, &weights.layers[i].value_up}) {
            of_heads->resize(shape_.num_heads);
        }
    }
}

Decoder::~Decoder() { team_.quiesce(); }

void Decoder::set_cache(std::vector<PagedKv> layers) {
    team_.quiesce();
    cache_ = std::move(layers);
}

void Decoder::reserve(int num_tokens, int num_logits) {
    const ActivationSizes sizes(shape_);
    Activations& a = *activations_;
    const bool needs_tokens = num_tokens > a.num_tokens, needs_logits = num_logits > a.num_logits;
    if (!needs_tokens && !needs_logits) return;
    team_.quiesce();
    num_tokens = std::max(num_tokens, a.num_tokens);
    num_logits = std::max(num_logits, a.num_logits);
    a.num_tokens = a.num_logits = 0;  // if an allocation fails, the next call begins again
    if (needs_tokens) {
        const std::size_t tokens = num_tokens, assignments = tokens * std::max(1, shape_.experts_per_token);
        for (Buffer<float>* buffer : {&a.hidden, &a.normed, &a.update}) buffer->allocate(tokens * sizes.hidden);
        for (Buffer<float>* buffer : {&a.query, &a.attended}) buffer->allocate(tokens * sizes.query);
        for (Buffer<float>* buffer : {&a.key, &a.value}) buffer->allocate(tokens * sizes.key);
        a.inner.allocate(assignments * sizes.inner);
        a.angles.allocate(tokens * sizes.angles);
        if (sizes.layer_inputs > 0) a.layer_inputs.allocate(tokens * sizes.layer_inputs);
        if (sizes.streams > 0) a.streams.allocate(tokens * sizes.streams);
        if (sizes.low > 0) {
            for (int place = 0; place < kMostAdaptedAtOnce; ++place) {
                a.low.numbers[place].allocate(sizes.low_floats(place, tokens));
                a.low.rounded[place].allocate(sizes.low_rounded_bytes(place, tokens));
            }
        }
        if (sizes.gate_floats(tokens) > 0) a.ups.allocate(sizes.gate_floats(tokens));
        if (sizes.heads > 0) a.heads.allocate(tokens * sizes.heads);
        if (sizes.query_down > 0) a.query_down.allocate(tokens * sizes.query_down);
        if (sizes.gate > 0) a.gate.allocate(tokens * sizes.gate);
        if (sizes.delta_inputs > 0) {
            a.delta_inputs.allocate(tokens * sizes.delta_inputs);
            a.delta_filtered.allocate(tokens * sizes.delta_filtered);
        }
        if (shape_.num_experts > 0) {
            a.router.allocate(tokens * sizes.experts);
            a.ranks.allocate(tokens * sizes.ranks);
            for (Buffer<float>* buffer : {&a.expert_input, &a.expert_output}) {
                buffer->allocate(assignments * sizes.hidden);
            }
            a.experts.reserve(shape_, num_tokens);
        }
        for (auto* pieces : {&a.attention_pieces, &a.wanted_pieces}) {
            for (AttentionPieces& each : *pieces) each.reserve(num_tokens, shape_.most_kv_heads());
        }
    }
    if (needs_logits) {
        for (Buffer<float>* buffer : {&a.wanted, &a.wanted_projected})
            buffer->allocate(num_logits * std::size_t(sizes.hidden));
    }
    const std::size_t assignments = std::size_t(num_tokens) * std::max(1, shape_.experts_per_token);
    const std::size_t rounded = sizes.rounded_bytes(num_tokens, assignments, num_logits);
    if (rounded > a.rounded.size()) a.rounded.allocate(rounded);
    if (a.scratch.size() == 0) a.scratch.allocate(team_.size() * scratch_of(shape_));
    a.num_tokens = num_tokens;
    a.num_logits = num_logits;
}

void Decoder::prepare_memory(const std::vector<MemoryRange>& kv_memory) {
    const Activations& a = *activations_;
    std::vector<MemoryRange> ranges = {a.rounded.range()};
    for (const Buffer<float>* buffer :
         {&a.hidden, &a.normed,     &a.update,       &a.query,          &a.attended,         &a.key,
          &a.value,  &a.inner,      &a.angles,       &a.wanted,         &a.wanted_projected, &a.scratch,
          &a.heads,  &a.query_down, &a.router,       &a.ranks,          &a.expert_input,     &a.expert_output,
          &a.ups,    &a.gate,       &a.delta_inputs, &a.delta_filtered, &a.layer_inputs,     &a.streams}) {
        ranges.push_back(buffer->range());
    }
    ranges.insert(ranges.end(), kv_memory.begin(), kv_memory.end());
    const std::vector<MemoryRange> packed = weights.memory.ranges();
    ranges.insert(ranges.end(), packed.begin(), packed.end());
    preparer_.start(ranges);
}

}  // namespace quire
