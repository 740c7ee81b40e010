// The kernels: the inner loops of a decoder, as one table of functions per instruction set.
//
// A kernel works on raw pointers and on one piece of the work (some rows, some columns, one head). It does
// not know threads or models: its caller cuts the work into pieces. Every cut gives the same bits,
// because the order of each sum depends only on the row.
//
//     a matrix [out, in]     panels of 16 outputs, the last one padded, in groups of four panels:
//                                float32, bfloat16    [out / 64][in][4][16]
//                                bfloat16 in pairs    [out / 64][in / 2][4][16][2]
//                                compact              [out / 64][in / 256][bfloat16 in 12 bits: compact.h]
//                                coded                [out / 64][in / 256][codes and their scales: coded.h]
//     keys of one head       groups of 16 tokens: [block_size / 16][steps][16][inputs of a step]
//     values of one head     with value_stride = head_dim rounded up to a multiple of 16:
//                                in general           [block_size][value_stride]
//                                pairs of tokens, and int8
//                                                     [block_size / 2][value_stride][2]
//     latents                have the layout of values, and are keys as well: float32 or bfloat16, one head, head_dim a
//                            multiple of 16. A value is the first latent_dim numbers
//     int8 keys and values   end with the scales of the tokens, [block_size] floats: number = scale * q
//     4-bit keys             [block_size / 16][value_stride / 8][16][4 bytes], then a scale and a minimum for each
//                            32 numbers of a token: [value_stride / 32][block_size][2] bfloat16
//     states                 half of the key heads have their records in the place of keys, the others in that of
//                            values. A record: S of each value head [value_dim / 64][key_dim][64], the last columns
//                            [key_dim][16]; inputs [num_inputs_kept][record_inputs]; changes of the last tokens
//                            [num_late][record_change]: a key, for each value head a vector, and for each its decay; in
//                            the last two floats an int32 each: how many of the last tokens S lacks, and the position
//                            of the last one. S lacks the last token, so that it can be computed again, and guesses
//     4-bit values           [block_size / 4][value_stride / 32][16][4 bytes], then a scale and a minimum for each
//                            token: [block_size][2] bfloat16. value_stride is a multiple of 32. See int4.h
//
// "In pairs": some instruction sets multiply pairs of bfloat16.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// Kernel files are compiled once per instruction set, and the linker keeps only one copy of an inline function in
// a header. So such a function must always be inlined: that copy could use instructions that the machine lacks.
#define QUIRE_INLINE __attribute__((always_inline)) inline

constexpr int kPanelWidth = 16;
// The softmax runs over tiles of this many absolute positions, for any block size.
constexpr int kAttentionTile = 64;

QUIRE_INLINE constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// The numbers of a matrix; compact: bfloat16 in 12 bits; coded: with a Coding.
enum class NumberType { kFloat32, kBfloat16, kCompact, kCoded };

// The type of stored keys and values. kK8V4: keys are int8, values have 4 bits; kInt4: both have 4 bits. Numbers of 4
// bits are rotated by a Hadamard matrix, and stored as integers from 0 to 15 with a scale and a minimum.
enum class KvType { kFloat32, kBfloat16, kInt8, kK8V4, kInt4 };

// The numbers of a 4-bit key that share a scale and a minimum.
constexpr int kInt4Group = 32;

// The type of a matrix's rows in a file: floats, or a GGUF block type (blocks.h).
enum class StoredType {
    kFloat32,
    kBfloat16,
    kQ4_0,
    kQ4_1,
    kQ5_0,
    kQ5_1,
    kQ8_0,
    kQ2K,
    kQ3K,
    kQ4K,
    kQ5K,
    kQ6K,
    kIq4Nl,
    kIq4Xs,
    kMxfp4,
    kNvfp4,
    kTernary,
    kIq1,
    kIq2,
    kIq3Xxs,
    kIq3S
};

// The numbers that codes of 3 or 4 bits represent, if they are uneven: see kTables.
enum class CodeTable : std::uint8_t { kNone, kTwiceE2m1, kIq1, kIq2, kIq3Xxs, kIq3S, kIq4 };

// What the scales of codes are: float16; nested, a small integer or a float of 8 bits (e4m3, from 0 on) times a float16
// or a float32 of 256 inputs; or powers of two, a byte with the exponent bits of a float32.
enum class ScaleType : std::uint8_t { kFloat16, kNested, kNestedE4m3, kPower };

// The format of a coded matrix's weights, each scale * code + minimum.
struct Coding {
    std::uint8_t bits = 8;    // of a code: 2 to 6, or 8
    std::uint8_t group = 32;  // adjacent inputs that share a scale: 16 or 32
    ScaleType scales = ScaleType::kFloat16;
    bool minimums = false;  // of the same type
    CodeTable table = CodeTable::kNone;

    QUIRE_INLINE constexpr bool nested() const {
        return scales == ScaleType::kNested || scales == ScaleType::kNestedE4m3;
    }
    QUIRE_INLINE constexpr int scale_bytes() const { return scales == ScaleType::kFloat16 ? 2 : 1; }
};

// A product with coded weights rounds each group of this many inputs of a row to int8, with its own scale.
constexpr int kRowGroup = 32;

// kClampedSwiglu is only for gates: its other factor is clamped too (see gate).
// kQuickGelu is x * sigmoid(1.702 x).
enum class Activation { kSilu, kGeluTanh, kGelu, kQuickGelu, kRelu, kReluSquared, kClampedSwiglu };

// A matrix [num_outputs, num_inputs] as in a checkpoint: row by row; borrowed.
struct MatrixRows {
    const void* data = nullptr;
    StoredType type = StoredType::kFloat32;
    int num_outputs = 0;
    int num_inputs = 0;
};

// A matrix in panels, borrowed.
struct MatrixView {
    const void* panels = nullptr;
    const float* bias = nullptr;  // [out rounded up to a multiple of 16], or null
    NumberType type = NumberType::kFloat32;
    Coding coding = {};  // if the matrix is coded
    int num_outputs = 0;
    int num_inputs = 0;

    QUIRE_INLINE int num_panels() const { return (num_outputs + kPanelWidth - 1) / kPanelWidth; }
};

// Rows of numbers, `stride` apart.
struct Rows {
    float* data = nullptr;
    int stride = 0;

    QUIRE_INLINE float* row(int index) const { return data + static_cast<std::size_t>(index) * stride; }
};

// The forms of rows that products need in addition to floats.
struct RowForms {
    bool int8 = false;      // for coded matrices
    bool bfloat16 = false;  // for bfloat16 matrices, if an instruction multiplies pairs

    QUIRE_INLINE RowForms operator|(const RowForms& other) const {
        return {int8 || other.int8, bfloat16 || other.bfloat16};
    }
    QUIRE_INLINE bool any() const { return int8 || bfloat16; }
};

// Rows in the forms of Kernels::round_row, rounded once for all their products. For each 256 inputs: the int8 numbers
// of all rows, then their sums and scales; then the bfloat16 numbers of all rows. So the rows for a chunk of a matrix
// are close together in memory.
struct RoundedRows {
    std::byte* data = nullptr;
    int num_rows = 0;  // of a product

    // The bytes of 256 inputs of a row.
    static constexpr int kChunkInputs = 256, kInt8Bytes = 448, kBfloat16Bytes = 2 * kChunkInputs;
    // The tiles of a matrix unit read up to this many extra rows, for unused sums.
    static constexpr int kRowsBehind = 3;

    QUIRE_INLINE static constexpr std::size_t bytes(int num_inputs, int num_rows) {
        const std::size_t num_chunks = (num_inputs + kChunkInputs - 1) / kChunkInputs;
        return num_chunks * num_rows * (kInt8Bytes + kBfloat16Bytes) + kRowsBehind * kBfloat16Bytes;
    }
    QUIRE_INLINE std::byte* int8_at(int input) const {
        return data + static_cast<std::size_t>(input / kChunkInputs) * num_rows * (kInt8Bytes + kBfloat16Bytes);
    }
    QUIRE_INLINE std::byte* bfloat16_at(int input, int row) const {
        return int8_at(input) + static_cast<std::size_t>(num_rows) * kInt8Bytes +
               static_cast<std::size_t>(row) * kBfloat16Bytes;
    }
};

// The rows of a product, as floats and rounded.
struct LinearInput {
    Rows rows;
    RoundedRows rounded = {};
};

// Rows and panels of a product: rows first_row … first_row + num_rows - 1, panels likewise.
struct LinearTile {
    int first_row = 0;
    int num_rows = 0;
    int first_panel = 0;
    int num_panels = 0;
    int next_panel = 0;  // where the same thread probably continues; it is prefetched
};

// One norm. With `center` the mean is subtracted first; with `unit_offset` the scale is 1 + weight.
struct NormView {
    const float* weight = nullptr;
    const float* bias = nullptr;
    float epsilon = 0.0F;
    bool center = false;
    bool unit_offset = false;
};

// The paged keys and values of one layer, borrowed.
struct PagedKv {
    // [num_blocks][num_kv_heads], each laid out as above.
    void* keys = nullptr;
    void* values = nullptr;
    KvType type = KvType::kFloat32;
    int num_kv_heads = 0;
    int block_size = 0;
    int head_dim = 0;
    int latent_dim = 0;  // 0: separate keys and values; else `keys` and `values` are the same memory
    // Bytes after the keys, and after the values, of each block: a state can take more than the block's tokens.
    std::size_t key_gap = 0, value_gap = 0;

    QUIRE_INLINE int value_dim() const { return latent_dim > 0 ? latent_dim : head_dim; }
    QUIRE_INLINE bool has_int4_values() const { return type == KvType::kK8V4 || type == KvType::kInt4; }
    QUIRE_INLINE int value_stride() const { return round_up(head_dim, has_int4_values() ? kInt4Group : kPanelWidth); }
    // The bytes of one head of a token's key, with its scales.
    QUIRE_INLINE std::size_t key_bytes() const {
        const std::size_t stride = value_stride();
        if (type == KvType::kFloat32) return 4 * stride;
        if (type == KvType::kBfloat16) return 2 * stride;
        return type == KvType::kInt4 ? stride / 2 + 4 * (stride / kInt4Group) : stride + 4;
    }
    QUIRE_INLINE std::size_t value_bytes() const { return has_int4_values() ? value_stride() / 2 + 4 : key_bytes(); }
    // The index of a block's head, counted over all blocks.
    QUIRE_INLINE std::size_t head_index(std::int64_t block, int kv_head) const {
        return static_cast<std::size_t>(block) * num_kv_heads + kv_head;
    }
    QUIRE_INLINE std::byte* keys_of(std::int64_t block, int kv_head) const {
        return static_cast<std::byte*>(keys) + head_index(block, kv_head) * block_size * key_bytes() + block * key_gap;
    }
    QUIRE_INLINE std::byte* values_of(std::int64_t block, int kv_head) const {
        return static_cast<std::byte*>(values) + head_index(block, kv_head) * block_size * value_bytes() +
               block * value_gap;
    }
};

// One of several sequences with one token each that attend together.
struct AttentionMember {
    const std::int64_t* block_table = nullptr;
    int token = 0;  // the index of its row
    std::int64_t position = 0;
};

// Attention of consecutive tokens of one sequence, or of several sequences with one token each, over some
// key-value heads and the `group` query heads that read each of them. The key-value heads are consecutive,
// because their keys and values are adjacent in a block.
struct AttentionTask {
    PagedKv kv;
    const std::int64_t* block_table = nullptr;  // of the sequence, or of any of several sequences
    Rows query;                                 // row: [num_heads * head_dim]
    Rows output;                                // row: [num_heads * value_dim]
    // Several sequences share the blocks of their first `shared` positions, which are whole tiles. Each token
    // sees all these positions.
    const AttentionMember* members = nullptr;
    int num_members = 0;  // 0: one sequence
    std::int64_t shared = 0;
    int first_token = 0;  // index of the first row
    int num_tokens = 0;
    std::int64_t first_position = 0;  // of the first row in its sequence
    int kv_head = 0;
    int num_kv_heads = 1;  // more than 1 only if all queries, tokens * heads * group, fit into kAttentionQueries
    int group = 1;
    // The query heads of each group that are computed: a thread may take a part of a wide group.
    int first_in_group = 0;
    int num_in_group = 0;  // 0: all
    float scale = 1.0F;
    std::int64_t window = 0;  // positions that a token sees, including its own; 0: all
    bool chunked = false;     // windows do not move with the token, but follow each other: it sees those of its own
    std::int64_t end = 0;     // tokens also see later positions, before this one; 0: none
    std::int64_t window_ahead = 0;  // how many of those, including a token's own; 0: all
    float soft_cap = 0.0F;          // 0: none
    // [num_heads]: scores that take part in the softmax like a position without a value; null: none.
    const float* sinks = nullptr;
    // [num_heads, num_distances]: biases of scores, before they are capped, by the position of a key minus that of the
    // query; the pointer is to the bias of distance 0 of the first head. It is read for all positions of a tile. Null:
    // none.
    const float* distance_bias = nullptr;
    std::int64_t num_distances = 0;

    QUIRE_INLINE int heads_in_group() const { return num_in_group > 0 ? num_in_group : group; }
};

// Linear attention by the gated delta rule, see DeltaSpec in Python, or a state-space layer, see MambaSpec.
struct DeltaShape {
    int num_heads = 0;  // of values; 0: the model has no recurrent layers
    int num_key_heads = 0;
    int key_dim = 0;
    int value_dim = 0;
    int filter_width = 0;
    bool outputs_in_turns = false;  // gates and outputs have the first value head of each key, then the second
    int record_heads = 0;           // value heads that share a record, and a key; threads share a layer by records
    bool mamba = false;             // a state-space layer: no delta rule, rates are steps, values are added to outputs
    int num_late = 1;               // the most of its last tokens that S lacks
    float rate_scale = 1.0F;        // of the rates of linear attention

    QUIRE_INLINE int heads_per_key() const { return num_heads / num_key_heads; }
    QUIRE_INLINE int num_records() const { return num_heads / record_heads; }
    QUIRE_INLINE int key_head_of(int record) const { return record * record_heads / heads_per_key(); }
    QUIRE_INLINE int key_numbers() const { return num_key_heads * key_dim; }
    QUIRE_INLINE int value_numbers() const { return num_heads * value_dim; }
    // The place of a value head among gates and outputs.
    QUIRE_INLINE int output_place(int head) const {
        if (!outputs_in_turns) return head;
        return head % heads_per_key() * num_key_heads + head / heads_per_key();
    }
    // A row of inputs: queries, keys, values, then the rows of rates and of decays.
    QUIRE_INLINE int num_inputs() const { return 2 * key_numbers() + value_numbers(); }
    QUIRE_INLINE int first_of_rates() const { return num_inputs(); }
    QUIRE_INLINE int first_of_decays() const { return num_inputs() + round_up(num_heads, kPanelWidth); }
    QUIRE_INLINE int input_stride() const { return num_inputs() + 2 * round_up(num_heads, kPanelWidth); }
    // A filtered row: queries and keys of each record, values, decays, rates, and the product of query and key of each
    // record.
    QUIRE_INLINE int filtered_keys() const { return num_records() * key_dim; }
    QUIRE_INLINE int filtered_inputs() const { return 2 * filtered_keys() + value_numbers(); }
    QUIRE_INLINE int filtered_stride() const {
        return round_up(filtered_inputs() + 2 * num_heads + num_records(), kPanelWidth);
    }
    // The floats of a record.
    QUIRE_INLINE std::size_t record_matrices() const {
        return static_cast<std::size_t>(record_heads) * key_dim * value_dim;
    }
    QUIRE_INLINE int record_inputs() const { return round_up(2 * key_dim + record_heads * value_dim, kPanelWidth); }
    QUIRE_INLINE int num_inputs_kept() const { return filter_width - 1 + num_late; }
    QUIRE_INLINE std::size_t inputs_at(std::int64_t position) const {
        return record_matrices() + static_cast<std::size_t>(position % num_inputs_kept()) * record_inputs();
    }
    QUIRE_INLINE int record_change() const { return round_up(key_dim + record_heads * (value_dim + 1), kPanelWidth); }
    QUIRE_INLINE std::size_t change_at(std::int64_t position) const {
        return record_matrices() + static_cast<std::size_t>(num_inputs_kept()) * record_inputs() +
               static_cast<std::size_t>(position % num_late) * record_change();
    }
    QUIRE_INLINE std::size_t record_floats() const {
        return change_at(0) + static_cast<std::size_t>(num_late) * record_change() + kPanelWidth;
    }
};

// Which tokens are in a state: the position of the last one, and how many of the last ones can be taken back.
struct StateEnd {
    std::int32_t num_late, position;

    // Whether tokens from a position on can follow.
    QUIRE_INLINE bool allows(std::int64_t first) const { return position - num_late < first && first <= position + 1; }
};

constexpr int kStateEnd = 2;  // its numbers, the last ones of a record

// Consecutive tokens of one sequence in a recurrent layer.
struct DeltaTask {
    const DeltaShape* shape = nullptr;
    const float* filter = nullptr;         // [filter_width][num_inputs]
    const float* filter_bias = nullptr;    // [num_inputs]; null: none
    const float* skip = nullptr;           // [num_heads]: the factors of values that are added to outputs, with Mamba
    const float* decay_offsets = nullptr;  // [num_heads]
    const double* decay_speeds = nullptr;  // [num_heads]
    PagedKv kv;
    const std::int64_t* block_table = nullptr;
    Rows inputs;          // row: [input_stride]
    Rows filtered;        // row: [filtered_stride], for the kernel's use
    Rows output;          // row: [value_numbers]
    int first_token = 0;  // index of the first row
    int num_tokens = 0;
    int num_late = 1;                 // the last tokens that may have to be taken back
    std::int64_t first_position = 0;  // of the first row in its sequence

    // A record after a position.
    QUIRE_INLINE float* record_at(int record, std::int64_t position) const {
        const int half = shape->num_records() / 2;
        const std::int64_t block = block_table[position / kv.block_size];
        std::byte* at = record < half ? kv.keys_of(block, 0) : kv.values_of(block, 0);
        return reinterpret_cast<float*>(at) + static_cast<std::size_t>(record % half) * shape->record_floats();
    }
    QUIRE_INLINE float* record_before(int record) const { return record_at(record, first_position - 1); }
    QUIRE_INLINE float* record_of(int record, int token) const { return record_at(record, first_position + token); }
    QUIRE_INLINE int first_late() const { return num_tokens - num_late; }
    // Whether the state after a token stays in memory: at the end of a block, and after the last token.
    QUIRE_INLINE bool is_stored_after(int token) const {
        return token == num_tokens - 1 || (first_position + token + 1) % kv.block_size == 0;
    }
};

// A short convolution; see ConvolutionSpec in Python.
struct ConvolutionShape {
    int size = 0;  // channels; 0: the model has no convolutions
    int filter_width = 0;
    int chunk = 0;     // channels that share a record
    int num_late = 1;  // the most tokens that can be taken back

    QUIRE_INLINE int num_chunks() const { return size / chunk; }
    QUIRE_INLINE int num_inputs_kept() const { return filter_width - 1 + num_late; }
    QUIRE_INLINE int inputs_at(std::int64_t position) const {
        return static_cast<int>(position % num_inputs_kept()) * chunk;
    }
    QUIRE_INLINE int record_floats() const { return num_inputs_kept() * chunk + kPanelWidth; }
};

// Consecutive tokens of one sequence in a layer with a convolution.
struct ConvolutionTask {
    const ConvolutionShape* shape = nullptr;
    const float* filter = nullptr;  // [filter_width][size]
    PagedKv kv;
    const std::int64_t* block_table = nullptr;
    Rows gates;  // row: [size]; overwritten with the inputs of the filter
    Rows values, output_gates, output;
    int first_token = 0;  // index of the first row
    int num_tokens = 0;
    int num_late = 1;                 // the last tokens that may have to be taken back
    std::int64_t first_position = 0;  // of the first row in its sequence

    // The record of a chunk after a position.
    QUIRE_INLINE float* record_at(int chunk, std::int64_t position) const {
        const int half = shape->num_chunks() / 2;
        const std::int64_t block = block_table[position / kv.block_size];
        std::byte* at = chunk < half ? kv.keys_of(block, 0) : kv.values_of(block, 0);
        return reinterpret_cast<float*>(at) + static_cast<std::size_t>(chunk % half) * shape->record_floats();
    }
    // Whether the state after a token stays in memory: at the end of a block, and after the last token.
    QUIRE_INLINE bool is_stored_after(int token) const {
        return token == num_tokens - 1 || (first_position + token + 1) % kv.block_size == 0;
    }
};

// What the numbers of all tokens at a position depend on, see random.h.
struct DrawKey {
    std::uint32_t first = 0, second = 0;
};

// A draw while its tokens are compared: the one with the least time wins, which is -log(its number) / its weight.
struct RaceView {
    DrawKey key;
    float highest = 0.0F;   // the logit whose weight is 1
    float scale = 0.0F;     // log2(e) / temperature: log2(weight) = (logit - highest) * scale
    float log_time = 0.0F;  // of base 2: the least time so far
};

// The most rows of `mix`.
constexpr int kMostMixed = 4;

// The most tokens of an AttentionTask.
constexpr int kAttentionTokens = 16;

struct Kernels {
    const char* name;
    // Whether matrices of bfloat16 take rows of bfloat16.
    bool multiplies_pairs;
    // Whether matrices can be compact.
    bool has_compact;

    QUIRE_INLINE RowForms forms_for(NumberType type) const {
        const bool is_bfloat16 = type == NumberType::kBfloat16 || type == NumberType::kCompact;
        return {type == NumberType::kCoded, is_bfloat16 && multiplies_pairs};
    }

    // Bytes of a matrix in panels.
    std::size_t (*packed_bytes)(const MatrixView& matrix);
    // Packs rows into panels first_panel … of the matrix, which has the shape of the rows. `as` determines the packed
    // type: the rows' own, or codes made from floats (make_codes). Compact panels are packed by groups of four; false:
    // their numbers do not fit into this form.
    bool (*pack_panels)(const MatrixRows& rows, const MatrixView& matrix, StoredType as, void* panels, int first_panel,
                        int num_panels);
    // Reads one row of a packed matrix as floats, for embeddings.
    void (*unpack_row)(const MatrixView& matrix, int row, float* output);

    // Rounds a row of an input.
    void (*round_row)(const LinearInput& input, RowForms forms, int num_inputs, int row);
    // output = input * matrix^T + bias, or output += … with `accumulate`.
    void (*linear)(const MatrixView& matrix, const LinearInput& input, const Rows& output, const LinearTile& tile,
                   bool accumulate);
    // output = activation(gate(input)) * up(input)
    void (*gated_linear)(const MatrixView& gate, const MatrixView& up, const LinearInput& input, const Rows& output,
                         const LinearTile& tile, Activation activation);
    void (*activate)(float* values, int count, Activation activation);
    // values = activation(values) * others, for a multiple of kPanelWidth numbers: the last step of gated_linear on
    // its sums.
    void (*gate)(float* values, const float* others, int count, Activation activation);

    // May work in place.
    void (*normalize)(const float* input, float* output, int size, const NormView& norm);
    // Rotates the pairs (i, i + half) of one head.
    void (*rotate)(float* head, const float* cosines, const float* sines, int half);
    void (*soft_cap)(float* values, int count, float cap);
    void (*add)(float* values, const float* others, int count);
    // rows[j] += the sum of all weights[j * num_rows + i] * rows[i], of sizes rounded up to kPanelWidth.
    void (*mix)(float* const* rows, int num_rows, const float* weights, int size);
    float (*mean)(const float* values, int count);
    // The mean of the squares of the distances from `middle`.
    float (*mean_square)(const float* values, int count, float middle);
    bool (*all_finite)(const float* values, int count);

    // Stores the key and the value of one token and head, [head_dim] each; of a latent, the key.
    void (*write_kv)(const PagedKv& kv, std::int64_t slot, int kv_head, const float* key, const float* value);
    // `scratch` holds attention_scratch(head_dim) floats.
    void (*attention)(const AttentionTask& task, float* scratch);

    // Adds the tokens to one record of the states, and writes their outputs; if the state does not allow these tokens,
    // NaN. `scratch` holds delta_scratch(key_dim) floats.
    void (*delta)(const DeltaTask& task, int record, float* scratch);
    // The same for a chunk of the channels of a convolution.
    void (*convolve)(const ConvolutionTask& task, int chunk);
    // values *= sigmoid(gates), for a multiple of kPanelWidth numbers.
    void (*multiply_by_sigmoid)(float* values, const float* gates, int count);

    // weights[i] = e^((logits[i] - shift) * factor); returns their sum.
    double (*exponentials)(const float* logits, int count, float shift, float factor, float* weights);
    // The highest number, and the lowest index that has it.
    void (*arg_max)(const float* values, int count, float* value, int* index);
    // The first token from `first` on that may have at most the time of the race, or `count`. It returns every token
    // that has, and hardly any other.
    int (*next_contender)(const float* logits, int first, int count, const RaceView& race);
};

// The most queries that are computed together in a tile.
constexpr int kAttentionQueries = 64;

// Floats of scratch that `delta` needs.
QUIRE_INLINE constexpr std::size_t delta_scratch(int key_dim) { return static_cast<std::size_t>(key_dim) * 64; }

// Floats of scratch that `attention` needs.
QUIRE_INLINE constexpr std::size_t attention_scratch(int head_dim) {
    return static_cast<std::size_t>(kAttentionQueries) * (2 * round_up(head_dim, kInt4Group) + kAttentionTile);
}

}  // namespace quire
