#include "quire/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numbers>
#include <numeric>

namespace quire {
namespace {

// The rows of DrawsView::parameters; below, in the same order, their names in quire.core.sampling_params.
enum Parameter { kTemperature, kTopP, kTopK, kMinP, kTopNSigma, kRepetition, kPresence, kFrequency };
constexpr const char* kParameterNames[] = {
    "temperature",       "top_p", "top_k", "min_p", "top_n_sigma", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
};

float parameter(const DrawsView& draws, Parameter which, int index) {
    return draws.parameters[static_cast<std::size_t>(which) * draws.num_draws + index];
}

// Keeps the fewest candidates, first in order, whose weights are at least `top_p` of the total. A heap returns them one
// by one, because usually only a few of many are kept.
template <typename Candidates, typename Before>
void keep_share(Candidates& candidates, double top_p, Before before) {
    double total = 0.0, share = 0.0;
    for (const auto& candidate : candidates) total += candidate.weight;
    const auto after = [&](const auto& one, const auto& other) { return before(other, one); };
    std::make_heap(candidates.begin(), candidates.end(), after);
    auto end = candidates.end();
    while (end != candidates.begin() && share < top_p * total) {
        std::pop_heap(candidates.begin(), end, after);
        share += (--end)->weight;
    }
    candidates.erase(candidates.begin(), end);
}

// Writes `nothing` for the tokens whose bit is not set. Most words are empty if a grammar allows few tokens, and
// nearly full if it allows any text: both are fast.
void forbid_all_but(const std::uint32_t* mask, int vocab_size, float nothing, float* numbers) {
    constexpr int bits = 32;
    for (int first = 0; first < vocab_size; first += bits, ++mask) {
        const int count = std::min(bits, vocab_size - first);
        if (*mask == 0) {
            std::fill_n(numbers + first, count, nothing);
            continue;
        }
        for (std::uint32_t forbidden = ~*mask; forbidden != 0; forbidden &= forbidden - 1) {
            const int bit = std::countr_zero(forbidden);
            if (bit >= count) break;
            numbers[first + bit] = nothing;
        }
    }
}

// The highest logit minus `num_deviations` standard deviations; -inf: keep all. Tokens that are masked or -inf do not
// count. Distances from the highest are integers, so that their sums are exact in any order.
double least_logit(const float* logits, int count, const std::uint32_t* mask, double highest, double num_deviations) {
    constexpr double kSteps = 1 << 20;
    const auto each = [=](auto&& visit) {
        for (int i = 0; i < count; ++i) {
            const bool allowed = mask == nullptr || (mask[i / 32] >> (i % 32) & 1U) != 0;
            if (allowed && std::isfinite(logits[i])) visit(static_cast<double>(logits[i]));
        }
    };
    double lowest = highest;
    each([&](double logit) { lowest = std::min(lowest, logit); });
    const double spread = highest - lowest;
    if (!(spread > 0.0)) return -HUGE_VAL;
    const double scale = kSteps / spread;
    std::int64_t num_logits = 0, sum = 0, squares = 0;
    each([&](double logit) {
        const auto steps = static_cast<std::int64_t>((highest - logit) * scale + 0.5);
        ++num_logits;
        sum += steps;
        squares += steps * steps;
    });
    const double number = static_cast<double>(num_logits), mean = static_cast<double>(sum) / number;
    const double variance = std::max(0.0, static_cast<double>(squares) / number - mean * mean);
    return highest - num_deviations * (std::sqrt(variance) * (spread / kSteps));
}

bool has_filters(const DrawsView& draws, int index) {
    return parameter(draws, kTopP, index) < 1.0F || parameter(draws, kTopK, index) > 0.0F ||
           parameter(draws, kMinP, index) > 0.0F || parameter(draws, kTopNSigma, index) > 0.0F;
}

// The race of a draw. Tokens may enter in any order.
class Race {
  public:
    // `likeliest` wins if no token enters.
    Race(const DrawKey& key, float highest, float temperature, int likeliest)
        : view_{key, highest, std::numbers::log2e_v<float> / temperature},
          temperature_(temperature),
          winner_(likeliest) {}

    void enter(int token, float logit) {
        const double weight = std::exp((static_cast<double>(logit) - view_.highest) / temperature_);
        const double time = -std::log(number_of(token, view_.key)) / weight;
        if (time > time_ || (time == time_ && token > winner_)) return;
        time_ = time;
        winner_ = token;
        view_.log_time = static_cast<float>(std::log2(time));
    }

    // With a weight that is known roughly, most tokens are ruled out without a logarithm: -log(u) is at least 1 - u.
    void enter(int token, float logit, float weight) {
        const std::uint32_t steps = ~upper_bits(static_cast<std::uint32_t>(token), view_.key);  // from 1, of 2^-32
        if (steps * 0x1.0p-32 <= time_ * weight * 1.001) enter(token, logit);
    }

    const RaceView& view() const { return view_; }
    int winner() const { return winner_; }

  private:
    RaceView view_;
    const double temperature_;
    double time_ = HUGE_VAL;
    int winner_;
};

}  // namespace

std::span<const char* const> draw_parameters() { return kParameterNames; }

Sampler::Sampler(const Kernels& kernels, ThreadTeam& team, int vocab_size)
    : kernels_(kernels), team_(team), vocab_size_(vocab_size), scratch_(team.size()) {
    for (Scratch& scratch : scratch_) {
        scratch.logits.resize(vocab_size);
        scratch.weights.resize(vocab_size);
        scratch.candidates.reserve(vocab_size);
    }
}

Sampler::~Sampler() { team_.quiesce(); }

void Sampler::sample(const Rows& logits, const DrawsView& draws, const ChoicesView& choices) {
    team_.run([this, logits, draws, choices](ThreadTeam::Member& member) {
        member.for_pieces(draws.num_draws, [&](int index) {
            const float* row = logits.row(static_cast<int>(draws.logit_rows[index]));
            draw(row, draws, index, choices, scratch_[member.index()]);
        });
    });
}

void Sampler::report(const Rows& logits, int count, const std::int64_t* logit_rows, const std::int64_t* num_logprobs,
                     const ChoicesView& choices) {
    team_.run([=, this](ThreadTeam::Member& member) {
        member.for_pieces(count, [&](int index) {
            const float* row = logits.row(static_cast<int>(logit_rows[index]));
            report_one(row, num_logprobs[index], index, choices, scratch_[member.index()]);
        });
    });
}

void Sampler::draw(const float* logits, const DrawsView& draws, int index, const ChoicesView& choices,
                   Scratch& scratch) const {
    choices.tokens[index] = choose(change(logits, draws, index, scratch), draws, index, scratch);
    const std::int64_t count = draws.num_logprobs[index];
    if (count >= 0) report_one(logits, count, index, choices, scratch);
}

// Gathers the tokens of a mask if they are few, which is usual if a grammar restricts the next token; returns whether
// they are few. A weight depends only on its own logit, so gathering does not change it.
bool Sampler::gather(const float* logits, const std::uint32_t* mask, Scratch& scratch) const {
    const std::uint32_t* end = mask + (vocab_size_ + 31) / 32;
    const int count = std::transform_reduce(mask, end, 0, std::plus<>(), [](auto word) { return std::popcount(word); });
    if (count > vocab_size_ / 8) return false;
    scratch.ids.clear();
    for (int first = 0; first < vocab_size_; first += 32, ++mask) {
        for (std::uint32_t allowed = *mask; allowed != 0; allowed &= allowed - 1) {
            const int token = first + std::countr_zero(allowed);
            if (token < vocab_size_) scratch.ids.push_back(token);
        }
    }
    std::transform(scratch.ids.begin(), scratch.ids.end(), scratch.logits.begin(),
                   [logits](std::int32_t token) { return logits[token]; });
    return !scratch.ids.empty();
}

// The logits after the rules; the given logits if there are no rules.
Sampler::Field Sampler::change(const float* logits, const DrawsView& draws, int index, Scratch& scratch) const {
    const RulesView& rules = draws.rules;
    const bool limited = rules.allowed.has_any(index);
    const std::uint32_t* mask = rules.masks.of(index);
    if (!limited && !rules.banned.has_any(index) && !rules.biased.has_any(index) && !rules.seen.has_any(index)) {
        if (mask == nullptr) return {logits, vocab_size_};
        if (gather(logits, mask, scratch)) {
            return {scratch.logits.data(), static_cast<int>(scratch.ids.size()), scratch.ids.data()};
        }
        return {logits, vocab_size_, nullptr, mask};
    }
    float* changed = scratch.logits.data();
    const auto each = [index](const TokenLists& lists, auto&& visit) {
        for (std::int64_t i = lists.starts[index]; i < lists.starts[index + 1]; ++i) visit(lists.ids[i], i);
    };
    if (limited) {
        std::fill_n(changed, vocab_size_, -HUGE_VALF);
        each(rules.allowed, [&](std::int64_t token, std::int64_t) { changed[token] = logits[token]; });
    } else {
        std::copy_n(logits, vocab_size_, changed);
    }
    if (mask != nullptr) forbid_all_but(mask, vocab_size_, -HUGE_VALF, changed);
    each(rules.banned, [&](std::int64_t token, std::int64_t) { changed[token] = -HUGE_VALF; });
    each(rules.biased, [&](std::int64_t token, std::int64_t i) { changed[token] += rules.biases[i]; });
    const float repetition = parameter(draws, kRepetition, index), presence = parameter(draws, kPresence, index);
    const float frequency = parameter(draws, kFrequency, index);
    each(rules.seen, [&](std::int64_t token, std::int64_t i) {
        float logit = changed[token];
        logit = logit < 0.0F ? logit * repetition : logit / repetition;
        logit -= frequency * static_cast<float>(rules.counts[i]);
        changed[token] = rules.counts[i] > 0 ? logit - presence : logit;
    });
    return {changed, vocab_size_};
}

// All tokens that the filters keep race, but few have to be looked at: see `Kernels::next_contender`.
std::int64_t Sampler::choose(Field field, const DrawsView& draws, int index, Scratch& scratch) const {
    float highest;
    int place;
    kernels_.arg_max(field.logits, field.count, &highest, &place);
    if (!field.allows(place)) {
        std::copy_n(field.logits, field.count, scratch.logits.data());
        forbid_all_but(field.mask, field.count, -HUGE_VALF, scratch.logits.data());
        field = {scratch.logits.data(), field.count};
        kernels_.arg_max(field.logits, field.count, &highest, &place);
    }
    const int best = field.token(place);
    const float temperature = parameter(draws, kTemperature, index);
    const float factor = 1.0F / temperature;
    if (temperature == 0.0F || !std::isfinite(factor)) return best;
    if (!std::isfinite(highest)) return best;  // all are banned
    Race race(draw_key(draws.seeds[index], draws.positions[index]), highest, temperature, best);
    if (field.ids != nullptr || has_filters(draws, index)) {
        for (const Candidate& candidate : filtered(field, draws, index, highest, scratch)) {
            race.enter(field.token(candidate.place), field.logits[candidate.place], candidate.weight);
        }
        return race.winner();
    }
    // The likeliest token first: then few others can win.
    race.enter(best, highest);
    for (int token = 0; token < field.count; ++token) {
        token = kernels_.next_contender(field.logits, token, field.count, race.view());
        if (token < field.count && field.allows(token)) race.enter(token, field.logits[token]);
    }
    return race.winner();
}

// The tokens that the filters keep.
std::span<const Sampler::Candidate> Sampler::filtered(Field field, const DrawsView& draws, int index, float highest,
                                                      Scratch& scratch) const {
    const float factor = 1.0F / parameter(draws, kTemperature, index);
    kernels_.exponentials(field.logits, field.count, highest, factor, scratch.weights.data());
    // Usually the likeliest token is allowed: then the mask only has to clear weights, which needs no copy.
    if (field.mask != nullptr) forbid_all_but(field.mask, field.count, 0.0F, scratch.weights.data());

    const double num_deviations = parameter(draws, kTopNSigma, index);
    const double least_kept =
        num_deviations > 0.0 ? least_logit(field.logits, field.count, field.mask, highest, num_deviations) : -HUGE_VAL;
    // The highest weight is 1, so min_p is itself a weight.
    const float least = parameter(draws, kMinP, index);
    std::vector<Candidate>& kept = scratch.candidates;
    kept.clear();
    for (int i = 0; i < field.count; ++i) {
        const float weight = scratch.weights[i];
        if (weight > 0.0F && weight >= least && field.logits[i] >= least_kept) kept.push_back({weight, i});
    }
    const auto likelier = [](const Candidate& one, const Candidate& other) {
        return one.weight != other.weight ? one.weight > other.weight : one.place < other.place;
    };
    const auto top_k = static_cast<std::size_t>(std::max(0.0F, parameter(draws, kTopK, index)));
    if (top_k > 0 && top_k < kept.size()) {
        std::nth_element(kept.begin(), kept.begin() + (top_k - 1), kept.end(), likelier);
        kept.resize(top_k);
    }
    const double top_p = parameter(draws, kTopP, index);
    if (top_p < 1.0) keep_share(kept, top_p, likelier);
    return kept;
}

void Sampler::report_one(const float* logits, std::int64_t count, int index, const ChoicesView& choices,
                         Scratch& scratch) const {
    float highest;
    int best;
    kernels_.arg_max(logits, vocab_size_, &highest, &best);
    const double total = kernels_.exponentials(logits, vocab_size_, highest, 1.0F, scratch.weights.data());
    const double shift = static_cast<double>(highest) + std::log(total);
    const std::int64_t token = choices.tokens[index];
    choices.logprobs[index] = logits[token] - shift;
    std::int64_t rank = 1;
    for (int other = 0; other < vocab_size_; ++other) {
        rank += logits[other] > logits[token] || (logits[other] == logits[token] && other < token);
    }
    choices.ranks[index] = rank;
    std::vector<Candidate>& all = scratch.candidates;
    all.clear();
    for (int other = 0; other < vocab_size_; ++other) all.push_back({logits[other], other});
    std::partial_sort(all.begin(), all.begin() + count, all.end(), [](const Candidate& one, const Candidate& other) {
        return one.weight != other.weight ? one.weight > other.weight : one.place < other.place;
    });
    const std::size_t start = static_cast<std::size_t>(index) * choices.top_stride;
    for (std::int64_t i = 0; i < count; ++i) {
        choices.top_ids[start + i] = all[i].place;
        choices.top_logprobs[start + i] = all[i].weight - shift;
    }
}

}  // namespace quire
