// Cuts the attention of a step into pieces for the team of threads.
//
// A run is a number of consecutive tokens of one sequence. A piece is a run, or several runs of one token
// each whose sequences share their first blocks: those blocks are then read once for all sequences.
// With a window nothing is shared, because the blocks before it have been freed.
//
// A piece of single tokens takes as many key-value heads as it can while every thread still gets enough
// pieces: their keys are adjacent in a block, and memory is read faster in long stretches than in short ones.
// If all query heads read one latent, they are divided among threads that would otherwise be idle.
//
//     block tables   7 3 9 4        sequences 0, 1 and 2 share two blocks: one piece
//                    7 3 5
//                    7 3 8 2        the tokens of sequence 3 are separate pieces
//                    6 1
//
// The cuts do not change the order of a sum.
#pragma once

#include <cstdint>
#include <vector>

#include "quire/decoder.h"

namespace quire {

struct AttentionRun {
    int sequence;
    int first_token;
    int num_tokens;
    std::int64_t first_position;
    std::int64_t
        end;  // of the positions that all tokens see, in an encoder or an image; 0: each sees those up to its own
};

// Runs first_run … of a KV group, which share the blocks of their first `shared` positions, some key-value heads, and
// some of the query heads that read each of them.
struct AttentionPiece {
    int first_run;
    int num_runs;
    std::int64_t shared;
    int first_head;
    int num_heads;
    int first_in_group = 0;
    int num_in_group = 0;  // 0: all
};

// The pieces of one KV group.
class AttentionPieces {
  public:
    // Allocates memory for steps of up to `num_tokens` tokens.
    void reserve(int num_tokens, int num_kv_heads);
    // Cuts a step for the layers of the group of `layer`. Without a window, sequences that share their first blocks go
    // together.
    void plan(const StepView& step, const DecoderShape& shape, const LayerShape& layer, int block_size,
              int num_threads);

    int count() const { return static_cast<int>(pieces_.size()); }
    const AttentionPiece& piece(int index) const { return pieces_[index]; }
    // Returns the task of a piece; `members` has room for kAttentionQueries. The caller sets the rows and the rule.
    AttentionTask task_of(int index, const StepView& step, int group, AttentionMember* members) const;

  private:
    void share_heads(int num_heads, int group, int num_threads);
    void share_latents(int num_heads, int num_threads);
    void join_beginnings(const StepView& step, int group, int num_singles, int block_size, int most_runs);
    // Orders the pieces so that all shares of the team (see thread_team.h) have equal work, longest piece first: the
    // last pieces to be claimed are short.
    void deal_out(int num_threads);
    std::int64_t work_of(const AttentionPiece& piece) const;

    std::vector<AttentionRun> runs_;  // runs of one token first
    std::vector<AttentionPiece> pieces_, sorted_, whole_;
};

}  // namespace quire
