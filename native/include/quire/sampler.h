// Choosing tokens from logits: greedy or drawn, with filters, free of the batch.
//
// A draw is a row of logits with its own settings. Tokens get the weight e^(logit / temperature);
// the filters take tokens away in this order: min_p (below that share of the highest weight), top_k
// (all but the k likeliest), top_p (the likeliest that make up that share of what is left; the rest
// goes). Tokens of equal weight are in the order of their ids. What is left is drawn by one uniform
// number, a function of (seed, position) alone: so a token depends neither on its neighbours in
// the batch, nor on how the request came to this position.
#pragma once

#include <cstdint>
#include <vector>

#include "quire/kernels.h"
#include "quire/random.h"
#include "quire/thread_team.h"

namespace quire {

// Columns of equal length, one entry per draw. Top_k 0: off.
struct DrawsView {
    int num_draws = 0;
    const std::int64_t* logit_rows = nullptr;
    const float* temperatures = nullptr;  // 0: greedy
    const std::int64_t* top_k = nullptr;
    const float* top_p = nullptr;
    const float* min_p = nullptr;
    const std::int64_t* seeds = nullptr;
    const std::int64_t* positions = nullptr;
    // Tokens that may not be chosen: those of draw i are banned_ids[banned_starts[i]] and following.
    const std::int64_t* banned_starts = nullptr;  // [num_draws + 1]
    const std::int64_t* banned_ids = nullptr;
    const std::int64_t* num_logprobs = nullptr;  // how many of the likeliest are reported; -1: nothing is
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

  private:
    struct Candidate {
        float weight;
        std::int32_t token;
    };
    // What one member of the team works with.
    struct Scratch {
        std::vector<float> logits;
        std::vector<float> weights;
        std::vector<Candidate> candidates;
    };

    void draw(const float* logits, const DrawsView& draws, int index, const ChoicesView& choices,
              Scratch& scratch) const;
    std::int64_t choose(const float* logits, const DrawsView& draws, int index, Scratch& scratch) const;
    void report(const float* logits, const DrawsView& draws, int index, const ChoicesView& choices,
                Scratch& scratch) const;

    const Kernels& kernels_;
    ThreadTeam& team_;
    const int vocab_size_;
    std::vector<Scratch> scratch_;
};

}  // namespace quire
