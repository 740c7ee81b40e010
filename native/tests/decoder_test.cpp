// Runs small decoders with random weights: a sequence must have the same bits alone or with another, whole
// or in chunks, with any number of threads. Tests in Python compare the numbers with the reference decoder.
// Prints each failure and exits with 1 if there was any.
#include "quire/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "quire/adapter.h"
#include "testing.h"

namespace {

using quire::Adapted;
using quire::Adapter;
using quire::Decoder;
using quire::DecoderShape;
using quire::Kernels;
using quire::KvType;
using quire::NumberType;
using quire::StoredType;
using quire::ThreadTeam;
using quire::testing::expect;
using quire::testing::Random;
using quire::testing::same_bits;

constexpr int kVocabSize = 50;
constexpr int kNumBlocks = 24;  // per place
constexpr int kMostTokens = 128;

// Families that differ in the decoder's work between its products.
enum class Family { kPlain, kBent, kMixed, kLatent, kRecurrent, kShared, kConvolution, kMamba };

constexpr int kRank = 16;  // of adapters

DecoderShape shape_of(Family family) {
    DecoderShape shape;
    shape.vocab_size = kVocabSize;
    shape.hidden_size = shape.embedding_size = 40;
    shape.num_heads = 6;
    shape.num_kv_heads = 2;
    shape.head_dim = 24;
    shape.intermediate_size = 56;
    shape.norm.epsilon = shape.head_norm.epsilon = 1e-6F;
    shape.attention_scale = 1.0F / std::sqrt(24.0F);
    shape.ropes.push_back({.rotary_dim = 16, .scale = 1.0F, .inverse_frequencies = {}});
    for (int i = 0; i < 8; ++i) {
        shape.ropes[0].inverse_frequencies.push_back(std::pow(10000.0F, -static_cast<float>(i) / 8.0F));
    }
    shape.layers.resize(3);
    for (int i = 0; i < 3; ++i) {
        shape.layers[i].rope = 0;
        shape.layers[i].kv_place = i;
    }
    if (family == Family::kBent) {  // windows, caps, norms after, learned positions, no gates, projections
        shape.layers[1].window = 10;
        shape.layers[1].rope = -1;
        shape.score_soft_cap = 20.0F;
        shape.logit_soft_cap = 10.0F;
        shape.embedding_size = 28;
        shape.embedding_scale = 2.0F;
        shape.gated = false;
        shape.activation = quire::Activation::kGelu;
        shape.norm.center = true;
        shape.learned_positions = 2;
    }
    if (family == Family::kMixed) {
        shape.layers[1].sparse = shape.layers[2].sparse = true;
        shape.num_experts = 5;
        shape.experts_per_token = 2;
        shape.expert_size = 24;
        shape.normalize_experts = true;
        shape.qk_norm = quire::HeadNorm::kHead;
        shape.tied_head = true;
    }
    if (family == Family::kLatent) {  // experts next to an MLP for all tokens, queries from a few numbers
        shape.num_kv_heads = 1;
        shape.head_dim = 48;
        shape.latent = {
            .rank = 32, .rope_dim = 16, .plain_dim = 12, .value_dim = 16, .query_rank = 24, .norm = shape.norm};
        shape.layers[2].sparse = true;
        shape.num_experts = 4;
        shape.experts_per_token = 2;
        shape.expert_size = 24;
        shape.shared_size = 40;
    }
    if (family == Family::kRecurrent) {  // states, next to attention with a gate
        shape.layers[0].recurrent = shape.layers[2].recurrent = true;
        shape.delta = {
            .num_heads = 4, .num_key_heads = 2, .key_dim = 16, .value_dim = 80, .filter_width = 3, .record_heads = 2};
        shape.delta_norm = shape.norm;
        shape.gated_attention = true;
    }
    if (family == Family::kMamba) {  // also a layer without an MLP, and one that is an MLP
        shape.layers[0].recurrent = true;
        shape.layers[0].transforms = shape.layers[2].attends = shape.layers[2].has_keys = false;
        shape.layers[2].kv_place = 0;
        shape.delta = {.num_heads = 6,
                       .num_key_heads = 1,
                       .key_dim = 32,
                       .value_dim = 16,
                       .filter_width = 4,
                       .record_heads = 3,
                       .mamba = true};
        shape.delta_norm = shape.norm;
    }
    if (family == Family::kConvolution) {
        shape.layers[0].recurrent = shape.layers[2].recurrent = true;
        shape.convolution = {.size = 96, .filter_width = 3, .chunk = 16};
    }
    if (family == Family::kShared) {  // other heads, keys that are values, keys of another layer, inputs of layers
        shape.layers[1].head_dim = 40;
        shape.layers[1].keys_are_values = true;
        shape.layers[2].has_keys = false;
        shape.layers[2].kv_place = 0;
        shape.qk_norm = quire::HeadNorm::kHead;
        shape.value_norm = true;
        shape.layers[1].sparse = true;  // experts and the MLP next to them have norms of their own
        shape.num_experts = 4;
        shape.experts_per_token = 2;
        shape.expert_size = 24;
        shape.shared_size = 40;
        shape.score_scale = 0.3F;
        shape.layer_inputs = {.size = 16, .embedding_scale = 2.0F, .input_scale = 0.5F, .scale = 0.7F};
    }
    for (quire::LayerShape& layer : shape.layers) layer.kv_group = !layer.attends ? -1 : layer.recurrent ? 1 : 0;
    shape.adapter_rank = kRank;
    return shape;
}

// A decoder with its own weights and KV memory.
class Model {
  public:
    Model(const Kernels& kernels, ThreadTeam& team, Family family, NumberType type, int block_size)
        : decoder(shape_of(family), kernels, team), random_(static_cast<std::uint64_t>(family) + 1), type_(type) {
        const DecoderShape& shape = decoder.shape();
        const int hidden = shape.hidden_size, embedding = shape.embedding_size;
        quire::DecoderWeights& weights = decoder.weights;
        set(weights.head, kVocabSize, embedding);
        if (!shape.tied_head) {
            embedding_ = random_.numbers(static_cast<std::size_t>(kVocabSize) * embedding);
            weights.embedding = {.data = embedding_.data(), .size = embedding};
        }
        if (embedding != hidden) {
            set(weights.embedding_in, hidden, embedding);
            set(weights.embedding_out, embedding, hidden);
        }
        if (shape.learned_positions >= 0) weights.positions = random_.numbers(static_cast<std::size_t>(200) * hidden);
        set(weights.final_norm, hidden);
        if (const int size = 3 * shape.layer_inputs.size; size > 0) {
            layer_embedding_ = random_.numbers(static_cast<std::size_t>(kVocabSize) * size);
            weights.layer_embedding = {.data = layer_embedding_.data(), .size = size};
            set(weights.layer_inputs, size, hidden);
            set(weights.layer_inputs_norm, shape.layer_inputs.size);
        }
        for (std::size_t i = 0; i < shape.layers.size(); ++i) fill(weights.layers[i], shape.layers[i], family);
        std::vector<quire::PagedKv> cache;
        for (const quire::LayerShape& layer : shape.layers) {
            cache.push_back(layer.has_keys ? make_cache(layer, block_size) : cache[layer.kv_place]);
        }
        decoder.set_cache(cache);
        decoder.reserve(kMostTokens, kMostTokens);
        adapter = std::make_unique<Adapter>(decoder);
        for (std::size_t i = 0; i < shape.layers.size(); ++i) adapt(static_cast<int>(i), shape.layers[i]);
    }

    float* embedding_row(int token) { return embedding_.data() + token * decoder.shape().embedding_size; }
    int block_size() const { return block_size_; }

    Decoder decoder;
    std::unique_ptr<Adapter> adapter;  // for every matrix

  private:
    // Numbers of a matrix, as floats or as bfloat16.
    struct Numbers {
        std::vector<float> rows;
        std::vector<std::uint16_t> halves;
        quire::MatrixRows view;
    };

    Numbers numbers(int num_outputs, int num_inputs, bool is_half) {
        const float most = 1.5F / std::sqrt(static_cast<float>(num_inputs));
        Numbers found = {random_.numbers(static_cast<std::size_t>(num_outputs) * num_inputs, -most, most), {}, {}};
        for (const float value : found.rows) found.halves.push_back(quire::testing::nearest_bfloat16(value));
        found.view = {found.rows.data(), StoredType::kFloat32, num_outputs, num_inputs};
        if (is_half) found.view = {found.halves.data(), StoredType::kBfloat16, num_outputs, num_inputs};
        return found;
    }

    void set(quire::PackedMatrix& matrix, int num_outputs, int num_inputs) {
        set(matrix, num_outputs, num_inputs, type_);
    }

    void set(quire::PackedMatrix& matrix, int num_outputs, int num_inputs, NumberType type) {
        const Numbers made = numbers(num_outputs, num_inputs, type == NumberType::kBfloat16);
        const StoredType as = type == NumberType::kCoded ? StoredType::kQ8_0 : made.view.type;
        matrix.pack(decoder.kernels(), &decoder.team(), decoder.weights.memory, made.view, as);
        const std::vector<float> bias = random_.numbers(num_outputs, -0.1F, 0.1F);
        if (decoder.shape().norm.center) matrix.set_bias(bias.data(), num_outputs);
    }

    void set(quire::NormWeights& norm, int size) {
        norm.weight = random_.numbers(size, 0.5F, 1.5F);
        if (decoder.shape().norm.center) norm.bias = random_.numbers(size, -0.1F, 0.1F);
    }

    // Adds A and B of a matrix to the adapter. Heads after the first share B of keys, and A of values.
    void adapt(int layer, Adapted which, const quire::PackedMatrix& matrix, int index = 0) {
        const bool is_half = type_ != NumberType::kFloat32;
        Numbers a = numbers(kRank, matrix.view().num_inputs, is_half);
        Numbers b = numbers(matrix.view().num_outputs, kRank, is_half);
        if (which == Adapted::kKeyUp && index > 0) b.view.num_outputs = 0;
        if (which == Adapted::kValueUp && index > 0) a.view.num_outputs = 0;
        adapter->set(layer, which, index, a.view, b.view, 0.5F);
    }

    void adapt(int layer, const quire::LayerShape& shape) {
        const quire::LayerWeights& weights = decoder.weights.layers[layer];
        const std::pair<Adapted, const quire::PackedMatrix*> matrices[] = {
            {Adapted::kQuery, &weights.query},
            {Adapted::kKey, &weights.key},
            {Adapted::kValue, &weights.value},
            {Adapted::kOutput, &weights.output},
            {Adapted::kGate, &weights.gate},
            {Adapted::kUp, &weights.up},
            {Adapted::kDown, &weights.down},
            {Adapted::kQueryDown, &weights.query_down},
            {Adapted::kLatent, &weights.latent},
            {Adapted::kAttentionGate, &weights.attention_gate},
            {Adapted::kDeltaRate, &weights.delta_rate},
            {Adapted::kDeltaDecay, &weights.delta_decay},
        };
        for (const auto& [which, matrix] : matrices) {
            if (!matrix->empty()) adapt(layer, which, *matrix);
        }
        for (std::size_t head = 0; head < weights.key_up.size(); ++head) {
            adapt(layer, Adapted::kKeyUp, weights.key_up[head], static_cast<int>(head));
            adapt(layer, Adapted::kValueUp, weights.value_up[head], static_cast<int>(head));
        }
        for (std::size_t expert = 0; shape.sparse && expert < weights.experts.size(); ++expert) {
            adapt(layer, Adapted::kExpertGate, weights.experts[expert].gate, static_cast<int>(expert));
            adapt(layer, Adapted::kExpertUp, weights.experts[expert].up, static_cast<int>(expert));
            adapt(layer, Adapted::kExpertDown, weights.experts[expert].down, static_cast<int>(expert));
        }
    }

    void fill_latents(quire::LayerWeights& weights) {
        const DecoderShape& shape = decoder.shape();
        const quire::LatentShape& latent = shape.latent;
        set(weights.query_down, latent.query_rank, shape.hidden_size);
        set(weights.query_down_norm, latent.query_rank);
        set(weights.query, shape.num_heads * latent.query_dim(), latent.query_rank);
        set(weights.latent, latent.rank + latent.rope_dim, shape.hidden_size);
        set(weights.latent_norm, latent.rank);
        for (int head = 0; head < shape.num_heads; ++head) {
            set(weights.key_up[head], latent.rank, latent.plain_dim);
            set(weights.value_up[head], latent.value_dim, latent.rank);
        }
        set(weights.output, shape.hidden_size, shape.num_heads * latent.value_dim);
    }

    void fill_states(quire::LayerWeights& weights) {
        const quire::DeltaShape& delta = decoder.shape().delta;
        const int hidden = decoder.shape().hidden_size;
        set(weights.query, delta.key_numbers(), hidden);
        set(weights.key, delta.key_numbers(), hidden);
        set(weights.value, delta.value_numbers(), hidden);
        set(weights.attention_gate, delta.value_numbers(), hidden);
        if (!delta.mamba) set(weights.delta_rate, delta.num_heads, hidden);
        set(weights.delta_decay, delta.num_heads, hidden);
        set(weights.output, hidden, delta.value_numbers());
        set(weights.delta_norm, delta.mamba ? delta.value_numbers() : delta.value_dim);
        weights.filter = random_.numbers(static_cast<std::size_t>(delta.filter_width) * delta.num_inputs());
        if (delta.mamba) {
            weights.filter_bias = random_.numbers(delta.num_inputs());
            weights.mamba_skip = random_.numbers(delta.num_heads);
        }
        weights.delta_decay_offsets = random_.numbers(delta.num_heads);
        for (const float speed : random_.numbers(delta.num_heads, 0.1F, 2.0F)) {
            weights.delta_decay_speeds.push_back(speed);
        }
    }

    void fill(quire::LayerWeights& weights, const quire::LayerShape& layer, Family family) {
        const DecoderShape& shape = decoder.shape();
        const int hidden = shape.hidden_size, head_dim = shape.head_dim_of(layer);
        const int query = shape.num_heads * head_dim, key = shape.kv_heads_of(layer) * head_dim;
        set(weights.attention_norm, hidden);
        set(weights.mlp_norm, hidden);
        if (family == Family::kBent) {
            set(weights.after_attention_norm, hidden);
            set(weights.joined_mlp_norm, hidden);
        }
        if (shape.qk_norm == quire::HeadNorm::kHead) {
            set(weights.query_norm, head_dim);
            set(weights.key_norm, head_dim);
        }
        if (shape.latent.rank > 0) {
            fill_latents(weights);
        } else if (layer.recurrent && family == Family::kConvolution) {
            const int size = shape.convolution.size;
            for (auto* matrix : {&weights.query, &weights.key, &weights.value}) set(*matrix, size, hidden);
            set(weights.output, hidden, size);
            weights.filter = random_.numbers(static_cast<std::size_t>(shape.convolution.filter_width) * size);
        } else if (layer.recurrent) {
            fill_states(weights);
        } else {
            // Of another type than the matrices that read the same rows.
            const NumberType type = type_ == NumberType::kCoded ? NumberType::kBfloat16 : NumberType::kCoded;
            if (shape.gated_attention) set(weights.attention_gate, query, hidden, type);
            set(weights.query, query, hidden);
            if (layer.has_keys) set(weights.key, key, hidden);
            if (layer.has_keys && !layer.keys_are_values) set(weights.value, key, hidden);
            set(weights.output, hidden, query);
        }
        if (shape.layer_inputs.size > 0) {
            set(weights.input_gate, shape.layer_inputs.size, hidden);
            set(weights.input_output, hidden, shape.layer_inputs.size);
            set(weights.after_input_norm, hidden);
            weights.scale = 0.8F;
        }
        if (layer.sparse) {
            set(weights.router, shape.num_experts, hidden);
            for (quire::ExpertWeights& expert : weights.experts) {
                set(expert.gate, shape.expert_size, hidden);
                set(expert.up, shape.expert_size, hidden);
                set(expert.down, hidden, shape.expert_size);
            }
            if (shape.shared_size == 0) return;
            set(weights.gate, shape.shared_size, hidden);
            set(weights.up, shape.shared_size, hidden);
            set(weights.down, hidden, shape.shared_size);
            if (family != Family::kShared) return set(weights.shared_router, 1, hidden);
            for (auto* norm : {&weights.router_norm, &weights.experts_norm, &weights.after_experts_norm,
                               &weights.after_shared_norm}) {
                set(*norm, hidden);
            }
            weights.expert_factors = random_.numbers(shape.num_experts, 0.5F, 1.5F);
            return;
        }
        if (shape.gated) set(weights.gate, shape.intermediate_size, hidden);
        set(weights.up, shape.intermediate_size, hidden);
        set(weights.down, hidden, shape.intermediate_size);
    }

    quire::PagedKv make_cache(const quire::LayerShape& layer, int block_size) {
        quire::PagedKv kv;
        kv.type = type_ == NumberType::kFloat32 ? KvType::kFloat32 : KvType::kBfloat16;
        kv.num_kv_heads = decoder.shape().kv_heads_of(layer);
        kv.block_size = block_size;
        kv.head_dim = decoder.shape().head_dim_of(layer);
        kv.latent_dim = decoder.shape().latent.rank;
        const std::size_t of_tokens = kv.num_kv_heads * block_size * kv.key_bytes();
        const quire::DeltaShape& delta = decoder.shape().delta;
        const quire::ConvolutionShape& convolution = decoder.shape().convolution;
        std::size_t of_states = 0;
        if (delta.num_heads > 0) of_states = delta.num_records() / 2 * delta.record_floats() * sizeof(float);
        if (convolution.size > 0) {
            of_states = convolution.num_chunks() / 2 * convolution.record_floats() * sizeof(float);
        }
        kv.key_gap = kv.value_gap = std::max(of_tokens, of_states) - of_tokens;
        const std::size_t size = kNumBlocks * (of_tokens + kv.key_gap);
        for (void** each : {&kv.keys, &kv.values}) {
            memory_.emplace_back(size, 0xff);  // NaN
            *each = memory_.back().data();
        }
        if (kv.latent_dim > 0) kv.values = kv.keys;
        block_size_ = block_size;
        return kv;
    }

    Random random_;
    int block_size_ = 0;
    NumberType type_;
    std::vector<float> embedding_, layer_embedding_;
    std::vector<std::vector<std::uint8_t>> memory_;
};

// A sequence and its blocks.
struct Sequence {
    std::vector<std::int64_t> tokens;
    std::vector<std::int64_t> table;
};

Sequence make_sequence(int length, std::uint64_t seed, int first_block) {
    Random random(seed);
    Sequence sequence;
    for (int i = 0; i < length; ++i) sequence.tokens.push_back(random.below(kVocabSize));
    for (int block = kNumBlocks / 2 - 1; block >= 0; --block) sequence.table.push_back(first_block + block);
    return sequence;
}

// Positions first … end - 1 of a sequence.
struct Part {
    const Sequence* sequence;
    int first, end;
    const Adapter* adapter = nullptr;
};

struct Result {
    std::vector<std::vector<float>> logits;  // of each token
    std::vector<bool> finite_logits, finite_tokens;
};

// Runs one step over the parts, with logits for every token or for the last `num_wanted`.
Result run_step(Model& model, const std::vector<Part>& parts, int num_wanted = kMostTokens) {
    std::vector<std::int64_t> starts = {0}, tokens, positions, slots, tables, wanted;
    std::vector<const Adapter*> adapters;
    const int block_size = model.block_size();
    for (const Part& part : parts) {
        for (int position = part.first; position < part.end; ++position) {
            tokens.push_back(part.sequence->tokens[position]);
            positions.push_back(position);
            slots.push_back(part.sequence->table[position / block_size] * block_size + position % block_size);
        }
        adapters.push_back(part.adapter);
        starts.push_back(static_cast<std::int64_t>(tokens.size()));
        tables.insert(tables.end(), part.sequence->table.begin(), part.sequence->table.end());
    }
    const int num_tokens = static_cast<int>(tokens.size());
    for (int row = std::max(0, num_tokens - num_wanted); row < num_tokens; ++row) wanted.push_back(row);
    quire::StepView step;
    step.num_sequences = static_cast<int>(parts.size());
    step.num_tokens = num_tokens;
    step.num_logits = static_cast<int>(wanted.size());
    step.query_starts = starts.data();
    step.token_ids = tokens.data();
    step.positions = positions.data();
    step.logit_indices = wanted.data();
    // The same for both groups: each layer has memory of its own.
    step.slots = {slots.data(), slots.data()};
    step.tables = {tables.data(), tables.data()};
    step.table_strides = {kNumBlocks / 2, kNumBlocks / 2};
    step.adapters = adapters;
    constexpr int kStride = 64;  // the vocabulary, rounded up to a multiple of 16
    std::vector<float> logits(wanted.size() * kStride);
    const auto finite_logits = std::make_unique<bool[]>(wanted.size());
    const auto finite_tokens = std::make_unique<bool[]>(tokens.size());
    model.decoder.run(step, {.logits = {logits.data(), kStride},
                             .finite_logits = finite_logits.get(),
                             .finite_tokens = finite_tokens.get()});
    Result result;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        result.logits.emplace_back(logits.begin() + i * kStride, logits.begin() + i * kStride + kVocabSize);
        result.finite_logits.push_back(finite_logits[i]);
    }
    result.finite_tokens.assign(finite_tokens.get(), finite_tokens.get() + num_tokens);
    return result;
}

struct Setting {
    const Kernels& kernels;
    Family family;
    NumberType type;
};

void expect_rows(const Setting& setting, const char* what, const Result& actual, int first, const Result& expected,
                 int expected_first, int count) {
    for (int i = 0; i < count; ++i) {
        expect(same_bits(actual.logits[first + i], expected.logits[expected_first + i]),
               "%s %s, family %d: %s: bits of token %d", setting.kernels.name, quire::testing::name_of(setting.type),
               static_cast<int>(setting.family), what, expected_first + i);
    }
}

// Runs two sequences together, in chunks and alone, with many teams and block sizes. Compares them with each
// sequence alone and whole on one thread. The first may have an adapter.
void test_same_bits(const Setting& setting, bool has_adapter) {
    const auto adapter_in = [has_adapter](const Model& model) { return has_adapter ? model.adapter.get() : nullptr; };
    const Sequence one = make_sequence(45, 1, 0), other = make_sequence(37, 2, kNumBlocks / 2);
    ThreadTeam single(1);
    Model whole(setting.kernels, single, setting.family, setting.type, 16);
    const Result alone = run_step(whole, {{&one, 0, 45, adapter_in(whole)}}),
                 other_alone = run_step(whole, {{&other, 0, 37}});
    for (const Result* result : {&alone, &other_alone}) {
        expect(std::find(result->finite_logits.begin(), result->finite_logits.end(), false) ==
                       result->finite_logits.end() &&
                   std::find(result->finite_tokens.begin(), result->finite_tokens.end(), false) ==
                       result->finite_tokens.end(),
               "%s, family %d: not all is finite", setting.kernels.name, static_cast<int>(setting.family));
    }
    expect(!same_bits(alone.logits[3], alone.logits[4]), "every token has the same logits");
    const Result plain = run_step(whole, {{&one, 0, 45}});
    expect(same_bits(plain.logits[3], alone.logits[3]) != has_adapter, "%s, family %d: what an adapter changes",
           setting.kernels.name, static_cast<int>(setting.family));

    for (const int num_threads : {1, 2}) {
        ThreadTeam team(num_threads);
        for (const int block_size : {16, 64}) {
            Model model(setting.kernels, team, setting.family, setting.type, block_size);
            const Result both = run_step(model, {{&one, 0, 45, adapter_in(model)}, {&other, 0, 37}});
            expect_rows(setting, "with another", both, 0, alone, 0, 45);
            expect_rows(setting, "behind another", both, 45, other_alone, 0, 37);

            Model chunked(setting.kernels, team, setting.family, setting.type, block_size);
            const Result first = run_step(chunked, {{&one, 0, 17, adapter_in(chunked)}});
            expect_rows(setting, "first chunk", first, 0, alone, 0, 17);
            const Result mixed = run_step(chunked, {{&other, 0, 20}, {&one, 17, 44, adapter_in(chunked)}});
            expect_rows(setting, "chunk with a chunk", mixed, 0, other_alone, 0, 20);
            expect_rows(setting, "second chunk", mixed, 20, alone, 17, 27);
            run_step(chunked, {{&other, 20, 36}}, 0);
            const Result decoded = run_step(chunked, {{&one, 44, 45, adapter_in(chunked)}, {&other, 36, 37}});
            expect_rows(setting, "one token", decoded, 0, alone, 44, 1);
            expect_rows(setting, "another token", decoded, 1, other_alone, 36, 1);
            const Result last = run_step(model, {{&one, 0, 45, adapter_in(model)}, {&other, 0, 37}}, 3);
            expect_rows(setting, "only some logits", last, 0, other_alone, 34, 3);
        }
    }
}

// Reserving less or more between steps loses neither weights nor keys and values.
void test_reserve(const Setting& setting) {
    const Sequence sequence = make_sequence(30, 3, 0);
    ThreadTeam team(2);
    Model model(setting.kernels, team, setting.family, setting.type, 16);
    const Result expected = run_step(model, {{&sequence, 0, 30}});
    const std::size_t weight_bytes = model.decoder.weight_bytes();
    for (const auto& [num_tokens, num_logits] :
         {std::pair{kMostTokens, kMostTokens}, {1, 1}, {0, 0}, {kMostTokens, 300}, {200, 1}, {300, 300}}) {
        for (int times = 0; times < 2; ++times) model.decoder.reserve(num_tokens, num_logits);
        expect_rows(setting, "reserved again", run_step(model, {{&sequence, 0, 30}}), 0, expected, 0, 30);
        expect_rows(setting, "last token, reserved again", run_step(model, {{&sequence, 29, 30}}), 0, expected, 29, 1);
    }
    expect(model.decoder.weight_bytes() == weight_bytes, "%s: bytes of weights change", setting.kernels.name);
}

// Half precision halves the bytes of the panels. Activations grow with the tokens and logits of a step.
void test_bytes(const Kernels& kernels) {
    ThreadTeam team(1);
    const Model whole(kernels, team, Family::kMixed, NumberType::kFloat32, 16);
    const Model half(kernels, team, Family::kMixed, NumberType::kBfloat16, 16);
    const std::size_t more = whole.decoder.weight_bytes(), less = half.decoder.weight_bytes();
    expect(less < more && more < 2 * less, "bytes of weights: %zu and %zu", more, less);
    const Model quarter(kernels, team, Family::kMixed, NumberType::kCoded, 16);
    const std::size_t least = quarter.decoder.weight_bytes();
    expect(least < less && more < 4 * least, "bytes of weights with codes: %zu, of float32 %zu", least, more);
    const DecoderShape shape = shape_of(Family::kMixed);
    const std::size_t base = quire::activation_bytes(shape, 10, 1, 1);
    expect(base < quire::activation_bytes(shape, 11, 1, 1) && base < quire::activation_bytes(shape, 10, 2, 1) &&
               base < quire::activation_bytes(shape, 10, 1, 2),
           "bytes of activations do not grow");
}

// A large part that is given back leaves no memory behind when the next part is still larger.
void test_arena() {
    constexpr std::size_t kLarge = std::size_t{80} << 20;
    quire::Arena arena;
    const std::byte* small = arena.take(1000);
    arena.give_back(arena.take(1000));
    arena.give_back(arena.take(kLarge));
    arena.take(kLarge + 1);
    const std::vector<quire::MemoryRange> ranges = arena.ranges();
    expect(ranges.size() == 2 && ranges[0].data == small && ranges[1].num_bytes > kLarge, "memory that is never used");
}

// A token with a broken embedding is reported. The tokens before it, and the other sequence, keep their bits.
void test_not_finite(const Setting& setting) {
    ThreadTeam team(2);
    Model model(setting.kernels, team, setting.family, setting.type, 16);
    Sequence one = make_sequence(20, 4, 0), other = make_sequence(12, 5, kNumBlocks / 2);
    for (Sequence* sequence : {&one, &other}) {
        for (std::int64_t& token : sequence->tokens) token %= kVocabSize - 1;  // the last token will be broken
    }
    const Result clean = run_step(model, {{&one, 0, 20}, {&other, 0, 12}});
    one.tokens[15] = kVocabSize - 1;
    model.embedding_row(kVocabSize - 1)[3] = std::numeric_limits<float>::quiet_NaN();
    const Result broken = run_step(model, {{&one, 0, 20}, {&other, 0, 12}});
    expect_rows(setting, "before a broken token", broken, 0, clean, 0, 15);
    expect_rows(setting, "the sequence next to a broken token", broken, 20, clean, 20, 12);
    for (int row = 0; row < 32; ++row) {
        const bool touched = row >= 15 && row < 20;  // later tokens see the broken key
        expect(broken.finite_tokens[row] == !touched && broken.finite_logits[row] == !touched,
               "%s, family %d: token %d is called finite %d, its logits %d", setting.kernels.name,
               static_cast<int>(setting.family), row, static_cast<int>(broken.finite_tokens[row]),
               static_cast<int>(broken.finite_logits[row]));
    }
}

}  // namespace

int main() {
    test_arena();
    quire::testing::for_each_kernels([](const Kernels& kernels) {
        for (const Family family : {Family::kPlain, Family::kBent, Family::kMixed, Family::kLatent, Family::kRecurrent,
                                    Family::kShared, Family::kConvolution, Family::kMamba}) {
            for (const NumberType type : {NumberType::kFloat32, NumberType::kBfloat16, NumberType::kCoded}) {
                test_same_bits({kernels, family, type}, false);
                test_same_bits({kernels, family, type}, true);
                test_reserve({kernels, family, type});
            }
        }
        test_bytes(kernels);
        test_not_finite({kernels, Family::kPlain, NumberType::kFloat32});
        test_not_finite({kernels, Family::kBent, NumberType::kBfloat16});
        test_not_finite({kernels, Family::kPlain, NumberType::kCoded});
    });
    return quire::testing::exit_status();
}
