// The activations of a decoder: the working memory of a step, and its size per token and logit.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "attention_pieces.h"
#include "expert_rows.h"
#include "quire/decoder.h"

namespace quire {

// Queries, keys and values are computed together; in recurrent layers also gates, rates and decays.
constexpr int kMostAdaptedAtOnce = 6;

// A x for each of the matrices computed together, [rows, low], or for each head, [rows, heads, low]; and rounded.
struct LowRankMemory {
    std::array<Buffer<float>, kMostAdaptedAtOnce> numbers;
    std::array<Buffer<std::byte>, kMostAdaptedAtOnce> rounded;
};

// The floats for each token and each logit of a step, in addition to a fixed number.
struct ActivationSizes {
    explicit ActivationSizes(const DecoderShape& shape)
        : hidden(round_up(std::max(shape.hidden_size, shape.embedding_size), kPanelWidth)),
          query(round_up(
              std::max({shape.num_heads * shape.most_head_dim(), shape.delta.value_numbers(), shape.convolution.size}),
              kPanelWidth)),
          key(round_up(std::max(shape.most_key_numbers(), shape.convolution.size), kPanelWidth)),
          inner(round_up(std::max({shape.intermediate_size, shape.expert_size, shape.shared_size,
                                   shape.layer_inputs.size, shape.laurel_rank}),
                         kPanelWidth)),
          layer_inputs(static_cast<int>(shape.layers.size()) * shape.layer_inputs.size),
          streams(shape.has_streams ? kStreams * hidden : 0),
          experts(round_up(shape.num_experts, kPanelWidth)),
          ranks(round_up(shape.num_experts + shape.num_expert_groups, kPanelWidth)),
          low(round_up(shape.adapter_rank, kPanelWidth)),
          per_token(std::max(1, shape.experts_per_token)),
          whole_ups(shape.bounded || std::any_of(shape.layers.begin(), shape.layers.end(),
                                                 [](const LayerShape& layer) { return layer.cuts_gates; })) {
        for (const RopeShape& rope : shape.ropes) angles += rope.rotary_dim;
        if (shape.gated_attention || shape.delta.num_heads > 0) gate = query;
        if (shape.delta.num_heads > 0) {
            delta_inputs = shape.delta.input_stride();
            delta_filtered = shape.delta.filtered_stride();
        }
        if (shape.latent.rank == 0) return;
        num_heads = shape.num_heads;
        heads = round_up(num_heads * std::max(shape.latent.query_dim(), shape.latent.value_dim), kPanelWidth);
        head_inputs = std::max(shape.latent.plain_dim, shape.latent.rank);
        query_down = round_up(shape.latent.query_rank, kPanelWidth);
    }

    // Bytes for the rounded rows of a product: all products of a step share this memory.
    std::size_t rounded_bytes(std::size_t tokens, std::size_t assignments, std::size_t logits) const {
        return std::max({RoundedRows::bytes(std::max({hidden, query, heads, query_down}), static_cast<int>(tokens)),
                         num_heads * RoundedRows::bytes(head_inputs, static_cast<int>(tokens)),
                         RoundedRows::bytes(std::max(hidden, inner), static_cast<int>(assignments)),
                         RoundedRows::bytes(hidden, static_cast<int>(logits))});
    }

    // The memory for rows with adapters: A x for each matrix of a product, for the first perhaps one for each head or
    // expert, and the other factor of gates.
    std::size_t low_floats(int place, std::size_t tokens) const {
        return tokens * low * (place == 0 ? std::max(per_token, num_heads) : per_token);
    }
    std::size_t low_rounded_bytes(int place, std::size_t tokens) const {
        if (low == 0) return 0;
        const std::size_t of_heads = place == 0 ? num_heads * RoundedRows::bytes(low, static_cast<int>(tokens)) : 0;
        return std::max(of_heads, RoundedRows::bytes(low, static_cast<int>(tokens * per_token)));
    }
    std::size_t gate_floats(std::size_t tokens) const { return low > 0 || whole_ups ? tokens * per_token * inner : 0; }

    int hidden, query, key, inner, layer_inputs, streams, experts, ranks, low, per_token;
    bool whole_ups;  // whether some MLPs compute all gates and ups before their products
    int angles = 0;
    int gate = 0, delta_inputs = 0, delta_filtered = 0;
    int num_heads = 0, heads = 0, head_inputs = 0, query_down = 0;  // with latents
};

// The floats of scratch for each member of the team.
inline std::size_t scratch_of(const DecoderShape& shape) {
    const std::size_t of_layers = shape.layers.size() * shape.layer_inputs.size;
    return std::max({attention_scratch(shape.most_head_dim()), delta_scratch(shape.delta.key_dim), of_layers});
}

struct Decoder::Activations {
    int num_tokens = 0;
    int num_logits = 0;
    Buffer<float> hidden, normed, update;        // [num_tokens, hidden]
    Buffer<float> query, attended;               // [num_tokens, query]
    Buffer<float> key, value;                    // [num_tokens, key]
    Buffer<float> heads, query_down;             // [num_tokens, heads]: queries, then values; [num_tokens, query_down]
    Buffer<float> gate;                          // [num_tokens, gate]
    Buffer<float> delta_inputs, delta_filtered;  // [num_tokens, delta_inputs], [num_tokens, delta_filtered]
    Buffer<float> inner;                         // [num_tokens (each times its experts), inner]
    Buffer<float> layer_inputs;                  // [num_tokens, layer_inputs]
    Buffer<float> streams;                       // [num_tokens, kStreams, hidden]; the first one keeps predictions
    Buffer<float> angles;                        // [num_tokens, angles]: per rope cosines, then sines
    Buffer<float> wanted, wanted_projected;      // [num_logits, hidden]
    Buffer<float> scratch;                       // per member: scratch_of
    Buffer<std::byte> rounded;                   // the rows of a product
    LowRankMemory low;
    Buffer<float> ups;                          // for adapters, bounds and thresholds of gates, like `inner`
    Buffer<float> router;                       // [num_tokens, experts]
    Buffer<float> ranks;                        // [num_tokens, ranks]: of experts, then of groups
    Buffer<float> expert_input, expert_output;  // [num_tokens * experts_per_token, hidden], sorted by expert
    ExpertRows experts;
    std::vector<AttentionPieces> attention_pieces, wanted_pieces;  // per KV group, the latter of wanted rows
};

}  // namespace quire
