#include "expert_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace quire {
namespace {

// Returns the sum of the `count` highest numbers.
float highest_sum(const float* numbers, int size, int count) {
    float sum = 0.0F;
    for (int i = 0, last = -1; i < count; ++i) {
        int next = -1;
        for (int place = 0; place < size; ++place) {
            // In descending order, equal ones by index: each number follows the one taken last.
            const bool is_left =
                last < 0 || numbers[place] < numbers[last] || (numbers[place] == numbers[last] && place > last);
            if (is_left && (next < 0 || numbers[next] < numbers[place])) next = place;
        }
        if (next < 0) break;  // only if a number is not finite
        sum += numbers[next];
        last = next;
    }
    return sum;
}

// Sets the ranks of the experts of all but the best groups to minus infinity; among equal groups, those with the lowest
// ids are better.
void leave_out_groups(const DecoderShape& shape, float* ranks) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const int num_groups = shape.num_expert_groups, size = shape.num_experts / num_groups;
    float* of_groups = ranks + shape.num_experts;
    for (int group = 0; group < num_groups; ++group) {
        of_groups[group] = highest_sum(ranks + group * size, size, shape.group_best);
    }
    for (int i = shape.groups_per_token; i < num_groups; ++i) {
        int worst = 0;
        for (int group = 1; group < num_groups; ++group) {
            if (!(of_groups[worst] < of_groups[group])) worst = group;
        }
        std::fill_n(ranks + worst * size, size, -kInfinity);
        of_groups[worst] = kInfinity;
    }
}

// Turns scores into unnormalised weights, and returns their divisor.
float weigh(const DecoderShape& shape, const Kernels& kernels, float* scores) {
    if (shape.sigmoid_experts) {
        kernels.exponentials(scores, shape.num_experts, 0.0F, -1.0F, scores);
        for (int expert = 0; expert < shape.num_experts; ++expert) scores[expert] = 1.0F / (1.0F + scores[expert]);
        return 1.0F;
    }
    float highest;
    int ignored;
    kernels.arg_max(scores, shape.num_experts, &highest, &ignored);
    return static_cast<float>(kernels.exponentials(scores, shape.num_experts, highest, 1.0F, scores));
}

// Chooses experts one after another by their scores, and weighs each among those left whose scores are near.
void mix_experts(const DecoderShape& shape, const Kernels& kernels, const float* scores, float* near, int* chosen,
                 float* weights) {
    for (int i = 0; i < shape.experts_per_token; ++i) {
        const auto is_left = [&](int expert) { return std::find(chosen, chosen + i, expert) == chosen + i; };
        int best = -1, count = 0;
        for (int expert = 0; expert < shape.num_experts; ++expert) {
            if (is_left(expert) && (best < 0 || scores[best] < scores[expert])) best = expert;
        }
        const float highest = scores[best];
        for (int expert = 0; expert < shape.num_experts; ++expert) {
            const float score = scores[expert], most = shape.expert_margin * std::max(std::fabs(score), highest);
            if (is_left(expert) && highest - score <= most) near[count++] = score;
        }
        const auto sum = static_cast<float>(kernels.exponentials(near, count, highest, 1.0F, near));
        int place = i;  // in the order of ids
        for (; place > 0 && chosen[place - 1] > best; --place) {
            chosen[place] = chosen[place - 1];
            weights[place] = weights[place - 1];
        }
        chosen[place] = best;
        weights[place] = shape.expert_scale / sum;
    }
}

}  // namespace

void choose_experts(const DecoderShape& shape, const Kernels& kernels, const std::vector<float>& offset, float* scores,
                    float* ranks, int* chosen, float* weights) {
    if (shape.mixes_experts) return mix_experts(shape, kernels, scores, ranks, chosen, weights);
    const int num_experts = shape.num_experts, per_token = shape.experts_per_token;
    const float total = weigh(shape, kernels, scores);
    for (int expert = 0; expert < num_experts; ++expert) {
        ranks[expert] = offset.empty() ? scores[expert] : scores[expert] / total + offset[expert];
    }
    if (shape.num_expert_groups > 1) leave_out_groups(shape, ranks);
    float share = 0.0F;
    for (int i = 0; i < per_token; ++i) {
        int best = -1;
        for (int expert = 0; expert < num_experts; ++expert) {
            if (std::find(chosen, chosen + i, expert) != chosen + i) continue;
            if (best < 0 || ranks[best] < ranks[expert]) best = expert;
        }
        chosen[i] = best;
        share += scores[best] / total;
    }
    std::sort(chosen, chosen + per_token);
    for (int i = 0; i < per_token; ++i) {
        const float weight = scores[chosen[i]] / total;
        weights[i] = (shape.normalize_experts ? weight / share : weight) * shape.expert_scale;
    }
}

float sigmoid(const Kernels& kernels, float score) {
    kernels.exponentials(&score, 1, 0.0F, -1.0F, &score);
    return 1.0F / (1.0F + score);
}

}  // namespace quire
