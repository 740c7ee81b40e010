// A DecoderShape from the fields of a dict (src/quire/compute/native/shape.py).
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>

#include "bindings.h"
#include "quire/decoder.h"

namespace quire::bindings {
namespace {

template <typename T>
T field(const nb::dict& fields, const char* name) {
    return nb::cast<T>(fields[name]);
}

HeadNorm head_norm_of(const std::string& name) {
    static const std::map<std::string, HeadNorm> kByName = {{"none", HeadNorm::kNone},
                                                            {"head", HeadNorm::kHead},
                                                            {"each_head", HeadNorm::kEachHead},
                                                            {"all_heads", HeadNorm::kAllHeads}};
    return kByName.at(name);
}

NormShape norm_of(const nb::dict& fields) {
    return {.epsilon = field<float>(fields, "epsilon"),
            .center = field<bool>(fields, "center"),
            .unit_offset = field<bool>(fields, "unit_offset")};
}

LatentShape latent_of(const nb::dict& fields) {
    return {.rank = field<int>(fields, "rank"),
            .rope_dim = field<int>(fields, "rope_dim"),
            .plain_dim = field<int>(fields, "plain_dim"),
            .value_dim = field<int>(fields, "value_dim"),
            .query_rank = field<int>(fields, "query_rank"),
            .norm = norm_of(field<nb::dict>(fields, "norm"))};
}

DeltaShape delta_of(const nb::dict& fields) {
    return {.num_heads = field<int>(fields, "num_heads"),
            .num_key_heads = field<int>(fields, "num_key_heads"),
            .key_dim = field<int>(fields, "key_dim"),
            .value_dim = field<int>(fields, "value_dim"),
            .filter_width = field<int>(fields, "filter_width"),
            .outputs_in_turns = field<bool>(fields, "outputs_in_turns"),
            .record_heads = field<int>(fields, "record_heads"),
            .mamba = field<bool>(fields, "mamba"),
            .num_late = field<int>(fields, "num_late"),
            .rate_scale = field<float>(fields, "rate_scale")};
}

}  // namespace

Activation activation_of(const std::string& name) {
    static const std::map<std::string, Activation> kByName = {{"silu", Activation::kSilu},
                                                              {"gelu", Activation::kGelu},
                                                              {"gelu_tanh", Activation::kGeluTanh},
                                                              {"relu", Activation::kRelu},
                                                              {"relu_squared", Activation::kReluSquared},
                                                              {"quick_gelu", Activation::kQuickGelu},
                                                              {"clamped_swiglu", Activation::kClampedSwiglu}};
    return kByName.at(name);
}

DecoderShape shape_of(const nb::dict& fields) {
    DecoderShape shape;
    shape.vocab_size = field<int>(fields, "vocab_size");
    shape.hidden_size = field<int>(fields, "hidden_size");
    shape.embedding_size = field<int>(fields, "embedding_size");
    shape.num_heads = field<int>(fields, "num_heads");
    shape.num_kv_heads = field<int>(fields, "num_kv_heads");
    shape.head_dim = field<int>(fields, "head_dim");
    shape.intermediate_size = field<int>(fields, "intermediate_size");
    shape.num_experts = field<int>(fields, "num_experts");
    shape.experts_per_token = field<int>(fields, "experts_per_token");
    shape.expert_size = field<int>(fields, "expert_size");
    shape.normalize_experts = field<bool>(fields, "normalize_experts");
    shape.sigmoid_experts = field<bool>(fields, "sigmoid_experts");
    shape.mixes_experts = field<bool>(fields, "mixes_experts");
    shape.expert_margin = field<float>(fields, "expert_margin");
    shape.expert_scale = field<float>(fields, "expert_scale");
    shape.num_expert_groups = field<int>(fields, "num_expert_groups");
    shape.groups_per_token = field<int>(fields, "groups_per_token");
    shape.group_best = field<int>(fields, "group_best");
    shape.shared_size = field<int>(fields, "shared_size");
    shape.score_scale = field<float>(fields, "score_scale");
    shape.weighs_inputs = field<bool>(fields, "weighs_inputs");
    shape.gated = field<bool>(fields, "gated");
    shape.tied_head = field<bool>(fields, "tied_head");
    shape.qk_norm = head_norm_of(field<std::string>(fields, "qk_norm"));
    shape.rotates_first = field<bool>(fields, "rotates_first");
    shape.parallel = field<bool>(fields, "parallel");
    shape.shared_norm = field<bool>(fields, "shared_norm");
    const auto activation = field<std::string>(fields, "activation");
    if (activation != "xielu") shape.activation = activation_of(activation);  // else layers have its numbers
    shape.norm = norm_of(field<nb::dict>(fields, "norm"));
    shape.head_norm = norm_of(field<nb::dict>(fields, "head_norm"));
    if (fields.contains("latent")) shape.latent = latent_of(field<nb::dict>(fields, "latent"));
    if (fields.contains("delta")) {
        const auto delta = field<nb::dict>(fields, "delta");
        shape.delta = delta_of(delta);
        shape.delta_norm = norm_of(field<nb::dict>(delta, "norm"));
    }
    if (fields.contains("convolution")) {
        const auto convolution = field<nb::dict>(fields, "convolution");
        shape.convolution = {.size = field<int>(convolution, "size"),
                             .filter_width = field<int>(convolution, "filter_width"),
                             .chunk = field<int>(convolution, "chunk"),
                             .num_late = field<int>(convolution, "num_late")};
    }
    if (fields.contains("layer_inputs")) {
        const auto inputs = field<nb::dict>(fields, "layer_inputs");
        shape.layer_inputs = {.size = field<int>(inputs, "size"),
                              .embedding_scale = field<float>(inputs, "embedding_scale"),
                              .input_scale = field<float>(inputs, "input_scale"),
                              .scale = field<float>(inputs, "scale"),
                              .given_token = field<int>(inputs, "given_token"),
                              .num_tokens = field<int>(inputs, "num_tokens")};
    }
    shape.has_streams = field<bool>(fields, "has_streams");
    shape.laurel_rank = field<int>(fields, "laurel_rank");
    shape.ahead_in_windows = field<bool>(fields, "ahead_in_windows");
    shape.chunked = field<bool>(fields, "chunked");
    shape.bounded = field<bool>(fields, "bounded");
    shape.gated_attention = field<bool>(fields, "gated_attention");
    shape.bidirectional = field<bool>(fields, "bidirectional");
    shape.biased_length = field<int>(fields, "biased_length");
    shape.value_norm = field<bool>(fields, "value_norm");
    shape.attention_scale = field<float>(fields, "attention_scale");
    shape.score_soft_cap = field<float>(fields, "score_soft_cap");
    shape.residual_scale = field<float>(fields, "residual_scale");
    shape.logit_scale = field<float>(fields, "logit_scale");
    shape.logit_soft_cap = field<float>(fields, "logit_soft_cap");
    shape.embedding_scale = field<float>(fields, "embedding_scale");
    shape.separator = field<int>(fields, "separator");
    shape.learned_positions = field<int>(fields, "learned_positions");
    shape.deep_rows = field<int>(fields, "deep_rows");
    shape.adapter_rank = field<int>(fields, "adapter_rank");
    for (const nb::handle rope : field<nb::list>(fields, "ropes")) {
        const auto entry = nb::cast<nb::dict>(rope);
        shape.ropes.push_back({.rotary_dim = field<int>(entry, "rotary_dim"),
                               .scale = field<float>(entry, "scale"),
                               .inverse_frequencies = field<std::vector<float>>(entry, "inverse_frequencies"),
                               .axes = field<std::vector<int>>(entry, "axes"),
                               .query_growth = field<float>(entry, "query_growth"),
                               .growth_length = field<std::int64_t>(entry, "growth_length"),
                               .growth_offset = field<std::int64_t>(entry, "growth_offset")});
    }
    for (const nb::handle layer : field<nb::list>(fields, "layers")) {
        const auto entry = nb::cast<nb::dict>(layer);
        shape.layers.push_back({.window = field<std::int64_t>(entry, "window"),
                                .rope = field<int>(entry, "rope"),
                                .sparse = field<bool>(entry, "sparse"),
                                .recurrent = field<bool>(entry, "recurrent"),
                                .kv_group = field<int>(entry, "kv_group"),
                                .kv_place = field<int>(entry, "kv_place"),
                                .kv_part = field<int>(entry, "kv_part"),
                                .num_kv_heads = field<int>(entry, "num_kv_heads"),
                                .head_dim = field<int>(entry, "head_dim"),
                                .has_keys = field<bool>(entry, "has_keys"),
                                .attends = field<bool>(entry, "attends"),
                                .transforms = field<bool>(entry, "transforms"),
                                .keys_are_values = field<bool>(entry, "keys_are_values"),
                                .skips_previous = field<bool>(entry, "skips_previous"),
                                .cuts_gates = field<bool>(entry, "cuts_gates"),
                                .gate_threshold = field<float>(entry, "gate_threshold")});
    }
    return shape;
}

}  // namespace quire::bindings
