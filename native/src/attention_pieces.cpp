#include "attention_pieces.h"

#include <algorithm>

namespace quire {

void AttentionPieces::reserve(int num_tokens, int num_kv_heads) {
    runs_.reserve(num_tokens);
    whole_.reserve(num_tokens);
    for (auto* pieces : {&pieces_, &sorted_}) pieces->reserve(static_cast<std::size_t>(num_tokens) * num_kv_heads);
}

void AttentionPieces::plan(const StepView& step, const DecoderShape& shape, const LayerShape& layer, int block_size,
                           int num_threads) {
    const int num_kv_heads = shape.kv_heads_of(layer), group = shape.num_heads / num_kv_heads;
    const std::int64_t* ends_seen = shape.ahead_in_windows && layer.window == 0 ? nullptr : step.ends_seen;
    runs_.clear();
    whole_.clear();
    for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
        const int end = static_cast<int>(step.query_starts[sequence + 1]);
        const std::int64_t end_of_text = shape.bidirectional ? step.positions[end - 1] + 1 : 0;
        for (int token = static_cast<int>(step.query_starts[sequence]), next; token < end; token = next) {
            const std::int64_t end_seen = ends_seen == nullptr ? end_of_text : ends_seen[token];
            next = std::min(token + kAttentionTokens, end);
            if (ends_seen != nullptr) {
                const auto differs = [end_seen](std::int64_t other) { return other != end_seen; };
                next = static_cast<int>(std::find_if(ends_seen + token, ends_seen + next, differs) - ends_seen);
            }
            runs_.push_back({sequence, token, next - token, step.positions[token], end_seen});
        }
    }
    const auto singles = std::stable_partition(
        runs_.begin(), runs_.end(), [](const AttentionRun& run) { return run.num_tokens == 1 && run.end == 0; });
    const int num_singles = static_cast<int>(singles - runs_.begin()), num_runs = static_cast<int>(runs_.size());
    if (layer.window == 0 && num_singles > 1) {
        // Joins as many runs as fit, as long as every thread gets some pieces.
        const int fit = kAttentionQueries / group;
        const int fair = num_singles * num_kv_heads / (2 * num_threads);
        join_beginnings(step, layer.kv_group, num_singles, block_size, std::clamp(fair, 1, std::max(1, fit)));
    } else {
        for (int run = 0; run < num_singles; ++run) whole_.push_back({run, 1, 0, 0, 0});
    }
    for (int run = num_singles; run < num_runs; ++run) whole_.push_back({run, 1, 0, 0, 0});
    if (shape.latent.rank > 0) {
        share_latents(shape.num_heads, num_threads);
    } else {
        share_heads(num_kv_heads, group, num_threads);
    }
    deal_out(num_threads);
}

void AttentionPieces::deal_out(int num_threads) {
    sorted_ = pieces_;
    std::stable_sort(sorted_.begin(), sorted_.end(), [this](const AttentionPiece& one, const AttentionPiece& other) {
        return work_of(one) > work_of(other);
    });
    pieces_.clear();
    for (int share = 0; share < num_threads; ++share) {
        for (std::size_t i = share; i < sorted_.size(); i += num_threads) pieces_.push_back(sorted_[i]);
    }
}

void AttentionPieces::share_heads(int num_heads, int group, int num_threads) {
    constexpr int kPiecesPerThread = 4;
    pieces_.clear();
    const int num_whole = static_cast<int>(whole_.size());
    // A single sequence is split into equal parts.
    const int wanted = num_whole == 1 ? num_threads : (kPiecesPerThread * num_threads + num_whole - 1) / num_whole;
    for (AttentionPiece piece : whole_) {
        const int num_queries = group * (piece.num_runs > 1 ? piece.num_runs : runs_[piece.first_run].num_tokens);
        const int fit = std::clamp(kAttentionQueries / num_queries, 1, num_heads);
        const int parts = std::clamp(wanted, (num_heads + fit - 1) / fit, num_heads);
        for (int part = 0; part < parts; ++part) {
            piece.first_head = num_heads * part / parts;
            piece.num_heads = num_heads * (part + 1) / parts - piece.first_head;
            pieces_.push_back(piece);
        }
    }
}

void AttentionPieces::share_latents(int num_heads, int num_threads) {
    constexpr int kLeastQueries = 4;  // for which it pays to widen a latent
    pieces_.clear();
    const int num_whole = static_cast<int>(whole_.size()), wanted = (num_threads + num_whole - 1) / num_whole;
    const int parts = std::clamp(wanted, 1, std::max(1, num_heads / kLeastQueries));
    for (AttentionPiece piece : whole_) {
        piece.num_heads = 1;
        for (int part = 0; part < parts; ++part) {
            piece.first_in_group = num_heads * part / parts;
            piece.num_in_group = num_heads * (part + 1) / parts - piece.first_in_group;
            pieces_.push_back(piece);
        }
    }
}

AttentionTask AttentionPieces::task_of(int index, const StepView& step, int group, AttentionMember* members) const {
    const AttentionPiece& piece = pieces_[index];
    const AttentionRun* runs = runs_.data() + piece.first_run;
    const auto table = [&](int run) { return step.tables[group] + runs[run].sequence * step.table_strides[group]; };
    AttentionTask task;
    task.block_table = table(0);
    task.first_token = runs->first_token;
    task.num_tokens = runs->num_tokens;
    task.first_position = runs->first_position;
    task.end = runs->end;
    task.kv_head = piece.first_head;
    task.num_kv_heads = piece.num_heads;
    task.first_in_group = piece.first_in_group;
    task.num_in_group = piece.num_in_group;
    if (piece.num_runs > 1) {
        for (int i = 0; i < piece.num_runs; ++i) members[i] = {table(i), runs[i].first_token, runs[i].first_position};
        task.members = members;
        task.num_members = piece.num_runs;
        task.shared = piece.shared;
    }
    return task;
}

void AttentionPieces::join_beginnings(const StepView& step, int group, int num_singles, int block_size, int most_runs) {
    const std::int64_t stride = step.table_strides[group];
    const auto table = [&](const AttentionRun& run) { return step.tables[group] + run.sequence * stride; };
    const auto num_blocks = [&](const AttentionRun& run) { return (run.first_position + block_size) / block_size; };
    std::sort(runs_.begin(), runs_.begin() + num_singles, [&](const AttentionRun& one, const AttentionRun& other) {
        const std::int64_t *a = table(one), *b = table(other);
        return std::lexicographical_compare(a, a + num_blocks(one), b, b + num_blocks(other));
    });
    // Positions that two runs share, in whole tiles.
    const auto shared_by = [&](const AttentionRun& one, const AttentionRun& other) {
        const std::int64_t most = std::min(one.first_position, other.first_position) + 1;
        const std::int64_t *a = table(one), *b = table(other);
        const std::int64_t* parted = std::mismatch(a, a + (most + block_size - 1) / block_size, b).first;
        return std::min(most, (parted - a) * block_size) / kAttentionTile * kAttentionTile;
    };
    for (int first = 0; first < num_singles;) {
        std::int64_t shared = 0;
        int end = first + 1;
        for (; end < num_singles && end - first < most_runs; ++end) {
            const std::int64_t with_next = shared_by(runs_[end - 1], runs_[end]);
            // A run that shares much less than the others may share more with later ones.
            if (with_next == 0 || with_next < shared / 2) break;
            shared = end == first + 1 ? with_next : std::min(shared, with_next);
        }
        whole_.push_back({first, end - first, end - first > 1 ? shared : 0, 0, 0});
        first = end;
    }
}

std::int64_t AttentionPieces::work_of(const AttentionPiece& piece) const {
    std::int64_t work = 0;
    for (int run = piece.first_run; run < piece.first_run + piece.num_runs; ++run) {
        const std::int64_t end = std::max(runs_[run].end, runs_[run].first_position + 1);
        work += runs_[run].num_tokens * (end - piece.shared);
    }
    return (work + piece.shared) * piece.num_heads;
}

}  // namespace quire
