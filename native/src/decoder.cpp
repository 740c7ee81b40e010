#include "quire/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "expert_choice.h"
#include "head_rows.h"
#include "layer_inputs.h"
#include "recurrent_layer.h"
#include "stream_products.h"
#include "wanted_rows.h"

namespace quire {

// One step, as computed by each member of the team. All members hold the same call; pieces divide the writes
// among them.
class Decoder::Step : private StreamProducts {
  public:
    Step(Decoder& decoder, const StepCall& call, ThreadTeam::Member& member)
        : StreamProducts(decoder, call, member), cache_(decoder.cache_), results_(call.results) {}

    void run() {
        const int num_layers = static_cast<int>(shape_.layers.size());
        const int end = view_.end_layer < 0 ? num_layers : view_.end_layer;
        if (view_.first_layer == 0) embed();
        run_layers(view_.first_layer, end);
        if (end == num_layers) {
            finish();
        } else {
            for_rows(view_.num_states, [&](int index) {
                std::memcpy(results_.states.row(index), hidden_.row(static_cast<int>(view_.state_indices[index])),
                            shape_.hidden_size * sizeof(float));
            });
        }
    }

    // Runs the layers before one, and leaves only wanted rows for the others.
    void run_until(int layer, const WantedRows& wanted) {
        embed();
        run_layers(0, layer);
        flag_finite();
        member_.once([&] {
            wanted.gather(hidden_, shape_.hidden_size);
            wanted.gather(layer_inputs_, sizes_.layer_inputs);
            wanted.gather({a_.streams.data(), sizes_.streams}, sizes_.streams);
            wanted.gather({a_.angles.data(), sizes_.angles}, sizes_.angles);
        });
    }

    void run_from(int layer) {
        run_layers(layer, static_cast<int>(shape_.layers.size()));
        finish();
    }

    void run_embedding(const Rows& rows) {
        for_rows(view_.num_tokens, [&](int row) { embed_token(row, rows.row(row)); });
    }

    void run_head(const Rows& states) {
        for_rows(view_.num_logits,
                 [&](int row) { std::memcpy(wanted_.row(row), states.row(row), shape_.hidden_size * sizeof(float)); });
        project_wanted();
    }

  private:
    void run_layers(int first, int end) {
        for (layer_ = first; layer_ < end; ++layer_) {
            const LayerShape& layer = shape_.layers[layer_];
            const LayerWeights& weights = weights_.layers[layer_];
            if (shape_.has_streams) predict_streams(weights);
            if (layer.attends) attend(layer, weights);
            if (layer.skips_previous) leave_previous();
            if (layer.attends && !shape_.parallel && !waits(end)) leave_attention(layer, weights);
            if (shape_.laurel_rank > 0) add_laurel(weights);
            if (layer.transforms) transform(layer, weights);
            finish_layer(weights);
            if (layer_ < shape_.deep_rows && view_.given != nullptr) add_deep_rows();
        }
    }

    // Whether the output of this layer is added once the attention of the next layer has read the same rows.
    bool waits(int end) const { return layer_ + 1 < end && shape_.layers[layer_ + 1].skips_previous; }

    void leave_previous() {
        --layer_;
        leave_attention(shape_.layers[layer_], weights_.layers[layer_]);
        ++layer_;
    }

    // Adds the part of given rows that is for the layer's output.
    void add_deep_rows() {
        const int first = (layer_ + 1) * shape_.hidden_size;
        for_rows(view_.num_tokens, [&](int row) {
            if (!view_.is_given(row)) return;
            const float* from = view_.given_rows.row(static_cast<int>(view_.given[row])) + first;
            kernels_.add(hidden_.row(row), from, shape_.hidden_size);
        });
    }

    void embed() {
        const bool projected = !weights_.embedding_in.empty();
        const Rows& rows = projected ? normed_ : hidden_;
        for_rows(view_.num_tokens, [&](int row) {
            float* to = rows.row(row);
            embed_token(row, to);
            compute_angles(row);
            if (!projected) complete_embedding(row);
        });
        if (projected) {
            if (!weights_.token_norm.weight.empty()) normalize_halves(rows);
            linear(weights_.embedding_in, rows, hidden_, view_.num_tokens, false);
            for_rows(view_.num_tokens, [&](int row) { complete_embedding(row); });
        }
        if (shape_.layer_inputs.size > 0) compute_layer_inputs();
        if (shape_.has_streams) open_streams();
    }

    // Given rows are those of a token and of a hidden state, one after the other.
    void normalize_halves(const Rows& rows) {
        const int size = shape_.hidden_size;
        const NormView token = view_of(shape_.norm, weights_.token_norm),
                       state = view_of(shape_.norm, weights_.state_norm);
        for_rows(view_.num_tokens, [&](int row) {
            float* to = rows.row(row);
            kernels_.normalize(to, to, size, token);
            kernels_.normalize(to + size, to + size, size, state);
        });
    }

    void embed_token(int row, float* to) const {
        if (view_.is_given(row)) {
            std::memcpy(to, view_.given_rows.row(static_cast<int>(view_.given[row])),
                        shape_.embedding_size * sizeof(float));
            return;
        }
        look_up(static_cast<int>(view_.token_ids[row]), to);
        for (int i = 0; i < shape_.embedding_size; ++i) to[i] *= shape_.embedding_scale;
    }

    void look_up(int token, float* to) const {
        if (weights_.embedding.data == nullptr) return kernels_.unpack_row(weights_.head.view(), token, to);
        weights_.embedding.look_up(token, to);
    }

    void compute_layer_inputs() {
        linear(weights_.layer_inputs, hidden_, layer_inputs_, view_.num_tokens, false);
        for_rows(view_.num_tokens, [&](int row) {
            const auto token = view_.is_given(row) ? shape_.layer_inputs.given_token : view_.token_ids[row];
            compute_inputs(shape_, kernels_, weights_, token, layer_inputs_.row(row), scratch());
        });
    }

    // Adds the token type and the position, and normalises the row, as far as the model has them.
    void complete_embedding(int row) const {
        float* to = hidden_.row(row);
        if (!weights_.token_types.empty()) {
            const bool is_second = !view_.is_second.empty() && view_.is_second[row];
            kernels_.add(to, weights_.token_types.data() + (is_second ? shape_.hidden_size : 0), shape_.hidden_size);
        }
        if (shape_.learned_positions >= 0) {
            const std::size_t index = view_.positions[row] + shape_.learned_positions;
            kernels_.add(to, weights_.positions.data() + index * shape_.hidden_size, shape_.hidden_size);
        }
        const NormView norm = view_of(shape_.norm, weights_.embedding_norm);
        if (norm.weight != nullptr) kernels_.normalize(to, to, shape_.hidden_size, norm);
    }

    float* angles(int row) const { return a_.angles.data() + static_cast<std::size_t>(row) * sizes_.angles; }

    // Models are trained with angles rounded to float, so only the cosines and sines are computed in double.
    void compute_angles(int row) const {
        float* to = angles(row);
        for (const RopeShape& rope : shape_.ropes) {
            const int half = rope.rotary_dim / 2;
            for (int i = 0; i < half; ++i) {
                const auto at = rope.axes.empty() ? view_.positions[row] : view_.coordinate(rope.axes[i], row);
                const float angle = static_cast<float>(at) * rope.inverse_frequencies[i];
                to[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * rope.scale;
                to[half + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * rope.scale;
            }
            to += rope.rotary_dim;
        }
    }

    void attend(const LayerShape& layer, const LayerWeights& weights) {
        if (layer.recurrent) {
            return shape_.convolution.size > 0 ? convolve(layer, weights) : add_to_states(layer, weights);
        }
        if (shape_.latent.rank > 0) {
            prepare_latents(layer, weights);
        } else {
            const LinearInput input =
                normed(weights.attention_norm, weights.query, weights.key, weights.value, weights.attention_gate);
            if (shape_.bounded) {
                bounded_linear(weights.query, input.rows, update_, query_);
                bounded_linear(weights.key, input.rows, update_, key_);
                bounded_linear(weights.value, input.rows, update_, value_);
            } else if (!layer.has_keys) {
                project<1>({&weights.query}, {query_}, input, {Adapted::kQuery});
            } else if (layer.keys_are_values) {
                project<2>({&weights.query, &weights.key}, {query_, key_}, input, {Adapted::kQuery, Adapted::kKey});
            } else {
                project<3>({&weights.query, &weights.key, &weights.value}, {query_, key_, value_}, input,
                           {Adapted::kQuery, Adapted::kKey, Adapted::kValue});
            }
            if (shape_.gated_attention) {
                project<1>({&weights.attention_gate}, {gate_}, input, {Adapted::kAttentionGate});
            }
            prepare_heads(layer, weights);
        }
        member_.for_pieces(view_.num_attention_pieces[layer.kv_group],
                           [&](int piece) { attend_piece(layer, weights, piece); });
        if (shape_.gated_attention) {
            for_rows(view_.num_tokens, [&](int row) {
                kernels_.multiply_by_sigmoid(attended_.row(row), gate_.row(row),
                                             round_up(shape_.num_heads * shape_.head_dim_of(layer), kPanelWidth));
            });
        }
        if (shape_.latent.rank == 0) return;
        multiply_heads(Adapted::kValueUp, weights.value_up, {attended_, shape_.latent.rank},
                       {heads_, shape_.latent.value_dim});
    }

    void convolve(const LayerShape& layer, const LayerWeights& weights) {
        project<3>({&weights.query, &weights.key, &weights.value}, {query_, key_, value_},
                   normed(weights.attention_norm, weights.query, weights.key, weights.value),
                   {Adapted::kQuery, Adapted::kKey, Adapted::kValue});
        ConvolutionTask task;
        task.filter = weights.filter.data();
        task.kv = cache_[layer_];
        task.gates = query_;
        task.values = key_;
        task.output_gates = value_;
        task.output = attended_;
        convolve_rows(member_, shape_, kernels_, view_, layer.kv_group, task);
    }

    // A recurrent layer; the gated outputs of its states are in the rows of gates.
    void add_to_states(const LayerShape& layer, const LayerWeights& weights) {
        const DeltaShape& delta = shape_.delta;
        const RecurrentRows rows = {{a_.delta_inputs.data(), sizes_.delta_inputs},
                                    {a_.delta_filtered.data(), sizes_.delta_filtered},
                                    attended_,
                                    gate_};
        if (delta.mamba) {
            project<5>(
                {&weights.query, &weights.key, &weights.value, &weights.attention_gate, &weights.delta_decay},
                {rows.inputs_at(0), rows.inputs_at(delta.key_numbers()), rows.inputs_at(2 * delta.key_numbers()), gate_,
                 rows.inputs_at(delta.first_of_decays())},
                normed(weights.attention_norm, weights.query, weights.key, weights.value, weights.attention_gate,
                       weights.delta_decay),
                {Adapted::kQuery, Adapted::kKey, Adapted::kValue, Adapted::kAttentionGate, Adapted::kDeltaDecay});
        } else {
            project<6>({&weights.query, &weights.key, &weights.value, &weights.attention_gate, &weights.delta_rate,
                        &weights.delta_decay},
                       {rows.inputs_at(0), rows.inputs_at(delta.key_numbers()), rows.inputs_at(2 * delta.key_numbers()),
                        gate_, rows.inputs_at(delta.first_of_rates()), rows.inputs_at(delta.first_of_decays())},
                       normed(weights.attention_norm, weights.query, weights.key, weights.value, weights.attention_gate,
                              weights.delta_rate, weights.delta_decay),
                       {Adapted::kQuery, Adapted::kKey, Adapted::kValue, Adapted::kAttentionGate, Adapted::kDeltaRate,
                        Adapted::kDeltaDecay});
        }
        const RecurrentLayer recurrent(shape_, kernels_, view_, rows);
        recurrent.run(member_, layer, weights, cache_[layer_], scratch());
    }

    void leave_attention(const LayerShape& layer, const LayerWeights& weights) {
        const bool has_gates = layer.recurrent && shape_.delta.num_heads > 0;
        const Rows& outputs = has_gates ? gate_ : shape_.latent.rank > 0 ? heads_ : attended_;
        join(Adapted::kOutput, weights.output, outputs, weights.after_attention_norm, weights.joined_attention_norm);
    }

    // Computes queries and latents, and stores the latents. Queries are mapped to the space of latents.
    void prepare_latents(const LayerShape& layer, const LayerWeights& weights) {
        const LatentShape& latent = shape_.latent;
        const bool is_direct = latent.query_rank == 0;
        const PackedMatrix& first = is_direct ? weights.query : weights.query_down;
        project<2>({&first, &weights.latent}, {is_direct ? heads_ : query_down_, key_},
                   normed(weights.attention_norm, first, weights.latent),
                   {is_direct ? Adapted::kQuery : Adapted::kQueryDown, Adapted::kLatent});
        if (!is_direct) {
            const NormView norm = view_of(latent.norm, weights.query_down_norm);
            for_rows(view_.num_tokens, [&](int row) {
                kernels_.normalize(query_down_.row(row), query_down_.row(row), latent.query_rank, norm);
            });
            adapted_linear(Adapted::kQuery, weights.query, query_down_, heads_, false);
        }
        const NormView norm = view_of(latent.norm, weights.latent_norm);
        const int offset = angle_offset(layer), half = layer.rope < 0 ? 0 : latent.rope_dim / 2;
        for_rows(view_.num_tokens, [&](int row) {
            const float* cosines = angles(row) + offset;
            float* key = key_.row(row);
            kernels_.normalize(key, key, latent.rank, norm);
            if (half > 0) kernels_.rotate(key + latent.rank, cosines, cosines + half, half);
            kernels_.write_kv(cache_[layer_], view_.slots[layer.kv_group][row], 0, key, nullptr);
            for (int head = 0; head < shape_.num_heads; ++head) {
                const float* from = heads_.row(row) + head * latent.query_dim() + latent.plain_dim;
                float* to = query_.row(row) + head * shape_.head_dim + latent.rank;
                std::memcpy(to, from, latent.rope_dim * sizeof(float));
                if (half > 0) kernels_.rotate(to, cosines, cosines + half, half);
            }
        });
        multiply_heads(Adapted::kKeyUp, weights.key_up, {heads_, latent.query_dim()}, {query_, shape_.head_dim});
    }

    // The offset of a layer's angles in the angles of a row.
    int angle_offset(const LayerShape& layer) const {
        int offset = 0;
        for (int rope = 0; rope < layer.rope; ++rope) offset += shape_.ropes[rope].rotary_dim;
        return offset;
    }

    // Normalises and rotates the heads of each token, and stores its keys and values.
    void prepare_heads(const LayerShape& layer, const LayerWeights& weights) {
        const HeadRows heads(shape_, kernels_, layer, weights, cache_[layer_]);
        const int offset = angle_offset(layer);
        for_rows(view_.num_tokens, [&](int row) {
            heads.prepare_query(query_.row(row), angles(row) + offset, view_.positions[row]);
            if (!layer.has_keys) return;
            heads.store_keys(key_.row(row), value_.row(row), angles(row) + offset, view_.slots[layer.kv_group][row]);
        });
    }

    void attend_piece(const LayerShape& layer, const LayerWeights& weights, int piece) const {
        AttentionMember members[kAttentionQueries];
        AttentionTask task = (*view_.pieces)[layer.kv_group].task_of(piece, view_, layer.kv_group, members);
        task.kv = cache_[layer_];
        task.query = query_;
        task.output = attended_;
        task.group = shape_.num_heads / shape_.kv_heads_of(layer);
        task.scale = shape_.attention_scale;
        task.window = layer.window;
        task.chunked = shape_.chunked;
        task.window_ahead = shape_.bidirectional ? layer.window : 0;
        task.soft_cap = shape_.score_soft_cap;
        task.sinks = weights.sinks.empty() ? nullptr : weights.sinks.data();
        if (!weights_.distance_bias.empty()) {
            task.distance_bias = weights_.distance_bias.data() + shape_.biased_length;
            task.num_distances = shape_.num_distances();
        }
        kernels_.attention(task, scratch());
    }

    void transform(const LayerShape& layer, const LayerWeights& weights) {
        if (layer.sparse) {
            mix_experts(weights);
            join_update(weights.after_mlp_norm);
            if (shape_.parallel) leave_attention(layer, weights);  // not before, because experts read the same rows
            if (!weights.joined_mlp_norm.weight.empty()) {
                normalize(weights.joined_mlp_norm, hidden_, hidden_, view_.num_tokens);
            }
            return;
        }
        const LinearInput input = normed(norm_of_mlp(weights), weights.up, weights.gate);
        if (layer.cuts_gates) {
            expand_above(weights, input, layer.gate_threshold);
        } else {
            expand_all(weights, input);
        }
        if (shape_.parallel) leave_attention(layer, weights);  // not before, because it changes the hidden states
        join(Adapted::kDown, weights.down, inner_, weights.after_mlp_norm, weights.joined_mlp_norm);
    }

    const NormWeights& norm_of_mlp(const LayerWeights& weights) const {
        return shape_.shared_norm ? weights.attention_norm : weights.mlp_norm;
    }

    // Adds what the layer makes of its own input for each token, and scales its output.
    void finish_layer(const LayerWeights& weights) {
        const int size = shape_.layer_inputs.size, first = layer_ * size;
        if (shape_.has_streams) correct_streams(weights);
        if (size > 0) {
            const Rows& gating = shape_.has_streams ? normed_ : hidden_;
            linear(weights.input_gate, gating, inner_, view_.num_tokens, false);
            for_rows(view_.num_tokens, [&](int row) {
                kernels_.gate(inner_.row(row), layer_inputs_.row(row) + first, size, shape_.activation);
            });
            linear(weights.input_output, inner_, update_, view_.num_tokens, false);
        }
        if (shape_.has_streams) return add_to_streams(weights);
        if (size == 0 && weights.scale == 1.0F) return;
        for_rows(view_.num_tokens,
                 [&](int row) { add_input(shape_, kernels_, weights, update_.row(row), hidden_.row(row)); });
    }

    // update = the weighted sum of the outputs of each token's experts, in the order of expert ids.
    void mix_experts(const LayerWeights& weights) {
        ExpertRows& experts = a_.experts;
        const bool own_norms = !weights.experts_norm.weight.empty();
        const Rows input = normed(own_norms ? weights.router_norm : norm_of_mlp(weights)).rows;
        choose(weights, input);
        const int per_token = shape_.experts_per_token, num_places = view_.num_tokens * per_token;
        const Rows outputs{a_.expert_output.data(), sizes_.hidden};
        const LinearInput gathered = rounded({a_.expert_input.data(), sizes_.hidden}, num_places);
        const LinearInput inner = rounded(inner_, num_places);
        RowForms of_gathered = view_.adapted.forms(), of_inner = of_gathered;
        for (const ExpertWeights& each : weights.experts) {
            of_gathered = of_gathered | forms_for(each.gate) | forms_for(each.up);
            of_inner = of_inner | forms_for(each.down);
        }
        const NormView before = view_of(shape_.norm, weights.experts_norm);
        for_rows(num_places, [&](int place) {
            float* to = gathered.rows.row(place);
            const int token = experts.token[place];
            if (own_norms) {
                kernels_.normalize(hidden_.row(token), to, shape_.hidden_size, before);
            } else {
                std::memcpy(to, input.row(token), shape_.hidden_size * sizeof(float));
            }
            const float weight = shape_.weighs_inputs ? experts.weight_at(place, per_token) : 1.0F;
            for (int d = 0; d < shape_.hidden_size && shape_.weighs_inputs; ++d) to[d] *= weight;
            kernels_.round_row(gathered, of_gathered, shape_.hidden_size, place);
        });
        constexpr std::array<Adapted, 2> kUps = {Adapted::kExpertGate, Adapted::kExpertUp};
        reduce(expert_low_rank_, kUps, gathered);
        member_.for_pieces(experts.num_up_pieces, [&](int index) {
            const auto& [id, tile] = experts.up_pieces[index];
            const MatrixView gate = weights.experts[id].gate.view(), up = weights.experts[id].up.view();
            if (!expert_low_rank_.any_in(tile)) return expand(gate, up, gathered, tile);
            expand_adapted(expert_low_rank_, kUps, {gate, up}, gathered, tile);
        });
        round(inner, of_inner, shape_.expert_size);
        reduce<1>(expert_low_rank_, {Adapted::kExpertDown}, inner);
        member_.for_pieces(experts.num_down_pieces, [&](int index) {
            const auto& [id, tile] = experts.down_pieces[index];
            kernels_.linear(weights.experts[id].down.view(), inner, outputs, tile, false);
            expert_low_rank_.add(layer_, Adapted::kExpertDown, 0, outputs, tile);
        });
        for_rows(view_.num_tokens, [&](int row) {
            float* to = update_.row(row);
            std::memset(to, 0, shape_.hidden_size * sizeof(float));
            for (int i = row * per_token; i < (row + 1) * per_token; ++i) {
                const float* from = outputs.row(experts.place_of[i]);
                const float weight = shape_.weighs_inputs ? 1.0F : experts.weight[i];
                for (int d = 0; d < shape_.hidden_size; ++d) to[d] += weight * from[d];
            }
        });
        if (own_norms) normalize(weights.after_experts_norm, update_, update_, view_.num_tokens);
        if (shape_.shared_size > 0) add_shared(weights, outputs);
    }

    // update += the output of the MLP next to the experts, with its weight or norm; `outputs` is memory for it.
    void add_shared(const LayerWeights& weights, const Rows& outputs) {
        const LinearInput input = normed(norm_of_mlp(weights), weights.gate, weights.up);
        expand_all(weights, input);
        const bool has_weight = !weights.shared_router.empty(), has_norm = !weights.after_shared_norm.weight.empty();
        if (!has_weight && !has_norm) return adapted_linear(Adapted::kDown, weights.down, inner_, update_, true);
        adapted_linear(Adapted::kDown, weights.down, inner_, outputs, false);
        const Rows scores{a_.router.data(), sizes_.experts};
        if (has_weight) linear(weights.shared_router, input.rows, scores, view_.num_tokens, false);
        const NormView norm = view_of(shape_.norm, weights.after_shared_norm);
        for_rows(view_.num_tokens, [&](int row) {
            const float share = has_weight ? sigmoid(kernels_, *scores.row(row)) : 1.0F;
            float* from = outputs.row(row);
            if (has_norm) kernels_.normalize(from, from, shape_.hidden_size, norm);
            for (int d = 0; d < shape_.hidden_size; ++d) update_.row(row)[d] += share * from[d];
        });
    }

    // Chooses the experts of each token, and sorts the tokens by expert.
    void choose(const LayerWeights& weights, const Rows& input) {
        const Rows router{a_.router.data(), sizes_.experts};
        linear(weights.router, input, router, view_.num_tokens, false);
        for_rows(view_.num_tokens, [&](int row) {
            float* ranks = a_.ranks.data() + static_cast<std::size_t>(row) * sizes_.ranks;
            const std::size_t first = static_cast<std::size_t>(row) * shape_.experts_per_token;
            int* chosen = a_.experts.chosen.data() + first;
            float *scores = router.row(row), *factors = a_.experts.weight.data() + first;
            for (int i = 0; i < shape_.num_experts; ++i) scores[i] *= shape_.score_scale;
            choose_experts(shape_, kernels_, weights.router_offset, scores, ranks, chosen, factors);
            for (int i = 0; i < shape_.experts_per_token && !weights.expert_factors.empty(); ++i) {
                factors[i] *= weights.expert_factors[chosen[i]];
            }
        });
        member_.once([&] { a_.experts.sort(shape_, weights, layer_, view_.adapted, view_.num_tokens, num_threads_); });
    }

    void flag_finite() {
        for_rows(view_.num_tokens, [&](int row) {
            const int token = view_.sources.empty() ? row : view_.sources[row];
            const bool is_finite = kernels_.all_finite(hidden_.row(row), shape_.hidden_size);
            results_.finite_tokens[token] = is_finite && has_finite_streams(row);
        });
    }

    void finish() {
        if (shape_.has_streams) merge_streams();
        flag_finite();
        const NormView norm = view_of(shape_.norm, weights_.final_norm);
        const auto finish_row = [&](std::int64_t token, float* to) {
            const float* from = hidden_.row(static_cast<int>(token));
            if (norm.weight == nullptr) {
                std::memcpy(to, from, shape_.hidden_size * sizeof(float));
            } else {
                kernels_.normalize(from, to, shape_.hidden_size, norm);
            }
        };
        for_rows(view_.num_states,
                 [&](int index) { finish_row(view_.state_indices[index], results_.states.row(index)); });
        for_rows(view_.num_logits, [&](int index) { finish_row(view_.logit_indices[index], wanted_.row(index)); });
        if (!weights_.head.empty()) project_wanted();  // an encoder of images has none
    }

    // Computes the logits of the wanted rows.
    void project_wanted() {
        const Rows projected{a_.wanted_projected.data(), sizes_.hidden};
        const bool project = !weights_.embedding_out.empty();
        if (project) linear(weights_.embedding_out, wanted_, projected, view_.num_logits, false);
        linear(weights_.head, project ? projected : wanted_, results_.logits, view_.num_logits, false);
        for_rows(view_.num_logits, [&](int index) {
            float* logits = results_.logits.row(index);
            if (shape_.logit_scale != 1.0F) {
                for (int i = 0; i < shape_.vocab_size; ++i) logits[i] *= shape_.logit_scale;
            }
            if (shape_.logit_soft_cap > 0.0F) kernels_.soft_cap(logits, shape_.vocab_size, shape_.logit_soft_cap);
            results_.finite_logits[index] = kernels_.all_finite(logits, shape_.vocab_size);
        });
    }

    const std::vector<PagedKv>& cache_;
    const StepResultView& results_;
    const Rows wanted_{a_.wanted.data(), sizes_.hidden};
};

void Decoder::find_types(StepCall& call) const {
    if (shape_.separator < 0) return;
    call.is_second.assign(call.num_tokens, false);
    for (int sequence = 0; sequence < call.num_sequences; ++sequence) {
        const std::int64_t *first = call.token_ids + call.query_starts[sequence],
                           *end = call.token_ids + call.query_starts[sequence + 1];
        const std::int64_t* found = std::find(first, end, shape_.separator);
        for (auto at = found - call.token_ids + 1; at < end - call.token_ids; ++at) call.is_second[at] = true;
    }
}

void Decoder::plan(StepCall& call, std::vector<AttentionPieces>& pieces) const {
    call.pieces = &pieces;
    for (std::size_t group = 0; group < pieces.size(); ++group) {
        const auto layer = std::find_if(shape_.layers.begin(), shape_.layers.end(), [&](const LayerShape& each) {
            return each.kv_group == static_cast<int>(group);
        });
        if (layer->recurrent) {
            call.num_attention_pieces.push_back(0);
            continue;
        }
        pieces[group].plan(call, shape_, *layer, cache_[layer - shape_.layers.begin()].block_size, team_.size());
        call.num_attention_pieces.push_back(pieces[group].count());
    }
}

void Decoder::run(const StepView& step, const StepResultView& results) {
    const MemoryPreparer::Pause pause(preparer_);
    StepCall call(step, results, kernels_);
    find_types(call);
    plan(call, activations_->attention_pieces);
    const bool has_readers = first_reader_ < static_cast<int>(shape_.layers.size()) && step.end_layer < 0;
    const auto wanted = has_readers ? std::make_shared<const WantedRows>(step) : nullptr;
    if (wanted == nullptr || wanted->view().num_tokens == step.num_tokens) {
        return team_.run(
            [this, call = std::move(call)](ThreadTeam::Member& member) { Step(*this, call, member).run(); });
    }
    StepCall rest(wanted->view(), results, kernels_);
    rest.sources = wanted->sources();
    if (rest.num_tokens > 0) plan(rest, activations_->wanted_pieces);
    team_.run([this, call = std::move(call), rest = std::move(rest), wanted](ThreadTeam::Member& member) {
        Step(*this, call, member).run_until(first_reader_, *wanted);
        if (rest.num_tokens > 0) Step(*this, rest, member).run_from(first_reader_);
    });
}

void Decoder::embed(const StepView& step, const Rows& rows) {
    const MemoryPreparer::Pause pause(preparer_);
    const StepCall call(step, {}, kernels_);
    team_.run([this, call, rows](ThreadTeam::Member& member) { Step(*this, call, member).run_embedding(rows); });
}

void Decoder::project(const Rows& states, int count, const Rows& logits, bool* finite_logits) {
    const MemoryPreparer::Pause pause(preparer_);
    StepView step;
    step.num_logits = count;
    const StepCall call(step, {logits, finite_logits, nullptr}, kernels_);
    team_.run([this, call, states](ThreadTeam::Member& member) { Step(*this, call, member).run_head(states); });
}

}  // namespace quire
