// A decoder-only model, run by a team of threads: one call computes a step from token ids to logits.
//
// The model is data (`DecoderShape`, the C++ form of Python's DecoderSpec). Its weights are set and
// packed one by one, and only read afterwards. The decoder owns its weights and activations; the
// caller owns the KV memory. A step is a sequence of phases with a barrier after each:
//
//     embed ─► per layer: norm ─► q, k, v ─► heads, write KV ─► attention ─► output ─► norm ─► MLP
//           (with latents: queries and latents ─► queries by head ─► attention ─► values by head)
//           (a recurrent layer: q, k, v, gate, rate, decay ─► states ─► norm and gate ─► output)
//           (a state-space layer: q, k, v, gate, step ─► states ─► gate and norm ─► output)
//           (a convolution: gate, value, output gate ─► states ─► output)
//           (a layer with keys of another one: q ─► heads ─► attention)
//           (with layer inputs, after the MLP: gate × input ─► output ─► norm)
//           (with streams, before a layer: predicted from one another; after it: corrected by its output)
//           (before the first of the last layers that have no keys: only rows whose results are wanted stay)
//           ─► norm of the rows that need logits ─► head
//
// The keys and values of all tokens of the step are written before any is read. The bits of a row do not
// depend on the thread that computes it, or on the other tokens of the step.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "quire/blocks.h"
#include "quire/buffers.h"
#include "quire/cpu_features.h"
#include "quire/kernels.h"
#include "quire/memory_preparer.h"
#include "quire/thread_team.h"

namespace quire {

struct NormShape {
    float epsilon = 0.0F;
    bool center = false;
    bool unit_offset = false;
};

// The vectors of a norm on queries and keys: each head, with shared weights or its own, or all heads of a token.
enum class HeadNorm { kNone, kHead, kEachHead, kAllHeads };

struct LayerShape {
    std::int64_t window = 0;  // 0: all positions
    int rope = -1;            // index into DecoderShape::ropes; -1: none
    bool sparse = false;
    bool recurrent = false;  // it has states instead of keys and values
    int kv_group = 0;        // the KV group whose block tables it uses; -1: none
    int kv_place = 0;        // the array of the KV memory with its keys and values
    int kv_part = 0;         // its part of that array, which layers with few numbers share
    int num_kv_heads = 0;    // 0: as many as the DecoderShape says, and of its size
    int head_dim = 0;
    bool has_keys = true;          // false: it attends to the keys and values of an earlier layer, or not at all
    bool attends = true;           // it has attention, or states
    bool transforms = true;        // it has an MLP or experts
    bool keys_are_values = false;  // before norms and positions
    bool skips_previous = false;   // its attention reads what the previous layer, a recurrent one, has read
    bool cuts_gates = false;       // gates count from a threshold on, and are 0 below
    float gate_threshold = 0.0F;   // in standard deviations above the mean of the gates
};

// Inputs of each layer for each token; see LayerInputsSpec in Python.
struct LayerInputsShape {
    int size = 0;  // numbers per layer, a multiple of 16; 0: none
    float embedding_scale = 1.0F;
    float input_scale = 1.0F;
    float scale = 1.0F;
    int given_token = 0;  // whose inputs a row has that is given in place of a token
    int num_tokens = 0;   // rows of the table, later tokens have that of token 0; 0: as many as there are tokens
};

// Heads share one latent per token, of `rank` numbers and `rope_dim` that rotate; see LatentSpec in Python.
struct LatentShape {
    int rank = 0;  // 0: heads have keys and values
    int rope_dim = 0;
    int plain_dim = 0;
    int value_dim = 0;
    int query_rank = 0;  // 0: queries are computed from the hidden states
    NormShape norm;

    int query_dim() const { return plain_dim + rope_dim; }
};

struct RopeShape {
    int rotary_dim = 0;
    float scale = 1.0F;
    std::vector<float> inverse_frequencies;
    std::vector<int> axes = {};  // the coordinate that each frequency turns with; empty: the position
    // Queries are multiplied by 1 + query_growth * log(1 + (position + growth_offset) / growth_length).
    float query_growth = 0.0F;
    std::int64_t growth_length = 1;
    std::int64_t growth_offset = 0;

    int num_axes() const { return axes.empty() ? 0 : 1 + *std::max_element(axes.begin(), axes.end()); }
    float query_factor(std::int64_t position) const {
        if (query_growth == 0.0F) return 1.0F;
        const auto times = static_cast<double>(1 + (position + growth_offset) / growth_length);
        return static_cast<float>(1.0 + static_cast<double>(query_growth) * std::log(times));
    }
};

struct DecoderShape {
    int vocab_size = 0;
    int hidden_size = 0;
    int embedding_size = 0;  // hidden_size unless embeddings are projected
    int num_heads = 0;
    int num_kv_heads = 0;
    int head_dim = 0;
    int intermediate_size = 0;  // of the widest MLP
    int num_experts = 0;
    int experts_per_token = 0;
    int expert_size = 0;
    bool normalize_experts = false;
    bool sigmoid_experts = false;  // else a softmax over all
    bool mixes_experts = false;    // each is weighed among those with scores near to its own
    float expert_margin = 0.0F;    // how near, as a share of the higher score
    float expert_scale = 1.0F;
    int num_expert_groups = 1;
    int groups_per_token = 1;
    int group_best = 1;          // groups are ranked by the sum of this many highest numbers
    int shared_size = 0;         // of an MLP next to the experts
    float score_scale = 1.0F;    // of the scores of experts
    bool weighs_inputs = false;  // the weight of an expert multiplies its input, instead of its output
    bool gated = true;
    bool tied_head = false;
    HeadNorm qk_norm = HeadNorm::kNone;
    bool rotates_first = false;  // heads rotate before they are normalised
    bool parallel = false;       // attention and MLP read the same hidden states
    bool shared_norm = false;    // both read them through the norm before attention
    Activation activation = Activation::kSilu;
    NormShape norm;
    NormShape head_norm;
    NormShape delta_norm;  // of the outputs of recurrent layers
    LatentShape latent;
    DeltaShape delta;
    ConvolutionShape convolution;
    LayerInputsShape layer_inputs;
    bool has_streams = false;       // four residual streams; see StreamsSpec in Python
    int laurel_rank = 0;            // of the matrices of LAuReL; 0: none
    bool gated_attention = false;   // the output of attention is multiplied by the sigmoid of a gate
    bool bidirectional = false;     // tokens attend to later ones too, all of which are in their step
    bool ahead_in_windows = false;  // StepView::ends_seen is for layers with a window only
    bool chunked = false;           // see AttentionTask
    bool bounded = false;           // the matrices of layers have bounds; see PackedMatrix::set_bounds
    int biased_length = 0;          // of the longest text, if scores have biases by distance; 0: none
    bool value_norm = false;        // value heads are normalised as keys are, without weights
    float attention_scale = 1.0F;
    float score_soft_cap = 0.0F;
    float residual_scale = 1.0F;  // of a sublayer's output
    float logit_scale = 1.0F;
    float logit_soft_cap = 0.0F;
    float embedding_scale = 1.0F;
    int separator = -1;          // tokens behind the first one in a text are of the second type; -1: none are
    int learned_positions = -1;  // the offset in their table; -1: no learned positions
    int deep_rows = 0;           // given rows have more numbers for the outputs of this many layers
    int adapter_rank = 0;        // the highest rank of adapters; 0: steps have none
    std::vector<RopeShape> ropes;
    std::vector<LayerShape> layers;

    // Those of the biases of a head: the first one is -biased_length, the last ones are after the end of any text.
    std::int64_t num_distances() const {
        return biased_length == 0 ? 0 : 2 * static_cast<std::int64_t>(biased_length) + kAttentionTile;
    }
    int kv_heads_of(const LayerShape& layer) const {
        return layer.num_kv_heads > 0 ? layer.num_kv_heads : num_kv_heads;
    }
    int head_dim_of(const LayerShape& layer) const { return layer.head_dim > 0 ? layer.head_dim : head_dim; }
    int most_kv_heads() const {
        return most([this](const LayerShape& layer) { return kv_heads_of(layer); });
    }
    int most_head_dim() const {
        return most([this](const LayerShape& layer) { return head_dim_of(layer); });
    }
    int most_key_numbers() const {
        return most([this](const LayerShape& layer) { return kv_heads_of(layer) * head_dim_of(layer); });
    }

  private:
    template <typename Number>
    int most(Number number) const {
        int found = 0;
        for (const LayerShape& layer : layers) found = std::max(found, number(layer));
        return found;
    }
};

// The least and the highest numbers that the inputs of a matrix and its outputs are set to.
struct Bounds {
    float input_low, input_high, output_low, output_high;
};

// A matrix in panels, with its bias.
class PackedMatrix {
  public:
    // Whether bfloat16 becomes compact: if that takes less memory, and all numbers fit.
    enum class Form { kPlain, kSmallest };

    // `as` is the type of the rows, or the type of codes to make from floats (make_codes). The panels are in `memory`.
    // Without a team, the calling thread packs alone. Throws std::bad_alloc.
    void pack(const Kernels& kernels, ThreadTeam* team, Arena& memory, const MatrixRows& rows, StoredType as,
              Form form = Form::kPlain);
    void set_bias(const float* bias, int count);
    void set_bounds(const Bounds& bounds) { bounds_ = bounds; }
    const std::optional<Bounds>& bounds() const { return bounds_; }
    bool empty() const { return shape_.panels == nullptr; }
    MatrixView view() const;
    std::size_t num_bytes() const { return panel_bytes_ + bias_.size() * sizeof(float); }

  private:
    bool fill(const Kernels& kernels, ThreadTeam* team, Arena& memory, const MatrixRows& rows, StoredType as);

    MatrixView shape_;
    std::size_t panel_bytes_ = 0;
    Buffer<float> bias_;
    std::optional<Bounds> bounds_;
};

struct NormWeights {
    std::vector<float> weight;
    std::vector<float> bias;
};

struct ExpertWeights {
    PackedMatrix gate, up, down;
};

constexpr int kXieluNumbers = 4;
constexpr int kStreams = 4;

struct LayerWeights {
    NormWeights attention_norm, after_attention_norm, joined_attention_norm;
    NormWeights mlp_norm, after_mlp_norm, joined_mlp_norm;
    NormWeights query_norm, key_norm;  // concatenated, if each head has its own
    NormWeights value_norm;            // of one head, all 1; empty: none
    PackedMatrix query, key, value, output;
    // Also of a recurrent layer, whose query, key, value and output are those of its rule; of a convolution, the gate,
    // the value, the output gate and the output.
    PackedMatrix attention_gate;
    PackedMatrix delta_rate, delta_decay;
    NormWeights delta_norm;
    std::vector<float> filter;               // of a recurrent layer, [filter_width, its inputs]
    std::vector<float> filter_bias;          // [its inputs]; empty: none
    std::vector<float> mamba_skip;           // [num_heads], of a state-space layer
    std::vector<float> delta_decay_offsets;  // [num_heads]
    std::vector<double> delta_decay_speeds;  // [num_heads]
    std::vector<float> sinks;                // [num_heads]; empty: none
    std::vector<float> key_centre;  // subtracted from each key before storing, [num_kv_heads * head_dim]; may be empty
    PackedMatrix query_down, latent;
    NormWeights query_down_norm, latent_norm;
    std::vector<PackedMatrix> key_up, value_up;  // per head: [rank, plain_dim] and [value_dim, rank]
    PackedMatrix gate, up, down, router;         // in a sparse layer: the shared MLP, if any
    std::vector<float> xielu;                    // the numbers of that activation, see xielu.h; empty: another one
    std::vector<float> router_offset;            // added to weights for choosing experts; may be empty
    std::vector<float> expert_factors;           // of the weights of experts; may be empty
    NormWeights router_norm, experts_norm;       // of hidden states; empty: both read what the shared MLP reads
    NormWeights after_experts_norm, after_shared_norm;
    PackedMatrix shared_router;             // the score of the shared MLP, one output; may be empty
    PackedMatrix input_gate, input_output;  // of the layer's own input
    NormWeights after_input_norm;
    PackedMatrix laurel_in, laurel_out;
    NormWeights laurel_norm;
    PackedMatrix stream_router;
    NormWeights stream_norm;
    std::vector<float> stream_predict, stream_correct;  // [kStreams * kStreams, kStreams], [kStreams, kStreams]
    std::vector<float> stream_scale;                    // [hidden_size]; may be empty
    float scale = 1.0F;                                 // of the layer's output
    std::vector<ExpertWeights> experts;
};

// Row by row as in the checkpoint, for looking up rows; borrowed.
struct EmbeddingRows {
    const void* data = nullptr;
    StoredType type = StoredType::kFloat32;
    int size = 0;             // numbers of a row
    bool is_float16 = false;  // `type` is then bfloat16, which has the same size

    std::size_t bytes_of_row() const { return row_bytes(type, size); }
    void look_up(std::int64_t token, float* to) const {
        const std::byte* row = static_cast<const std::byte*>(data) + token * bytes_of_row();
        if (!is_float16) return widen_row(type, row, size, to);
        const auto* numbers = reinterpret_cast<const std::uint16_t*>(row);
        for (int i = 0; i < size; ++i) to[i] = from_float16(numbers[i]);
    }
};

struct DecoderWeights {
    Arena memory;  // of all matrices
    PackedMatrix embedding_in, embedding_out, head;
    EmbeddingRows embedding;        // without data if the head is tied
    EmbeddingRows layer_embedding;  // a row has the inputs of all layers
    PackedMatrix layer_inputs;
    NormWeights layer_inputs_norm;
    std::array<PackedMatrix, kStreams - 1> stream_in, stream_out;  // of the streams after the first one
    std::vector<float> positions;                                  // [rows, hidden_size]
    std::vector<float> distance_bias;                              // [num_heads, num_distances]; empty: none
    std::vector<float> token_types;  // a row is added to each embedded token; may be empty
    NormWeights embedding_norm, final_norm;
    NormWeights token_norm, state_norm;  // of the halves of given rows, before embedding_in; empty: none
    std::vector<LayerWeights> layers;
};

class Adapter;
class AttentionPieces;
struct StepCall;

// The tokens of a step, sequence by sequence; see StepInputs in Python.
struct StepView {
    int num_sequences = 0;
    int num_tokens = 0;
    int num_logits = 0;
    int num_states = 0;
    const std::int64_t* query_starts = nullptr;   // [num_sequences + 1]
    const std::int64_t* token_ids = nullptr;      // [num_tokens]
    const std::int64_t* positions = nullptr;      // [num_tokens]
    const std::int64_t* logit_indices = nullptr;  // [num_logits]
    const std::int64_t* state_indices = nullptr;  // [num_states]
    const std::int64_t* given = nullptr;        // [num_tokens], a row instead of an embedding, -1: none; null: no rows
    Rows given_rows = {};                       // of embedding_size numbers, and hidden_size for each of deep_rows
    const std::int64_t* coordinates = nullptr;  // [num_axes, num_tokens]; null: each is the position
    const std::int64_t* ends_seen = nullptr;    // [num_tokens], see AttentionTask::end; null: all are 0
    int first_layer = 0;                        // a part of the layers, after a call with those before it
    int end_layer = -1;                         // -1: all layers
    std::vector<const std::int64_t*> slots;     // per KV group: [num_tokens]
    std::vector<const std::int64_t*> tables;    // per KV group: [num_sequences, table_strides[group]]
    std::vector<std::int64_t> table_strides;
    std::vector<const Adapter*> adapters;  // per sequence, null: none; empty: no sequence has one

    bool is_given(int token) const { return given != nullptr && given[token] >= 0; }
    std::int64_t coordinate(int axis, int token) const {
        return coordinates == nullptr ? positions[token]
                                      : coordinates[static_cast<std::int64_t>(axis) * num_tokens + token];
    }
};

// The memory for the results.
struct StepResultView {
    Rows logits;          // [num_logits], rows of vocab_size, rounded up to a multiple of 16
    bool* finite_logits;  // [num_logits]
    bool* finite_tokens;  // [num_tokens]: the token's hidden state is finite
    Rows states = {};     // [num_states], rows of hidden_size, rounded up likewise: after the final norm
};

class Decoder {
  public:
    Decoder(DecoderShape shape, const Kernels& kernels, ThreadTeam& team);
    ~Decoder();

    const DecoderShape& shape() const { return shape_; }
    const Kernels& kernels() const { return kernels_; }
    ThreadTeam& team() { return team_; }

    DecoderWeights weights;

    // Sets the KV memory of each layer. It must outlive the decoder's steps.
    void set_cache(std::vector<PagedKv> layers);

    std::size_t weight_bytes() const;

    // Allocates activations for steps of up to `num_tokens` tokens and `num_logits` logits. Throws std::bad_alloc.
    void reserve(int num_tokens, int num_logits);

    // Prepares the activations, this KV memory and the weights while no step runs; see MemoryPreparer. Throws
    // std::system_error if a thread cannot be started.
    void prepare_memory(const std::vector<MemoryRange>& kv_memory);

    // The number of pieces of memory still to prepare.
    std::size_t num_unprepared() const { return preparer_.num_left(); }

    // Computes one step, no larger than `reserve` allowed. Throws std::bad_alloc.
    void run(const StepView& step, const StepResultView& results);

    // Writes the rows of the embedding for the tokens of `step`, of which it reads no other columns.
    void embed(const StepView& step, const Rows& rows);

    // Computes the logits of hidden states after the final norm, no more than `reserve` allowed.
    void project(const Rows& states, int count, const Rows& logits, bool* finite_logits);

  private:
    struct Activations;
    class Products;
    class StreamProducts;
    class Step;

    // Finds the tokens of the second type.
    void find_types(StepCall& call) const;
    // Cuts the attention of a call.
    void plan(StepCall& call, std::vector<AttentionPieces>& pieces) const;

    DecoderShape shape_;
    const Kernels& kernels_;
    ThreadTeam& team_;
    std::vector<PagedKv> cache_;  // per layer
    int first_reader_ = 0;        // from this layer on, none has keys
    std::unique_ptr<Activations> activations_;
    MemoryPreparer preparer_;
};

// The bytes that Decoder::reserve allocates.
std::size_t activation_bytes(const DecoderShape& shape, int num_tokens, int num_logits, int num_threads);

// The kernels compiled for an instruction set. Run them only after cpu_features() has found that set: it also
// requests the tile registers of AMX.
const Kernels& kernels_for(InstructionSet instruction_set);

// The kernels that this machine can run, the fastest last.
std::vector<const Kernels*> usable_kernels();

}  // namespace quire
