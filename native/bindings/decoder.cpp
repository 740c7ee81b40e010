// quire._native.Decoder and ThreadTeam: checks arrays once, and passes them on as raw pointers.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings.h"
#include "quire/adapter.h"

namespace quire::bindings {
namespace {

template <typename AnyArray>
NumberType type_of(const AnyArray& array) {
    if (array.dtype() == nb::dtype<float>()) return NumberType::kFloat32;
    if (array.dtype() == nb::dtype<std::uint16_t>()) return NumberType::kBfloat16;
    throw std::invalid_argument("an array of float32, or of uint16 that holds bfloat16, is wanted");
}

using Matrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

StoredType block_type_of(const std::string& name) {
    const std::optional<StoredType> type = block_type_named(name);
    if (!type) throw std::invalid_argument("no block type is called " + name);
    return *type;
}

// Rows of floats, or bytes with blocks of the named type.
MatrixRows rows_of(const Matrix& rows, const std::string& blocks) {
    MatrixRows result = {.data = rows.data(),
                         .num_outputs = static_cast<int>(rows.shape(0)),
                         .num_inputs = static_cast<int>(rows.shape(1))};
    if (blocks.empty()) {
        result.type = type_of(rows) == NumberType::kFloat32 ? StoredType::kFloat32 : StoredType::kBfloat16;
        return result;
    }
    result.type = block_type_of(blocks);
    const std::size_t block_bytes = row_bytes(result.type, block_inputs(result.type));
    if (rows.dtype() != nb::dtype<std::uint8_t>() || rows.shape(1) % block_bytes != 0) {
        throw std::invalid_argument("rows of " + blocks + " are bytes of whole blocks");
    }
    result.num_inputs = static_cast<int>(rows.shape(1) / block_bytes) * block_inputs(result.type);
    return result;
}

PackedMatrix& matrix_named(DecoderWeights& weights, const std::string& part, int layer, int expert) {
    static const std::map<std::string, PackedMatrix LayerWeights::*> kOfLayer = {
        {"query", &LayerWeights::query},
        {"key", &LayerWeights::key},
        {"value", &LayerWeights::value},
        {"output", &LayerWeights::output},
        {"gate", &LayerWeights::gate},
        {"up", &LayerWeights::up},
        {"down", &LayerWeights::down},
        {"router", &LayerWeights::router},
        {"latent", &LayerWeights::latent},
        {"query_down", &LayerWeights::query_down},
        {"shared_gate", &LayerWeights::gate},
        {"shared_up", &LayerWeights::up},
        {"shared_down", &LayerWeights::down},
        {"shared_router", &LayerWeights::shared_router},
        {"delta_query", &LayerWeights::query},
        {"delta_key", &LayerWeights::key},
        {"delta_value", &LayerWeights::value},
        {"delta_output", &LayerWeights::output},
        {"delta_gate", &LayerWeights::attention_gate},
        {"attention_gate", &LayerWeights::attention_gate},
        {"delta_rate", &LayerWeights::delta_rate},
        {"delta_decay", &LayerWeights::delta_decay},
        {"mamba_query", &LayerWeights::query},
        {"mamba_key", &LayerWeights::key},
        {"mamba_value", &LayerWeights::value},
        {"mamba_output", &LayerWeights::output},
        {"mamba_gate", &LayerWeights::attention_gate},
        {"mamba_step", &LayerWeights::delta_decay},
        {"convolution_gate", &LayerWeights::query},
        {"convolution_value", &LayerWeights::key},
        {"convolution_output_gate", &LayerWeights::value},
        {"convolution_output", &LayerWeights::output},
        {"input_gate", &LayerWeights::input_gate},
        {"input_output", &LayerWeights::input_output},
        {"laurel_in", &LayerWeights::laurel_in},
        {"laurel_out", &LayerWeights::laurel_out},
        {"stream_router", &LayerWeights::stream_router}};
    static const std::map<std::string, std::vector<PackedMatrix> LayerWeights::*> kOfHead = {
        {"key_up", &LayerWeights::key_up}, {"value_up", &LayerWeights::value_up}};
    static const std::map<std::string, PackedMatrix ExpertWeights::*> kOfExpert = {
        {"expert_gate", &ExpertWeights::gate},
        {"expert_up", &ExpertWeights::up},
        {"expert_down", &ExpertWeights::down}};
    static const std::map<std::string, PackedMatrix DecoderWeights::*> kOfModel = {
        {"head", &DecoderWeights::head},
        {"embedding_in", &DecoderWeights::embedding_in},
        {"embedding_out", &DecoderWeights::embedding_out},
        {"layer_inputs", &DecoderWeights::layer_inputs}};
    if (part.starts_with("stream_in_")) return weights.stream_in.at(part.back() - '1');
    if (part.starts_with("stream_out_")) return weights.stream_out.at(part.back() - '1');
    if (layer < 0) return weights.*kOfModel.at(part);
    if (expert < 0) return weights.layers.at(layer).*kOfLayer.at(part);
    if (const auto found = kOfHead.find(part); found != kOfHead.end()) {
        return (weights.layers.at(layer).*found->second).at(expert);
    }
    return weights.layers.at(layer).experts.at(expert).*kOfExpert.at(part);
}

NormWeights& norm_named(DecoderWeights& weights, const std::string& part, int layer) {
    static const std::map<std::string, NormWeights LayerWeights::*> kOfLayer = {
        {"attention_norm", &LayerWeights::attention_norm},
        {"after_attention_norm", &LayerWeights::after_attention_norm},
        {"joined_attention_norm", &LayerWeights::joined_attention_norm},
        {"mlp_norm", &LayerWeights::mlp_norm},
        {"after_mlp_norm", &LayerWeights::after_mlp_norm},
        {"joined_mlp_norm", &LayerWeights::joined_mlp_norm},
        {"query_norm", &LayerWeights::query_norm},
        {"key_norm", &LayerWeights::key_norm},
        {"query_down_norm", &LayerWeights::query_down_norm},
        {"latent_norm", &LayerWeights::latent_norm},
        {"delta_norm", &LayerWeights::delta_norm},
        {"mamba_norm", &LayerWeights::delta_norm},
        {"after_input_norm", &LayerWeights::after_input_norm},
        {"router_norm", &LayerWeights::router_norm},
        {"experts_norm", &LayerWeights::experts_norm},
        {"after_experts_norm", &LayerWeights::after_experts_norm},
        {"after_shared_norm", &LayerWeights::after_shared_norm},
        {"laurel_norm", &LayerWeights::laurel_norm},
        {"stream_norm", &LayerWeights::stream_norm}};
    if (layer < 0 && part == "final_norm") return weights.final_norm;
    if (layer < 0 && part == "embedding_norm") return weights.embedding_norm;
    if (layer < 0 && part == "layer_inputs_norm") return weights.layer_inputs_norm;
    if (layer < 0 && part == "token_norm") return weights.token_norm;
    if (layer < 0 && part == "state_norm") return weights.state_norm;
    return weights.layers.at(layer).*kOfLayer.at(part);
}

std::vector<float> vector_of(const Array<const float, 1>& array) {
    return std::vector<float>(array.data(), array.data() + array.shape(0));
}

void set_matrix(Decoder& decoder, const std::string& part, int layer, int expert, const Matrix& rows,
                const std::string& blocks, const std::string& codes) {
    PackedMatrix& matrix = matrix_named(decoder.weights, part, layer, expert);
    const MatrixRows from = rows_of(rows, blocks);
    const StoredType as = codes.empty() ? from.type : block_type_of(codes);
    nb::gil_scoped_release release;
    matrix.pack(decoder.kernels(), &decoder.team(), decoder.weights.memory, from, as, PackedMatrix::Form::kSmallest);
}

void set_bias(Decoder& decoder, const std::string& part, int layer, int expert, const Array<const float, 1>& bias) {
    matrix_named(decoder.weights, part, layer, expert).set_bias(bias.data(), static_cast<int>(bias.shape(0)));
}

void set_bounds(Decoder& decoder, const std::string& part, int layer, const Array<const float, 1>& bounds) {
    if (bounds.shape(0) != 4) throw std::invalid_argument("a matrix has four bounds");
    const float* each = bounds.data();
    matrix_named(decoder.weights, part, layer, -1).set_bounds({each[0], each[1], each[2], each[3]});
}

void set_norm(Decoder& decoder, const std::string& part, int layer, const Array<const float, 1>& weight) {
    norm_named(decoder.weights, part, layer).weight = vector_of(weight);
}

void set_norm_bias(Decoder& decoder, const std::string& part, int layer, const Array<const float, 1>& bias) {
    norm_named(decoder.weights, part, layer).bias = vector_of(bias);
}

// Weights that are one vector: of the model, or of a layer.
void set_vector(Decoder& decoder, const std::string& part, int layer, const Array<const float, 1>& numbers) {
    struct Place {
        std::vector<float> LayerWeights::* of_layer;
        std::int64_t size;
        std::vector<float> DecoderWeights::* of_model = nullptr;
    };
    const DecoderShape& shape = decoder.shape();
    const std::map<std::string, Place> places = {
        {"token_types", {nullptr, (shape.separator < 0 ? 1 : 2) * shape.hidden_size, &DecoderWeights::token_types}},
        {"distance_bias", {nullptr, shape.num_heads * shape.num_distances(), &DecoderWeights::distance_bias}},
        {"sinks", {&LayerWeights::sinks, shape.num_heads}},
        {"xielu", {&LayerWeights::xielu, kXieluNumbers}},
        {"router_offset", {&LayerWeights::router_offset, shape.num_experts}},
        {"expert_factors", {&LayerWeights::expert_factors, shape.num_experts}},
        {"stream_predict", {&LayerWeights::stream_predict, kStreams * kStreams * kStreams}},
        {"stream_correct", {&LayerWeights::stream_correct, kStreams * kStreams}},
        {"stream_scale", {&LayerWeights::stream_scale, shape.hidden_size}}};
    const Place& place = places.at(part);
    if (static_cast<std::int64_t>(numbers.shape(0)) != place.size) {
        throw std::invalid_argument(part + ": the decoder has " + std::to_string(place.size) + " numbers");
    }
    DecoderWeights& weights = decoder.weights;
    const bool is_of_model = place.of_layer == nullptr;
    (is_of_model ? weights.*place.of_model : weights.layers.at(layer).*place.of_layer) = vector_of(numbers);
}

// The filter is [filter_width, num_inputs]; for each value head, what is added to its decays, and their logarithm's
// factor.
void set_delta(Decoder& decoder, int layer, const Array<const float, 2>& filter, const Array<const float, 1>& offsets,
               const Array<const double, 1>& speeds) {
    const DeltaShape& delta = decoder.shape().delta;
    if (static_cast<int>(filter.shape(0)) != delta.filter_width ||
        static_cast<int>(offsets.shape(0)) != delta.num_heads ||
        static_cast<int>(filter.shape(1)) != delta.num_inputs() ||
        static_cast<int>(speeds.shape(0)) != delta.num_heads) {
        throw std::invalid_argument("the weights of the delta rule do not have the shape of the decoder");
    }
    LayerWeights& weights = decoder.weights.layers.at(layer);
    weights.filter.assign(filter.data(), filter.data() + filter.size());
    weights.delta_decay_offsets = vector_of(offsets);
    weights.delta_decay_speeds.assign(speeds.data(), speeds.data() + speeds.size());
}

// The bias of the filter, [num_inputs] or empty, and of each head the factor of its values.
void set_mamba(Decoder& decoder, int layer, const Array<const float, 1>& bias, const Array<const float, 1>& skip) {
    const DeltaShape& delta = decoder.shape().delta;
    const auto size = static_cast<int>(bias.shape(0));
    if (!delta.mamba || (size != 0 && size != delta.num_inputs()) ||
        static_cast<int>(skip.shape(0)) != delta.num_heads) {
        throw std::invalid_argument("the weights of a state-space layer do not have the shape of the decoder");
    }
    LayerWeights& weights = decoder.weights.layers.at(layer);
    weights.filter_bias = vector_of(bias);
    weights.mamba_skip = vector_of(skip);
}

void set_convolution(Decoder& decoder, int layer, const Array<const float, 2>& filter) {
    const ConvolutionShape& shape = decoder.shape().convolution;
    if (static_cast<int>(filter.shape(0)) != shape.filter_width || static_cast<int>(filter.shape(1)) != shape.size) {
        throw std::invalid_argument("the filter of a convolution does not have the shape of the decoder");
    }
    decoder.weights.layers.at(layer).filter.assign(filter.data(), filter.data() + filter.size());
}

void set_key_centre(Decoder& decoder, int layer, const Array<const float, 1>& centre) {
    const DecoderShape& shape = decoder.shape();
    const LayerShape& of_layer = shape.layers.at(layer);
    if (static_cast<int>(centre.shape(0)) != shape.kv_heads_of(of_layer) * shape.head_dim_of(of_layer)) {
        throw std::invalid_argument("the centre of the keys does not have the shape of the decoder");
    }
    decoder.weights.layers.at(layer).key_centre = vector_of(centre);
}

EmbeddingRows embedding_of(const Matrix& rows, const std::string& blocks, int size) {
    if (blocks == "F16") {
        if (rows.dtype() != nb::dtype<std::uint8_t>() || rows.shape(1) != size * sizeof(std::uint16_t)) {
            throw std::invalid_argument("rows of F16 are bytes of " + std::to_string(size) + " numbers");
        }
        return {.data = rows.data(), .type = StoredType::kBfloat16, .size = size, .is_float16 = true};
    }
    return {.data = rows.data(), .type = rows_of(rows, blocks).type, .size = size};
}

void set_embedding(Decoder& decoder, const Matrix& rows, const std::string& blocks) {
    decoder.weights.embedding = embedding_of(rows, blocks, decoder.shape().embedding_size);
}

void set_layer_embedding(Decoder& decoder, const Matrix& rows, const std::string& blocks) {
    const DecoderShape& shape = decoder.shape();
    const int size = static_cast<int>(shape.layers.size()) * shape.layer_inputs.size;
    decoder.weights.layer_embedding = embedding_of(rows, blocks, size);
}

void set_layer_scale(Decoder& decoder, int layer, float scale) { decoder.weights.layers.at(layer).scale = scale; }

void set_positions(Decoder& decoder, const Array<const float, 2>& rows) {
    decoder.weights.positions.assign(rows.data(), rows.data() + rows.size());
}

using BlockRows = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The keys and values of a layer in the arrays of its place, which have a row for each block.
PagedKv layer_kv(const DecoderShape& shape, const LayerShape& layer, const BlockRows& keys, const BlockRows& values,
                 const std::string& dtype, int block_size) {
    std::size_t state_floats = 0;  // of half a state
    if (shape.delta.num_heads > 0) state_floats = shape.delta.num_records() / 2 * shape.delta.record_floats();
    if (shape.convolution.size > 0) {
        state_floats = shape.convolution.num_chunks() / 2 * shape.convolution.record_floats();
    }
    const std::size_t state_bytes = state_floats * sizeof(float);
    PagedKv kv;
    kv.latent_dim = shape.latent.rank;
    kv.type = kv_type_of(dtype);
    kv.block_size = block_size;
    kv.num_kv_heads = shape.kv_heads_of(layer);
    kv.head_dim = shape.head_dim_of(layer);
    const std::size_t tokens = static_cast<std::size_t>(block_size) * kv.num_kv_heads;
    const std::size_t key_row = keys.shape(1) * keys.itemsize(), value_row = values.shape(1) * values.itemsize();
    const std::size_t of_keys = tokens * kv.key_bytes(), of_values = kv.latent_dim > 0 ? 0 : tokens * kv.value_bytes();
    const std::size_t parts = layer.kv_part + 1;
    if (block_size < 1 || block_size % kPanelWidth != 0 || keys.shape(0) != values.shape(0) ||
        key_row < std::max(parts * of_keys, state_bytes) || value_row < std::max(parts * of_values, state_bytes)) {
        throw std::invalid_argument("the KV memory does not have the shape of the decoder");
    }
    kv.keys = static_cast<std::byte*>(keys.data()) + layer.kv_part * of_keys;
    kv.values = kv.latent_dim > 0 ? kv.keys : static_cast<std::byte*>(values.data()) + layer.kv_part * of_values;
    kv.key_gap = key_row - of_keys;
    kv.value_gap = value_row - of_values;
    return kv;
}

// Sets an array of keys and one of values per place, with a row for each block. The decoder chooses the layout of a
// row.
void set_cache(Decoder& decoder, const std::vector<std::tuple<BlockRows, BlockRows>>& places, const std::string& dtype,
               int block_size) {
    std::vector<PagedKv> layers;
    for (const LayerShape& layer : decoder.shape().layers) {
        const auto& [keys, values] = places.at(layer.kv_place);
        layers.push_back(layer_kv(decoder.shape(), layer, keys, values, dtype, block_size));
    }
    decoder.set_cache(std::move(layers));
}

using Bytes = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

void prepare_memory(Decoder& decoder, const std::vector<Bytes>& kv_memory) {
    std::vector<MemoryRange> ranges;
    for (const Bytes& array : kv_memory) {
        ranges.push_back({static_cast<const std::byte*>(array.data()), array.nbytes()});
    }
    nb::gil_scoped_release release;
    decoder.prepare_memory(ranges);
}

Adapted adapted_of(const std::string& part) {
    static const std::map<std::string, Adapted> kByName = {{"query", Adapted::kQuery},
                                                           {"key", Adapted::kKey},
                                                           {"value", Adapted::kValue},
                                                           {"output", Adapted::kOutput},
                                                           {"gate", Adapted::kGate},
                                                           {"up", Adapted::kUp},
                                                           {"down", Adapted::kDown},
                                                           {"shared_gate", Adapted::kGate},
                                                           {"shared_up", Adapted::kUp},
                                                           {"shared_down", Adapted::kDown},
                                                           {"query_down", Adapted::kQueryDown},
                                                           {"latent", Adapted::kLatent},
                                                           {"attention_gate", Adapted::kAttentionGate},
                                                           {"delta_query", Adapted::kQuery},
                                                           {"delta_key", Adapted::kKey},
                                                           {"delta_value", Adapted::kValue},
                                                           {"delta_gate", Adapted::kAttentionGate},
                                                           {"delta_rate", Adapted::kDeltaRate},
                                                           {"delta_decay", Adapted::kDeltaDecay},
                                                           {"delta_output", Adapted::kOutput},
                                                           {"mamba_query", Adapted::kQuery},
                                                           {"mamba_key", Adapted::kKey},
                                                           {"mamba_value", Adapted::kValue},
                                                           {"mamba_gate", Adapted::kAttentionGate},
                                                           {"mamba_step", Adapted::kDeltaDecay},
                                                           {"mamba_output", Adapted::kOutput},
                                                           {"convolution_gate", Adapted::kQuery},
                                                           {"convolution_value", Adapted::kKey},
                                                           {"convolution_output_gate", Adapted::kValue},
                                                           {"convolution_output", Adapted::kOutput},
                                                           {"key_up", Adapted::kKeyUp},
                                                           {"value_up", Adapted::kValueUp},
                                                           {"expert_gate", Adapted::kExpertGate},
                                                           {"expert_up", Adapted::kExpertUp},
                                                           {"expert_down", Adapted::kExpertDown}};
    const auto found = kByName.find(part);
    if (found == kByName.end()) throw std::invalid_argument("no adapter can change " + part);
    return found->second;
}

void set_low_rank(Adapter& adapter, const std::string& part, int layer, int index, const Matrix& a, const Matrix& b,
                  float scale) {
    const Adapted which = adapted_of(part);
    const MatrixRows rows_of_a = rows_of(a, ""), rows_of_b = rows_of(b, "");
    nb::gil_scoped_release release;
    adapter.set(layer, which, index, rows_of_a, rows_of_b, scale);
}

using Column = Array<const std::int64_t, 1>;
using Table = Array<const std::int64_t, 2>;

// The adapter of each sequence: adapters[adapter_of[sequence]]; negative: none; no entries: no sequence has one.
std::vector<const Adapter*> adapters_of(const Decoder& decoder, const std::vector<const Adapter*>& adapters,
                                        const Column& adapter_of, int num_sequences) {
    if (adapter_of.shape(0) == 0) return {};
    if (static_cast<int>(adapter_of.shape(0)) != num_sequences) {
        throw std::invalid_argument("every sequence of a step has an adapter or none");
    }
    std::vector<const Adapter*> found(num_sequences, nullptr);
    for (int i = 0; i < num_sequences; ++i) {
        if (adapter_of.data()[i] < 0) continue;
        found[i] = adapters.at(adapter_of.data()[i]);
        if (&found[i]->decoder() != &decoder) throw std::invalid_argument("the adapter is of another decoder");
    }
    return found;
}

void set_given(StepView& step, const DecoderShape& shape, const Column& given, const Array<const float, 2>& rows) {
    const auto num_rows = static_cast<std::int64_t>(rows.shape(0));
    const std::int64_t *first = given.data(), *end = first + given.shape(0);
    const int size = shape.embedding_size + shape.deep_rows * shape.hidden_size;
    if (end - first != step.num_tokens || static_cast<int>(rows.shape(1)) != size ||
        std::any_of(first, end, [&](std::int64_t index) { return index >= num_rows; })) {
        throw std::invalid_argument("the given rows do not have the shape of the step");
    }
    step.given = given.data();
    step.given_rows = {const_cast<float*>(rows.data()), size};  // steps only read them
}

void set_coordinates(StepView& step, const DecoderShape& shape, const Table& coordinates) {
    int num_axes = 0;
    for (const RopeShape& rope : shape.ropes) num_axes = std::max(num_axes, rope.num_axes());
    if (static_cast<int>(coordinates.shape(0)) < num_axes ||
        static_cast<int>(coordinates.shape(1)) != step.num_tokens) {
        throw std::invalid_argument("the coordinates do not have the shape of the step");
    }
    step.coordinates = coordinates.data();
}

void run(Decoder& decoder, const Column& query_starts, const Column& token_ids, const Column& positions,
         const Column& logit_indices, const std::vector<Column>& slots, const std::vector<Table>& tables,
         const Array<float, 2>& logits, const Array<bool, 1>& finite_logits, const Array<bool, 1>& finite_tokens,
         const Column& state_indices, const Array<float, 2>& states, const std::vector<const Adapter*>& adapters,
         const Column& adapter_of, const Column& given, const Array<const float, 2>& given_rows,
         const Table& coordinates, const Column& ends_seen, std::pair<int, int> layers) {
    StepView step;
    step.num_sequences = static_cast<int>(query_starts.shape(0)) - 1;
    step.num_tokens = static_cast<int>(token_ids.shape(0));
    step.num_logits = static_cast<int>(logit_indices.shape(0));
    step.query_starts = query_starts.data();
    step.token_ids = token_ids.data();
    step.positions = positions.data();
    step.logit_indices = logit_indices.data();
    step.num_states = static_cast<int>(state_indices.shape(0));
    step.state_indices = state_indices.data();
    for (const Column& column : slots) step.slots.push_back(column.data());
    for (const Table& table : tables) {
        step.tables.push_back(table.data());
        step.table_strides.push_back(static_cast<std::int64_t>(table.shape(1)));
    }
    step.adapters = adapters_of(decoder, adapters, adapter_of, step.num_sequences);
    if (given.shape(0) > 0) set_given(step, decoder.shape(), given, given_rows);
    if (coordinates.shape(0) > 0) set_coordinates(step, decoder.shape(), coordinates);
    if (ends_seen.shape(0) > 0) {
        if (static_cast<int>(ends_seen.shape(0)) != step.num_tokens)
            throw std::invalid_argument("ends of another step");
        step.ends_seen = ends_seen.data();
    }
    std::tie(step.first_layer, step.end_layer) = layers;
    const int stride = static_cast<int>(logits.shape(1)), state_stride = static_cast<int>(states.shape(1));
    if (stride != round_up(decoder.shape().vocab_size, kPanelWidth) ||
        static_cast<int>(logits.shape(0)) < step.num_logits ||
        static_cast<int>(finite_logits.shape(0)) < step.num_logits ||
        static_cast<int>(finite_tokens.shape(0)) < step.num_tokens ||
        state_stride != round_up(decoder.shape().hidden_size, kPanelWidth) ||
        static_cast<int>(states.shape(0)) < step.num_states) {
        throw std::invalid_argument("the arrays for the results are too small");
    }
    const StepResultView results = {
        {logits.data(), stride}, finite_logits.data(), finite_tokens.data(), {states.data(), state_stride}};
    nb::gil_scoped_release release;
    decoder.reserve(step.num_tokens, step.num_logits);
    decoder.run(step, results);
}

void embed(Decoder& decoder, const Column& token_ids, const Array<float, 2>& rows) {
    StepView step;
    step.num_tokens = static_cast<int>(token_ids.shape(0));
    step.token_ids = token_ids.data();
    const int stride = static_cast<int>(rows.shape(1));
    if (static_cast<int>(rows.shape(0)) != step.num_tokens || stride < decoder.shape().embedding_size) {
        throw std::invalid_argument("the rows do not have the shape of the embedding");
    }
    nb::gil_scoped_release release;
    decoder.embed(step, {rows.data(), stride});
}

void project(Decoder& decoder, const Array<const float, 2>& states, const Array<float, 2>& logits,
             const Array<bool, 1>& finite_logits) {
    const int count = static_cast<int>(states.shape(0)), size = static_cast<int>(states.shape(1));
    const int stride = static_cast<int>(logits.shape(1));
    if (size != decoder.shape().hidden_size || stride != round_up(decoder.shape().vocab_size, kPanelWidth) ||
        static_cast<int>(logits.shape(0)) < count || static_cast<int>(finite_logits.shape(0)) < count) {
        throw std::invalid_argument("the states do not have the shape of the decoder");
    }
    nb::gil_scoped_release release;
    decoder.reserve(0, count);
    decoder.project({const_cast<float*>(states.data()), size}, count, {logits.data(), stride}, finite_logits.data());
}

const Kernels& kernels_named(const std::string& name) {
    for (const Kernels* kernels : usable_kernels()) {
        if (name == kernels->name) return *kernels;
    }
    throw std::invalid_argument("this machine has no kernels named " + name);
}

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (const Kernels* kernels : usable_kernels()) names.emplace_back(kernels->name);
    return names;
}

}  // namespace

void bind_decoder(nb::module_& module) {
    nb::class_<Kernels>(module, "Kernels", "The kernels of one instruction set.")
        .def_prop_ro("name", [](const Kernels& kernels) { return std::string(kernels.name); })
        .def_ro("has_compact", &Kernels::has_compact, "Whether matrices of bfloat16 can take 12 bits a number.");
    module.def("kernels", &kernels_named, nb::arg("name"), nb::rv_policy::reference,
               "The kernels of an instruction set that this machine has.");
    module.def("kernel_names", &kernel_names,
               "The instruction sets that this machine has kernels for, the fastest last.");
    nb::class_<ThreadTeam>(module, "ThreadTeam", "Threads that compute a step together.")
        .def(nb::init<int>(), nb::arg("num_threads"))
        .def_prop_ro("size", &ThreadTeam::size);
    module.def(
        "activation_bytes",
        [](const nb::dict& shape, int num_tokens, int num_logits, int num_threads) {
            return activation_bytes(shape_of(shape), num_tokens, num_logits, num_threads);
        },
        nb::arg("shape"), nb::arg("num_tokens"), nb::arg("num_logits"), nb::arg("num_threads"),
        "The bytes of activations that Decoder.reserve allocates.");
    nb::class_<Decoder>(module, "Decoder", "A decoder-only model; see native/include/quire/decoder.h.")
        .def(
            "__init__",
            [](Decoder* self, const nb::dict& shape, const Kernels& kernels, ThreadTeam& team) {
                new (self) Decoder(shape_of(shape), kernels, team);
            },
            nb::arg("shape"), nb::arg("kernels"), nb::arg("team"), nb::keep_alive<1, 4>())
        .def(
            "set_matrix", &set_matrix, nb::arg("part"), nb::arg("layer"), nb::arg("expert"), nb::arg("rows"),
            nb::kw_only(), nb::arg("blocks") = "", nb::arg("codes") = "",
            "Pack the rows of a matrix, [out, in]; layer and expert are -1 where they do not apply. Rows of bytes hold "
            "the blocks of a type of GGUF; codes of int8_groups or int4 are made of floats.")
        .def("set_bias", &set_bias, nb::arg("part"), nb::arg("layer"), nb::arg("expert"), nb::arg("bias"))
        .def("set_bounds", &set_bounds, nb::arg("part"), nb::arg("layer"), nb::arg("bounds"),
             "Set the least and the highest input, then output, of a matrix of a bounded decoder.")
        .def("set_vector", &set_vector, nb::arg("part"), nb::arg("layer"), nb::arg("numbers"),
             "Set a weight that is one vector; layer is -1 for one of the model.")
        .def("set_norm", &set_norm, nb::arg("part"), nb::arg("layer"), nb::arg("weight"))
        .def("set_norm_bias", &set_norm_bias, nb::arg("part"), nb::arg("layer"), nb::arg("bias"))
        .def("set_embedding", &set_embedding, nb::arg("rows"), nb::kw_only(), nb::arg("blocks") = "",
             nb::keep_alive<1, 2>(), "Borrow the rows of an embedding that is not also the head.")
        .def("set_layer_embedding", &set_layer_embedding, nb::arg("rows"), nb::kw_only(), nb::arg("blocks") = "",
             nb::keep_alive<1, 2>(), "Borrow the rows with the inputs of all layers for each token.")
        .def("set_layer_scale", &set_layer_scale, nb::arg("layer"), nb::arg("scale"),
             "Multiply the output of a layer by a number.")
        .def("set_convolution", &set_convolution, nb::arg("layer"), nb::arg("filter"),
             "Set the filter of a convolution, [filter_width, size].")
        .def("set_mamba", &set_mamba, nb::arg("layer"), nb::arg("bias"), nb::arg("skip"),
             "Set the bias of the filter, or none, and the factors of values of a state-space layer.")
        .def("set_delta", &set_delta, nb::arg("layer"), nb::arg("filter"), nb::arg("offsets"), nb::arg("speeds"),
             "Set the filter, [filter_width, inputs], and the offsets and speeds of decays of a recurrent layer.")
        .def("set_key_centre", &set_key_centre, nb::arg("layer"), nb::arg("centre"),
             "Take this off each key before it is stored, [num_kv_heads * head_dim]; it changes no softmax.")
        .def("set_positions", &set_positions, nb::arg("rows"))
        .def("set_cache", &set_cache, nb::arg("places"), nb::arg("dtype"), nb::arg("block_size"),
             "Borrow the KV memory: the keys and the values of each place in a group, a row for each block.")
        .def("reserve", &Decoder::reserve, nb::arg("num_tokens"), nb::arg("num_logits"),
             nb::call_guard<nb::gil_scoped_release>(), "Allocate activations for steps of this size.")
        .def("prepare_memory", &prepare_memory, nb::arg("kv_memory"),
             "Take activations, these arrays and huge pages for the weights from the system while no step runs.")
        .def("num_unprepared", &Decoder::num_unprepared, "The pieces of memory that are still to be prepared.")
        .def("weight_bytes", &Decoder::weight_bytes, "Bytes of the weights, as they lie in memory.")
        .def(
            "run", &run, nb::arg("query_starts"), nb::arg("token_ids"), nb::arg("positions"), nb::arg("logit_indices"),
            nb::arg("slots"), nb::arg("tables"), nb::arg("logits"), nb::arg("finite_logits"), nb::arg("finite_tokens"),
            nb::arg("state_indices"), nb::arg("states"), nb::arg("adapters"), nb::arg("adapter_of"), nb::arg("given"),
            nb::arg("given_rows"), nb::arg("coordinates"), nb::arg("ends_seen"), nb::kw_only(),
            nb::arg("layers") = std::pair<int, int>(0, -1),
            "Compute one step; the results are written into the arrays for logits, finite ones and states. Sequence i "
            "has the adapter with the index adapter_of[i], none if that is negative; no entries: none has one. Token i "
            "has given_rows[given[i]] instead of its embedding, unless that is negative or there are no entries. "
            "coordinates: [axes, tokens], for rotary positions with axes; no entries: each is the position. "
            "Token i also sees later positions before ends_seen[i], unless that is 0 or there are no entries. layers: "
            "a range of them, after a call with those before it; the call with the last one writes the results, and "
            "each call "
            "the hidden states.")
        .def("embed", &embed, nb::arg("token_ids"), nb::arg("rows"),
             "Write the row of the embedding of each token, as a step begins with it.")
        .def("project", &project, nb::arg("states"), nb::arg("logits"), nb::arg("finite_logits"),
             "Compute the logits of hidden states after the final norm.");
    nb::class_<Adapter>(module, "Adapter", "A LoRA adapter of a decoder; see native/include/quire/adapter.h.")
        .def(nb::init<const Decoder&>(), nb::arg("decoder"), nb::keep_alive<1, 2>())
        .def("set", &set_low_rank, nb::arg("part"), nb::arg("layer"), nb::arg("index"), nb::arg("a"), nb::arg("b"),
             nb::arg("scale"),
             "Pack A, [rank, in], and B, [out, rank], of a matrix, by the head or expert that has it; the rank is a "
             "multiple of 16. A head after the first may share a matrix of the first: then it has no rows.");
}

}  // namespace quire::bindings
