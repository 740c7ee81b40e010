// A decoder-only model, run by a team of threads: one call computes a step from token ids to logits.
//
// The model is data (`DecoderShape`, the C++ form of the DecoderSpec in Python), its weights are set
// part by part, packed, and then only read. The decoder owns its weights and activations; the KV
// memory is the caller's. A step is a row of phases with a barrier behind each:
//
//     embed ─► per layer: norm ─► q, k, v ─► heads, write KV ─► attention ─► output ─► norm ─► MLP
//           ─► norm of the rows that are wanted ─► head
//
// The keys and values of all tokens of the step are written before any is read. Which member of the
// team computes which piece, and how tokens lie beside each other, changes no bit of a row.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "quire/buffers.h"
#include "quire/cpu_features.h"
#include "quire/kernels.h"
#include "quire/thread_team.h"

namespace quire {

struct NormShape {
    float epsilon = 0.0F;
    bool center = false;
    bool unit_offset = false;
};

struct LayerShape {
    std::int64_t window = 0;  // 0: all positions
    int rope = -1;            // index into DecoderShape::ropes; -1: none
    bool sparse = false;
    int kv_group = 0;  // whose block tables lead to its keys and values
    int kv_place = 0;  // which array of the KV memory holds them
};

struct RopeShape {
    int rotary_dim = 0;
    float scale = 1.0F;
    std::vector<float> inverse_frequencies;
};

struct DecoderShape {
    int vocab_size = 0;
    int hidden_size = 0;
    int embedding_size = 0;  // as hidden_size where nothing is projected
    int num_heads = 0;
    int num_kv_heads = 0;
    int head_dim = 0;
    int intermediate_size = 0;
    int num_experts = 0;
    int experts_per_token = 0;
    int expert_size = 0;
    bool normalize_experts = false;
    bool gated = true;
    bool tied_head = false;
    bool qk_norm = false;
    Activation activation = Activation::kSilu;
    NormShape norm;
    NormShape head_norm;
    float attention_scale = 1.0F;
    float score_soft_cap = 0.0F;
    float logit_soft_cap = 0.0F;
    float embedding_scale = 1.0F;
    int learned_positions = -1;  // offset in their table; -1: none
    std::vector<RopeShape> ropes;
    std::vector<LayerShape> layers;
};

// A matrix in panels, with its bias.
class PackedMatrix {
  public:
    // `type` is that of the rows, or int8. Throws std::bad_alloc.
    void pack(const Kernels& kernels, ThreadTeam& team, const MatrixRows& rows, NumberType type);
    void set_bias(const float* bias, int count);
    bool empty() const { return panels_.size() == 0; }
    MatrixView view() const;
    std::size_t num_bytes() const { return panels_.size() + bias_.size() * sizeof(float); }

  private:
    MatrixView shape_;
    Buffer<std::byte> panels_;
    Buffer<float> bias_;
};

struct NormWeights {
    std::vector<float> weight;
    std::vector<float> bias;
};

struct ExpertWeights {
    PackedMatrix gate, up, down;
};

struct LayerWeights {
    NormWeights attention_norm, after_attention_norm, joined_attention_norm;
    NormWeights mlp_norm, after_mlp_norm, joined_mlp_norm;
    NormWeights query_norm, key_norm;
    PackedMatrix query, key, value, output;
    PackedMatrix gate, up, down, router;
    std::vector<ExpertWeights> experts;
};

struct DecoderWeights {
    PackedMatrix embedding_in, embedding_out, head;
    // Rows are looked up, so it lies as in the checkpoint, borrowed; none where the head is tied.
    const void* embedding = nullptr;
    NumberType embedding_type = NumberType::kFloat32;
    std::vector<float> positions;  // [rows, hidden_size]
    NormWeights final_norm;
    std::vector<LayerWeights> layers;
};

// The tokens of a step, those of each sequence one after another; see StepInputs in Python.
struct StepView {
    int num_sequences = 0;
    int num_tokens = 0;
    int num_logits = 0;
    const std::int64_t* query_starts = nullptr;   // [num_sequences + 1]
    const std::int64_t* token_ids = nullptr;      // [num_tokens]
    const std::int64_t* positions = nullptr;      // [num_tokens]
    const std::int64_t* logit_indices = nullptr;  // [num_logits]
    std::vector<const std::int64_t*> slots;       // per KV group: [num_tokens]
    std::vector<const std::int64_t*> tables;      // per KV group: [num_sequences, table_strides[group]]
    std::vector<std::int64_t> table_strides;
};

// Where the results go.
struct StepResultView {
    Rows logits;          // [num_logits], rows of vocab_size up to a multiple of 16
    bool* finite_logits;  // [num_logits]
    bool* finite_tokens;  // [num_tokens]: the hidden state of the token is finite
};

class Decoder {
  public:
    Decoder(DecoderShape shape, const Kernels& kernels, ThreadTeam& team);
    ~Decoder();

    const DecoderShape& shape() const { return shape_; }
    const Kernels& kernels() const { return kernels_; }
    ThreadTeam& team() { return team_; }

    DecoderWeights weights;

    // The KV memory, per place; it must outlive the decoder's steps.
    void set_cache(std::vector<PagedKv> places);

    std::size_t weight_bytes() const;

    // Allocates activations for steps of so many tokens and logits. Throws std::bad_alloc.
    void reserve(int num_tokens, int num_logits);

    // Computes one step; it must fit into what was reserved. Throws std::bad_alloc.
    void run(const StepView& step, const StepResultView& results);

  private:
    struct Activations;
    class Step;

    DecoderShape shape_;
    const Kernels& kernels_;
    ThreadTeam& team_;
    std::vector<PagedKv> cache_;
    std::unique_ptr<Activations> activations_;
};

// Bytes of activations that a decoder allocates for steps of so many tokens and logits.
std::size_t activation_bytes(const DecoderShape& shape, int num_tokens, int num_logits, int num_threads);

// The kernels compiled for an instruction set. They run where cpu_features() has found it: the tile registers of
// AMX are asked for there.
const Kernels& kernels_for(InstructionSet instruction_set);

// The kernels that this machine can run, best last.
std::vector<const Kernels*> usable_kernels();

}  // namespace quire
