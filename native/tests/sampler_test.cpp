// Compares the sampler with a plain oracle that sorts all tokens, and `number_of` with fixed values and statistics.
// Prints each failure and exits with 1 if there was any.
#include "quire/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "testing.h"

namespace {

using quire::ChoicesView;
using quire::DrawsView;
using quire::Kernels;
using quire::Sampler;
using quire::ThreadTeam;
using quire::testing::expect;
using quire::testing::Random;

struct Draw {
    std::int64_t row = 0;
    float temperature = 1.0F;
    std::int64_t top_k = 0;
    float top_p = 1.0F;
    float min_p = 0.0F;
    std::int64_t seed = 0;
    std::int64_t position = 0;
    std::vector<std::int64_t> banned = {};
    std::int64_t num_logprobs = -1;
    std::vector<std::int64_t> allowed = {};
    std::vector<std::int64_t> biased = {};
    std::vector<float> biases = {};
    std::vector<std::int64_t> seen = {};
    std::vector<std::int64_t> counts = {};
    float repetition = 1.0F, frequency = 0.0F, presence = 0.0F;
    std::vector<std::uint32_t> mask = {};  // empty: none

    // A parameter by its name; 0 if no test sets it.
    float parameter(std::string_view name) const {
        const std::pair<std::string_view, float> known[] = {
            {"temperature", temperature},         {"top_p", top_p},
            {"top_k", static_cast<float>(top_k)}, {"min_p", min_p},
            {"repetition_penalty", repetition},   {"presence_penalty", presence},
            {"frequency_penalty", frequency},
        };
        for (const auto& [each, value] : known) {
            if (each == name) return value;
        }
        return 0.0F;
    }
};

// The lists of all draws, one after another.
struct Lists {
    std::vector<std::int64_t> starts = {0}, ids = {};

    void add(const std::vector<std::int64_t>& list) {
        ids.insert(ids.end(), list.begin(), list.end());
        starts.push_back(static_cast<std::int64_t>(ids.size()));
    }
    quire::TokenLists view() const { return {starts.data(), ids.data()}; }
};

// The rules of all draws, as columns.
struct Rules {
    Lists allowed, banned, biased, seen;
    std::vector<float> biases;
    std::vector<std::int64_t> counts, mask_rows;
    std::vector<std::uint32_t> masks;
    std::int64_t num_words = 0;

    explicit Rules(const std::vector<Draw>& draws) {
        for (const Draw& draw : draws) {
            allowed.add(draw.allowed);
            banned.add(draw.banned);
            biased.add(draw.biased);
            seen.add(draw.seen);
            biases.insert(biases.end(), draw.biases.begin(), draw.biases.end());
            counts.insert(counts.end(), draw.counts.begin(), draw.counts.end());
            if (!draw.mask.empty()) num_words = static_cast<std::int64_t>(draw.mask.size());
            mask_rows.push_back(draw.mask.empty() ? -1 : static_cast<std::int64_t>(masks.size()) / num_words);
            masks.insert(masks.end(), draw.mask.begin(), draw.mask.end());
        }
    }
    quire::RulesView view() const {
        return {.allowed = allowed.view(),
                .banned = banned.view(),
                .biased = biased.view(),
                .biases = biases.data(),
                .seen = seen.view(),
                .counts = counts.data(),
                .masks = {mask_rows.data(), masks.data(), num_words}};
    }
};

struct Choices {
    std::vector<std::int64_t> tokens, ranks, top_ids;
    std::vector<double> logprobs, top_logprobs;

    bool operator==(const Choices&) const = default;
};

constexpr int kTopStride = 5;
constexpr std::int64_t kUntouched = -99;

Choices sample(const Kernels& kernels, ThreadTeam& team, const std::vector<float>& logits, int vocab_size,
               const std::vector<Draw>& draws) {
    std::vector<std::int64_t> rows, seeds, positions, num_logprobs;
    std::vector<float> parameters;
    for (const char* name : quire::draw_parameters()) {
        for (const Draw& draw : draws) parameters.push_back(draw.parameter(name));
    }
    for (const Draw& draw : draws) {
        rows.push_back(draw.row);
        seeds.push_back(draw.seed);
        positions.push_back(draw.position);
        num_logprobs.push_back(draw.num_logprobs);
    }
    const std::size_t count = draws.size();
    const Rules rules(draws);
    Choices result{.tokens = std::vector<std::int64_t>(count, kUntouched),
                   .ranks = std::vector<std::int64_t>(count, kUntouched),
                   .top_ids = std::vector<std::int64_t>(count * kTopStride, kUntouched),
                   .logprobs = std::vector<double>(count, kUntouched),
                   .top_logprobs = std::vector<double>(count * kTopStride, kUntouched)};
    Sampler sampler(kernels, team, vocab_size);
    sampler.sample({const_cast<float*>(logits.data()), vocab_size},
                   {.num_draws = static_cast<int>(count),
                    .logit_rows = rows.data(),
                    .parameters = parameters.data(),
                    .seeds = seeds.data(),
                    .positions = positions.data(),
                    .num_logprobs = num_logprobs.data(),
                    .rules = rules.view()},
                   {.tokens = result.tokens.data(),
                    .logprobs = result.logprobs.data(),
                    .ranks = result.ranks.data(),
                    .top_ids = result.top_ids.data(),
                    .top_logprobs = result.top_logprobs.data(),
                    .top_stride = kTopStride});
    return result;
}

std::vector<std::int64_t> tokens_of(const Kernels& kernels, const std::vector<float>& logits,
                                    const std::vector<Draw>& draws) {
    ThreadTeam team(1);
    return sample(kernels, team, logits, static_cast<int>(logits.size()), draws).tokens;
}

std::int64_t token_of(const Kernels& kernels, const std::vector<float>& logits, const Draw& draw) {
    return tokens_of(kernels, logits, {draw})[0];
}

// The tokens that the filters keep and their weights, in the order of ids, found by sorting all tokens.
struct Kept {
    std::vector<std::int64_t> tokens;
    std::vector<double> weights;
};

Kept keep(const std::vector<float>& logits, const Draw& draw) {
    std::vector<double> weight(logits.size());
    const std::set<std::int64_t> banned(draw.banned.begin(), draw.banned.end());
    double highest = -HUGE_VAL;
    for (std::size_t i = 0; i < logits.size(); ++i) {
        if (!banned.contains(static_cast<std::int64_t>(i))) highest = std::max<double>(highest, logits[i]);
    }
    std::vector<std::int64_t> order;
    for (std::size_t i = 0; i < logits.size(); ++i) {
        weight[i] = std::exp((logits[i] - highest) / draw.temperature);
        const auto token = static_cast<std::int64_t>(i);
        if (!banned.contains(token) && weight[i] >= draw.min_p) order.push_back(token);
    }
    std::stable_sort(order.begin(), order.end(), [&](auto one, auto other) { return weight[one] > weight[other]; });
    if (draw.top_k > 0 && draw.top_k < static_cast<std::int64_t>(order.size())) order.resize(draw.top_k);
    if (draw.top_p < 1.0F) {
        double total = 0.0, share = 0.0;
        for (const std::int64_t token : order) total += weight[token];
        std::size_t count = 0;
        while (count < order.size() && (count == 0 || share < draw.top_p * total)) share += weight[order[count++]];
        order.resize(count);
    }
    std::sort(order.begin(), order.end());
    Kept kept{.tokens = order, .weights = {}};
    for (const std::int64_t token : order) kept.weights.push_back(weight[token]);
    return kept;
}

// The token with the least time; -1 if two are so close that rounding decides.
std::int64_t winner_of(const Kept& kept, std::int64_t seed, std::int64_t position) {
    const quire::DrawKey key = quire::draw_key(seed, position);
    double least = HUGE_VAL, second = HUGE_VAL;
    std::int64_t winner = -1;
    for (std::size_t i = 0; i < kept.tokens.size(); ++i) {
        const double time = -std::log(quire::number_of(kept.tokens[i], key)) / kept.weights[i];
        if (time < least) winner = kept.tokens[i];
        second = std::min(second, std::max(time, least));
        least = std::min(time, least);
    }
    return second - least < 1e-12 * least ? -1 : winner;
}

void expect_filter(const Kernels& kernels, const char* what, const std::vector<float>& logits, const Draw& settings) {
    constexpr int kNumDraws = 1500;
    const Kept kept = keep(logits, settings);
    std::vector<Draw> draws(kNumDraws, settings);
    for (int i = 0; i < kNumDraws; ++i) draws[i].position = i;
    const std::vector<std::int64_t> tokens = tokens_of(kernels, logits, draws);
    double total = 0.0;
    for (const double weight : kept.weights) total += weight;
    for (std::size_t i = 0; i < kept.tokens.size(); ++i) {
        const bool sure = kept.weights[i] / total * kNumDraws > 25.0;
        expect(!sure || std::find(tokens.begin(), tokens.end(), kept.tokens[i]) != tokens.end(),
               "%s: %s: token %d is never chosen", kernels.name, what, static_cast<int>(kept.tokens[i]));
    }
    for (int i = 0; i < kNumDraws; ++i) {
        expect(std::binary_search(kept.tokens.begin(), kept.tokens.end(), tokens[i]), "%s: %s: token %d is not kept",
               kernels.name, what, static_cast<int>(tokens[i]));
        const std::int64_t expected = winner_of(kept, settings.seed, i);
        expect(expected < 0 || tokens[i] == expected, "%s: %s: position %d draws %d, not %d", kernels.name, what, i,
               static_cast<int>(tokens[i]), static_cast<int>(expected));
    }
}

void test_filters(const Kernels& kernels) {
    Random random(1);
    const std::vector<float> logits = random.numbers(37, -1.5F, 1.5F);
    std::vector<float> tied(37);  // many tokens of equal weight
    for (float& logit : tied) logit = static_cast<float>(random.below(3)) * 0.5F;
    for (const std::vector<float>& row : {logits, tied}) {
        expect_filter(kernels, "no filter", row, {.seed = 5});
        expect_filter(kernels, "a seed below zero", row, {.seed = -5});
        for (const std::int64_t top_k : {1, 2, 7, 16, 36, 37, 1000}) {
            expect_filter(kernels, "top_k", row, {.top_k = top_k, .seed = top_k});
        }
        for (const float top_p : {1e-6F, 0.1F, 0.5F, 0.9F, 0.999F}) {
            expect_filter(kernels, "top_p", row, {.top_p = top_p, .seed = 6});
        }
        for (const float min_p : {0.05F, 0.3F, 0.8F, 1.0F}) {
            expect_filter(kernels, "min_p", row, {.min_p = min_p, .seed = 7});
        }
        expect_filter(kernels, "cold", row, {.temperature = 0.3F, .seed = 8});
        expect_filter(kernels, "hot", row, {.temperature = 3.0F, .seed = 9});
        expect_filter(
            kernels, "all filters", row,
            {.temperature = 1.5F, .top_k = 15, .top_p = 0.7F, .min_p = 0.2F, .seed = 10, .banned = {0, 9, 36}});
    }
    // Equal shares that add up to exactly top_p: the next token must not be kept.
    for (const float top_p : {0.25F, 0.5F, 0.75F}) {
        expect_filter(kernels, "exact top_p", std::vector<float>(8, 1.0F), {.top_p = top_p, .seed = 11});
    }
}

void test_greedy(const Kernels& kernels) {
    std::vector<float> logits(50, 1.0F);
    logits[17] = logits[31] = logits[49] = 3.0F;
    expect(token_of(kernels, logits, {.temperature = 0.0F}) == 17, "%s: greedy takes the lowest of equals",
           kernels.name);
    expect(token_of(kernels, logits, {.temperature = 0.0F, .banned = {17, 31}}) == 49, "%s: greedy, banned",
           kernels.name);
    expect(token_of(kernels, logits, {.temperature = 0.0F, .top_k = 3, .top_p = 0.1F, .seed = 3}) == 17,
           "%s: greedy asks no filter", kernels.name);
    for (const std::int64_t left : {0, 15, 16, 49}) {
        std::vector<std::int64_t> banned;
        for (std::int64_t token = 0; token < 50; ++token) {
            if (token != left) banned.push_back(token);
        }
        for (const float temperature : {0.0F, 1e-3F, 1.0F, 100.0F}) {
            const Draw draw{.temperature = temperature, .top_k = 5, .top_p = 0.5F, .min_p = 0.1F, .banned = banned};
            expect(token_of(kernels, logits, draw) == left, "%s: all banned but %d, temperature %g", kernels.name,
                   static_cast<int>(left), temperature);
        }
    }
    std::vector<std::int64_t> all(50);
    for (int token = 0; token < 50; ++token) all[token] = token;
    const std::int64_t token = token_of(kernels, logits, {.banned = all});
    expect(0 <= token && token < 50, "%s: all banned: token %d", kernels.name, static_cast<int>(token));
}

std::vector<Draw> varied_draws(int count, int num_rows, int vocab_size) {
    Random random(3);
    std::vector<Draw> draws(count);
    for (Draw& draw : draws) {
        draw.row = random.below(num_rows);
        draw.temperature = random.below(5) == 0 ? 0.0F : random.number(0.3F, 2.0F);
        draw.top_k = random.below(2) == 0 ? 0 : random.below(30);
        draw.top_p = random.below(2) == 0 ? 1.0F : random.number(0.1F, 1.0F);
        draw.min_p = random.below(2) == 0 ? 0.0F : random.number(0.0F, 0.3F);
        draw.seed = random.below(1000);
        draw.position = random.below(1000);
        for (int i = random.below(3); i > 0; --i) draw.banned.push_back(random.below(vocab_size));
        if (random.below(4) == 0) {
            for (std::int64_t token = random.below(3); token < vocab_size; token += 2) draw.allowed.push_back(token);
        }
        for (std::int64_t token = random.below(40); token < vocab_size; token += 1 + random.below(40)) {
            draw.biased.push_back(token);
            draw.biases.push_back(random.number(-3.0F, 3.0F));
        }
        for (std::int64_t token = random.below(9); token < vocab_size; token += 1 + random.below(9)) {
            draw.seen.push_back(token);
            draw.counts.push_back(random.below(4));
        }
        if (random.below(3) == 0) {
            for (int first = 0; first < vocab_size; first += 32) {
                const std::uint32_t some = random.below(1 << 16) * 0x10001U;
                draw.mask.push_back(random.below(3) == 0 ? 0U : random.below(2) == 0 ? ~0U : some);
            }
        }
        draw.repetition = random.below(2) == 0 ? 1.0F : random.number(0.5F, 2.0F);
        draw.frequency = random.below(2) == 0 ? 0.0F : random.number(-1.0F, 1.0F);
        draw.presence = random.below(2) == 0 ? 0.0F : random.number(-1.0F, 1.0F);
        draw.num_logprobs = random.below(kTopStride + 2) - 1;
        if (!draw.mask.empty() && random.below(2) == 0) {  // only the mask, which has its own code path
            draw.allowed = draw.banned = draw.biased = draw.seen = draw.counts = {};
            draw.biases = {};
        }
    }
    return draws;
}

// Rules change logits one after another; the oracle of the filters gets the result as plain logits.
void test_rules(const Kernels& kernels) {
    constexpr int kNumDraws = 500;
    Random random(12);
    for (int round = 0; round < 40; ++round) {
        const std::vector<float> logits = random.numbers(37, -3.0F, 3.0F);
        Draw draw = varied_draws(round + 1, 1, 37)[round];
        draw.row = 0;
        draw.temperature = 1.0F;
        draw.num_logprobs = -1;
        std::vector<float> changed = logits;
        for (std::size_t i = 0; i < draw.biased.size(); ++i) changed[draw.biased[i]] += draw.biases[i];
        for (std::size_t i = 0; i < draw.seen.size(); ++i) {
            float& logit = changed[draw.seen[i]];
            logit = logit < 0 ? logit * draw.repetition : logit / draw.repetition;
            logit -= draw.frequency * static_cast<float>(draw.counts[i]);
            if (draw.counts[i] > 0) logit -= draw.presence;
        }
        Draw plain{.top_k = draw.top_k, .top_p = draw.top_p, .min_p = draw.min_p, .seed = draw.seed};
        for (std::int64_t token = 0; token < 37; ++token) {
            const bool banned = std::count(draw.banned.begin(), draw.banned.end(), token) > 0;
            const bool allowed =
                draw.allowed.empty() || std::count(draw.allowed.begin(), draw.allowed.end(), token) > 0;
            const bool masked = !draw.mask.empty() && (draw.mask[token / 32] >> (token % 32) & 1U) == 0;
            if (banned || !allowed || masked) plain.banned.push_back(token);
        }
        std::vector<Draw> ruled(kNumDraws, draw), expected(kNumDraws, plain);
        for (int i = 0; i < kNumDraws; ++i) ruled[i].position = expected[i].position = i;
        expect(tokens_of(kernels, logits, ruled) == tokens_of(kernels, changed, expected), "%s: rules, round %d",
               kernels.name, round);
    }
}

void test_extremes(const Kernels& kernels) {
    Random random(2);
    std::vector<float> logits = random.numbers(40, -80.0F, 80.0F);
    const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
    for (const float cold : {1e-45F, 1e-38F, 1e-20F, 1e-6F}) {
        for (std::int64_t position = 0; position < 50; ++position) {
            expect(token_of(kernels, logits, {.temperature = cold, .position = position}) == best,
                   "%s: temperature %g is greedy", kernels.name, cold);
        }
    }
    for (const float hot : {1e10F, 1e30F, 3e38F}) {
        std::vector<Draw> draws(4000, {.temperature = hot, .banned = {3}});
        for (int i = 0; i < 4000; ++i) draws[i].position = i;
        const std::vector<std::int64_t> tokens = tokens_of(kernels, logits, draws);
        for (std::int64_t token = 0; token < 40; ++token) {
            const auto count = std::count(tokens.begin(), tokens.end(), token);
            expect(token == 3 ? count == 0 : count > 50 && count < 160,
                   "%s: temperature %g: token %d is drawn %d times", kernels.name, hot, static_cast<int>(token),
                   static_cast<int>(count));
        }
    }
    expect(token_of(kernels, {5.0F}, {}) == 0, "%s: a vocabulary of one", kernels.name);
}

void test_chi_square(const Kernels& kernels) {
    constexpr int kNumDraws = 100000, kVocabSize = 8;
    const std::vector<float> logits = {0.0F, 1.0F, -1.0F, 0.5F, 2.0F, 0.0F, -2.0F, 1.5F};
    double total = 0.0;
    for (const float logit : logits) total += std::exp(static_cast<double>(logit));
    for (const bool by_seed : {false, true}) {
        std::vector<Draw> draws(kNumDraws);
        for (int i = 0; i < kNumDraws; ++i) (by_seed ? draws[i].seed : draws[i].position) = i;
        std::vector<int> counts(kVocabSize, 0);
        for (const std::int64_t token : tokens_of(kernels, logits, draws)) ++counts[token];
        double chi_square = 0.0;
        for (int token = 0; token < kVocabSize; ++token) {
            const double expected = kNumDraws * std::exp(static_cast<double>(logits[token])) / total;
            chi_square += (counts[token] - expected) * (counts[token] - expected) / expected;
        }
        // Seven degrees of freedom: exceeds 24.3 once in a thousand.
        expect(chi_square < 24.3, "%s: chi square by %s is %g", kernels.name, by_seed ? "seed" : "position",
               chi_square);
    }
}

// Draws have the same choices with any team, in any order and in any batch.
void test_determinism(const Kernels& kernels) {
    constexpr int kVocabSize = 203, kNumRows = 9, kNumDraws = 120;
    Random random(4);
    const std::vector<float> logits = random.numbers(kNumRows * kVocabSize, -4.0F, 4.0F);
    const std::vector<Draw> draws = varied_draws(kNumDraws, kNumRows, kVocabSize);
    ThreadTeam team(1);
    const Choices expected = sample(kernels, team, logits, kVocabSize, draws);
    for (int size = 1; size <= 3; ++size) {
        ThreadTeam other(size);
        for (int round = 0; round < 5; ++round) {
            expect(sample(kernels, other, logits, kVocabSize, draws) == expected, "%s: choices of a team of %d",
                   kernels.name, size);
        }
    }
    std::vector<int> order(kNumDraws);
    for (int i = 0; i < kNumDraws; ++i) order[i] = i;
    for (const int taken : {kNumDraws, 17, 1}) {
        random.shuffle(order);
        std::vector<Draw> some;
        for (int i = 0; i < taken; ++i) some.push_back(draws[order[i]]);
        const Choices choices = sample(kernels, team, logits, kVocabSize, some);
        for (int i = 0; i < taken; ++i) {
            const auto same_columns = [&](const auto& one, const auto& other) {
                return std::equal(one.begin() + i * kTopStride, one.begin() + (i + 1) * kTopStride,
                                  other.begin() + order[i] * kTopStride);
            };
            expect(choices.tokens[i] == expected.tokens[order[i]] && choices.ranks[i] == expected.ranks[order[i]] &&
                       choices.logprobs[i] == expected.logprobs[order[i]] &&
                       same_columns(choices.top_ids, expected.top_ids) &&
                       same_columns(choices.top_logprobs, expected.top_logprobs),
                   "%s: draw %d at place %d of %d", kernels.name, order[i], i, taken);
        }
    }
}

// Log probabilities are the model's own, before temperature, filters and bans.
void test_reports(const Kernels& kernels) {
    constexpr int kVocabSize = 61;
    Random random(5);
    std::vector<float> logits = random.numbers(kVocabSize, -5.0F, 5.0F);
    logits[40] = logits[20];
    const std::vector<Draw> draws = varied_draws(200, 1, kVocabSize);
    ThreadTeam team(1);
    const Choices choices = sample(kernels, team, logits, kVocabSize, draws);
    double total = 0.0;
    std::vector<std::int64_t> order(kVocabSize);
    for (int token = 0; token < kVocabSize; ++token) {
        total += std::exp(static_cast<double>(logits[token]));
        order[token] = token;
    }
    std::stable_sort(order.begin(), order.end(), [&](auto one, auto other) { return logits[one] > logits[other]; });
    for (std::size_t i = 0; i < draws.size(); ++i) {
        const bool reported = draws[i].num_logprobs >= 0;
        const std::int64_t token = choices.tokens[i];
        const auto rank = std::find(order.begin(), order.end(), token) - order.begin() + 1;
        expect(choices.ranks[i] == (reported ? rank : kUntouched), "%s: draw %zu: rank", kernels.name, i);
        const double logprob = reported ? logits[token] - std::log(total) : static_cast<double>(kUntouched);
        expect(std::fabs(choices.logprobs[i] - logprob) < 2e-6, "%s: draw %zu: log probability", kernels.name, i);
        for (int place = 0; place < kTopStride; ++place) {
            const bool listed = place < draws[i].num_logprobs;
            const std::size_t at = i * kTopStride + place;
            expect(choices.top_ids[at] == (listed ? order[place] : kUntouched), "%s: draw %zu: likeliest %d",
                   kernels.name, i, place);
            const double expected = listed ? logits[order[place]] - std::log(total) : static_cast<double>(kUntouched);
            expect(std::fabs(choices.top_logprobs[at] - expected) < 2e-6,
                   "%s: draw %zu: log probability of likeliest %d", kernels.name, i, place);
        }
    }
}

// Given tokens have the same report as the same tokens when drawn.
void test_reports_of_given_tokens(const Kernels& kernels) {
    constexpr int kVocabSize = 61, kNumRows = 7;
    Random random(6);
    const std::vector<float> logits = random.numbers(kNumRows * kVocabSize, -5.0F, 5.0F);
    std::vector<Draw> draws = varied_draws(50, kNumRows, kVocabSize);
    std::vector<std::int64_t> rows, num_logprobs;
    for (Draw& draw : draws) {
        draw.num_logprobs = std::max<std::int64_t>(draw.num_logprobs, 0);
        rows.push_back(draw.row);
        num_logprobs.push_back(draw.num_logprobs);
    }
    ThreadTeam team(2);
    const Choices drawn = sample(kernels, team, logits, kVocabSize, draws);
    Choices given{.tokens = drawn.tokens,
                  .ranks = std::vector<std::int64_t>(50, kUntouched),
                  .top_ids = std::vector<std::int64_t>(50 * kTopStride, kUntouched),
                  .logprobs = std::vector<double>(50, kUntouched),
                  .top_logprobs = std::vector<double>(50 * kTopStride, kUntouched)};
    Sampler sampler(kernels, team, kVocabSize);
    sampler.report({const_cast<float*>(logits.data()), kVocabSize}, 50, rows.data(), num_logprobs.data(),
                   {.tokens = given.tokens.data(),
                    .logprobs = given.logprobs.data(),
                    .ranks = given.ranks.data(),
                    .top_ids = given.top_ids.data(),
                    .top_logprobs = given.top_logprobs.data(),
                    .top_stride = kTopStride});
    expect(given == drawn, "%s: reports of given tokens", kernels.name);
}

// A kernel returns every token that may win, and few others; numbers of any count, from any of them on.
void test_contenders(const Kernels& kernels) {
    constexpr int kMost = 300;
    Random random(13);
    int num_returned = 0, num_needed = 0;
    for (int round = 0; round < 200; ++round) {
        const int count = 2 + random.below(kMost);
        std::vector<float> logits = random.numbers(count, -6.0F, 6.0F);
        logits[random.below(count)] = -HUGE_VALF;
        const float temperature = round % 10 == 0 ? 1e-38F : random.number(0.2F, 3.0F);
        const float log_time = random.number(-9.0F, 1.0F);
        const float highest = *std::max_element(logits.begin(), logits.end());
        const quire::RaceView race{quire::draw_key(round, 5), highest, 1.442695F / temperature, log_time};
        int next = -1;
        for (int token = count - 1; token >= 0; --token) {
            const double weight = std::exp((static_cast<double>(logits[token]) - highest) / temperature);
            const double time = -std::log(quire::number_of(token, race.key)) / weight;
            const bool returned = kernels.next_contender(logits.data(), token, count, race) == token;
            expect(returned || std::log2(time) > log_time + 1e-6, "%s: token %d of %d is ruled out", kernels.name,
                   token, count);
            num_returned += returned;
            num_needed += std::log2(time) <= log_time;
            if (returned) next = token;
            expect(kernels.next_contender(logits.data(), token, count, race) == (next < 0 ? count : next),
                   "%s: the next contender from %d of %d", kernels.name, token, count);
        }
    }
    expect(num_needed > 500 && num_returned < 2 * num_needed, "%s: %d tokens are returned, %d needed", kernels.name,
           num_returned, num_needed);
}

// A vocabulary of usual size, without filters: the winner of all tokens, also if most are improbable.
void test_many_tokens(const Kernels& kernels) {
    constexpr int kVocabSize = 151937;
    Random random(14);
    const std::vector<float> logits = random.numbers(kVocabSize, -30.0F, 3.0F);
    for (const float temperature : {0.3F, 1.0F, 9.0F}) {
        const Draw draw{.temperature = temperature, .seed = 7};
        const Kept kept = keep(logits, draw);
        std::vector<Draw> draws(6, draw);
        for (int i = 0; i < 6; ++i) draws[i].position = i;
        const std::vector<std::int64_t> tokens = tokens_of(kernels, logits, draws);
        for (int i = 0; i < 6; ++i) {
            const std::int64_t expected = winner_of(kept, draw.seed, i);
            expect(expected < 0 || tokens[i] == expected, "%s: %d of many tokens is drawn, not %d", kernels.name,
                   static_cast<int>(tokens[i]), static_cast<int>(expected));
        }
    }
}

void test_number_values() {
    constexpr std::uint64_t kLast = std::numeric_limits<std::uint64_t>::max();
    // Computed by another program from the definition in random.h.
    const struct {
        std::uint64_t seed, position;
        std::uint32_t token;
        double expected;
    } cases[] = {
        {0, 0, 0, 0x1.fe8b4b269a095p-1},
        {0, 0, 1, 0x1.8edc428c63584p-3},
        {0, 1, 0, 0x1.381cf7e7f43a0p-6},
        {1, 0, 0, 0x1.490d2e7cc554fp-1},
        {42, 7, 151935, 0x1.ea46d31c1dfa7p-1},
        {kLast, kLast, 0xffffffff, 0x1.9d631ffaf0e38p-4},
        {123456789, std::uint64_t{1} << 40, 5, 0x1.5a33393cca84fp-1},
    };
    for (const auto& each : cases) {
        const double actual = quire::number_of(each.token, quire::draw_key(each.seed, each.position));
        expect(actual == each.expected, "the number of (%llu, %llu, %u) is %a",
               static_cast<unsigned long long>(each.seed), static_cast<unsigned long long>(each.position), each.token,
               actual);
    }
}

// The joint distribution of each number in a cube of seeds, positions and tokens and one of its neighbours, by chi
// square: of the next token, position, seed, of several of these, and of tokens that differ in a higher bit.
void test_number_statistics() {
    constexpr int kSize = 64, kCells = 16;
    const auto cell_of = [](int seed, int position, int token) {
        const double number = quire::number_of(token, quire::draw_key(seed, position));
        expect(0.0 < number && number < 1.0, "a number that is not between 0 and 1");
        return static_cast<int>(number * kCells);
    };
    const struct {
        int seed, position, token;
    } neighbours[] = {{0, 0, 1}, {0, 0, 2},  {0, 0, 64}, {0, 0, 4096}, {0, 0, 65536}, {0, 1, 0},
                      {1, 0, 0}, {0, 1, -1}, {1, -1, 0}, {1, 0, -1},   {1, 1, 1}};
    for (const auto& far : neighbours) {
        std::vector<int> counts(kCells * kCells, 0);
        for (int seed = 0; seed < kSize; ++seed) {
            for (int position = 1; position <= kSize; ++position) {
                for (int token = 1; token <= kSize; ++token) {
                    const int own = cell_of(seed, position, token);
                    ++counts[own * kCells + cell_of(seed + far.seed, position + far.position, token + far.token)];
                }
            }
        }
        const double expected = static_cast<double>(kSize) * kSize * kSize / (kCells * kCells);
        double chi_square = 0.0;
        for (const int count : counts) chi_square += (count - expected) * (count - expected) / expected;
        // 255 degrees of freedom: within five standard deviations.
        expect(std::fabs(chi_square - 255) < 5 * std::sqrt(2 * 255.0), "neighbours at (%d, %d, %d): chi square is %g",
               far.seed, far.position, far.token, chi_square);
    }
}

}  // namespace

int main() {
    quire::testing::for_each_kernels([](const Kernels& kernels) {
        test_greedy(kernels);
        test_filters(kernels);
        test_rules(kernels);
        test_extremes(kernels);
        test_chi_square(kernels);
        test_contenders(kernels);
        test_many_tokens(kernels);
        test_determinism(kernels);
        test_reports(kernels);
        test_reports_of_given_tokens(kernels);
    });
    test_number_values();
    test_number_statistics();
    return quire::testing::exit_status();
}
