// Chooses tokens from logits, greedily or at random, with filters. A choice does not depend on the batch.
//
// A draw is a row of logits with its own settings:
//  1. Its rules change the logits: allowed, masked and banned tokens, then biases, then the repetition,
//     frequency and presence penalties. Each number is rounded to float.
//  2. Each token gets the weight e^(logit / temperature).
//  3. The filters remove tokens, in this order: top_n_sigma (logits more than that many standard deviations below the
//     highest), min_p (below that share of the highest weight), top_k (all except the k likeliest), top_p (all except
//     the likeliest that together have that share of the remaining weight). Tokens of equal weight are in the order of
//     their ids.
//  4. The rest race: the token with the least -log(its number) / its weight wins, the lower id if two are equal. A
//     number depends on (seed, position, id) only: so a token depends neither on its neighbours in the batch nor on how
//     the request reached this position.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "quire/kernels.h"
#include "quire/random.h"
#include "quire/thread_team.h"

namespace quire {

// A list of token ids per draw: draw i has ids[starts[i]] … ids[starts[i + 1] - 1].
struct TokenLists {
    const std::int64_t* starts = nullptr;  // [num_draws + 1]
    const std::int64_t* ids = nullptr;

    bool has_any(int draw) const { return starts[draw] < starts[draw + 1]; }
};

// The tokens that may be chosen, one bit each; the lowest bit of a word is the lowest id. Most draws have no mask, and
// several may share one.
struct TokenMasks {
    const std::int64_t* rows = nullptr;    // [num_draws]; -1: every token
    const std::uint32_t* words = nullptr;  // [num_masks, num_words]
    std::int64_t num_words = 0;

    const std::uint32_t* of(int draw) const { return rows[draw] < 0 ? nullptr : words + rows[draw] * num_words; }
};

// The tokens whose logits change, by draw. There is one bias per id of `biased`, and one count per id of `seen`: how
// often the token occurs in the output.
struct RulesView {
    TokenLists allowed;  // an empty list: every token
    TokenLists banned;
    TokenLists biased;
    const float* biases = nullptr;
    TokenLists seen;
    const std::int64_t* counts = nullptr;
    TokenMasks masks;
};

// The names of the parameters of a draw, in the order of the rows of DrawsView::parameters.
std::span<const char* const> draw_parameters();

// Columns of equal length, one entry per draw.
struct DrawsView {
    int num_draws = 0;
    const std::int64_t* logit_rows = nullptr;
    const float* parameters = nullptr;  // [num_parameters, num_draws]; temperature 0: greedy, top_k 0 or -1: off
    const std::int64_t* seeds = nullptr;
    const std::int64_t* positions = nullptr;
    const std::int64_t* num_logprobs = nullptr;  // how many of the likeliest tokens to report; -1: report nothing
    RulesView rules;
};

// Per draw; the columns of `top` hold `top_stride` entries per draw.
struct ChoicesView {
    std::int64_t* tokens = nullptr;
    double* logprobs = nullptr;
    std::int64_t* ranks = nullptr;
    std::int64_t* top_ids = nullptr;
    double* top_logprobs = nullptr;
    int top_stride = 0;
};

class Sampler {
  public:
    Sampler(const Kernels& kernels, ThreadTeam& team, int vocab_size);
    ~Sampler();
    Sampler(const Sampler&) = delete;
    Sampler& operator=(const Sampler&) = delete;

    // Logits must be finite. Throws std::bad_alloc only.
    void sample(const Rows& logits, const DrawsView& draws, const ChoicesView& choices);

    int vocab_size() const { return vocab_size_; }

    // Reports the log-probabilities of the tokens in `choices`, as if `sample` had chosen them.
    void report(const Rows& logits, int count, const std::int64_t* logit_rows, const std::int64_t* num_logprobs,
                const ChoicesView& choices);

  private:
    // `place`: among the logits to choose from.
    struct Candidate {
        float weight;
        std::int32_t place;
    };
    // The memory of one member of the team.
    struct Scratch {
        std::vector<float> logits;
        std::vector<float> weights;
        std::vector<Candidate> candidates;
        std::vector<std::int32_t> ids;
    };
    // The logits to choose from, in the order of ids; `ids` null: of all tokens. The mask is not yet applied.
    struct Field {
        const float* logits;
        int count;
        const std::int32_t* ids = nullptr;
        const std::uint32_t* mask = nullptr;

        int token(int place) const { return ids == nullptr ? place : ids[place]; }
        bool allows(int place) const { return mask == nullptr || (mask[place / 32] >> (place % 32) & 1U) != 0; }
    };

    void draw(const float* logits, const DrawsView& draws, int index, const ChoicesView& choices,
              Scratch& scratch) const;
    Field change(const float* logits, const DrawsView& draws, int index, Scratch& scratch) const;
    bool gather(const float* logits, const std::uint32_t* mask, Scratch& scratch) const;
    std::int64_t choose(Field field, const DrawsView& draws, int index, Scratch& scratch) const;
    std::span<const Candidate> filtered(Field field, const DrawsView& draws, int index, float highest,
                                        Scratch& scratch) const;
    void report_one(const float* logits, std::int64_t count, int index, const ChoicesView& choices,
                    Scratch& scratch) const;

    const Kernels& kernels_;
    ThreadTeam& team_;
    const int vocab_size_;
    std::vector<Scratch> scratch_;
};

}  // namespace quire
