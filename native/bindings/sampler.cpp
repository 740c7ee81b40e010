// quire._native.Sampler. Reads the draws and choices of quire.compute.sampling.draws by the names of their columns.
#include "quire/sampler.h"

#include <algorithm>
#include <stdexcept>

#include "bindings.h"

namespace quire::bindings {
namespace {

using Integers = Array<const std::int64_t, 1>;
using Numbers = Array<const float, 1>;

// A column of an object, never a copy: the object keeps its array alive during the call.
template <typename Column>
Column column(nb::handle object, const char* name) {
    return nb::cast<Column>(nb::object(object.attr(name)), false);
}

// A column with one entry per draw.
template <typename Column>
auto data_of(nb::handle object, const char* name, std::size_t count) {
    const Column found = column<Column>(object, name);
    if (found.shape(0) != count) throw std::invalid_argument("the columns of the draws differ in length");
    return found.data();
}

struct Lists {
    TokenLists view;
    std::size_t num_ids;
};

Lists lists_of(nb::handle rules, const char* name, std::size_t count, int vocab_size) {
    const nb::object lists = rules.attr(name);
    const auto ids = column<Integers>(lists, "ids");
    const std::int64_t* starts = data_of<Integers>(lists, "starts", count + 1);
    const std::int64_t* first = ids.data();
    if (starts[0] != 0 || !std::is_sorted(starts, starts + count + 1) ||
        starts[count] != static_cast<std::int64_t>(ids.shape(0))) {
        throw std::invalid_argument("the lists of the draws do not fit their ids");
    }
    if (std::any_of(first, first + ids.shape(0), [&](std::int64_t id) { return id < 0 || id >= vocab_size; })) {
        throw std::invalid_argument("a rule names an id outside of the vocabulary");
    }
    return {{starts, first}, ids.shape(0)};
}

TokenMasks masks_of(nb::handle rules, std::size_t count, int vocab_size) {
    const nb::object masks = rules.attr("masks");
    const auto words = column<Array<const std::uint32_t, 2>>(masks, "words");
    const std::int64_t* rows = data_of<Integers>(masks, "rows", count);
    const auto num_masks = static_cast<std::int64_t>(words.shape(0));
    const auto num_words = static_cast<std::int64_t>(words.shape(1));
    if (std::any_of(rows, rows + count, [&](std::int64_t row) { return row < -1 || row >= num_masks; }) ||
        (num_masks > 0 && num_words * 32 < vocab_size)) {
        throw std::invalid_argument("the masks of the draws do not fit");
    }
    return {rows, words.data(), num_words};
}

RulesView rules_of(nb::handle rules, std::size_t count, int vocab_size) {
    const Lists biased = lists_of(rules, "biased", count, vocab_size);
    const Lists seen = lists_of(rules, "seen", count, vocab_size);
    return {.allowed = lists_of(rules, "allowed", count, vocab_size).view,
            .banned = lists_of(rules, "banned", count, vocab_size).view,
            .biased = biased.view,
            .biases = data_of<Numbers>(rules, "biases", biased.num_ids),
            .seen = seen.view,
            .counts = data_of<Integers>(rules, "counts", seen.num_ids),
            .masks = masks_of(rules, count, vocab_size)};
}

const float* parameters_of(nb::handle draws, std::size_t count) {
    const auto parameters = column<Array<const float, 2>>(draws, "parameters");
    if (parameters.shape(0) != draw_parameters().size() || parameters.shape(1) != count) {
        throw std::invalid_argument("the columns of the draws differ in length");
    }
    return parameters.data();
}

ChoicesView choices_of(nb::handle choices, std::size_t count) {
    const auto top_ids = column<Array<std::int64_t, 2>>(choices, "top_ids");
    const auto top_logprobs = column<Array<double, 2>>(choices, "top_logprobs");
    if (top_ids.shape(1) != top_logprobs.shape(1)) throw std::invalid_argument("the likeliest differ in number");
    return {.tokens = data_of<Array<std::int64_t, 1>>(choices, "tokens", count),
            .logprobs = data_of<Array<double, 1>>(choices, "logprobs", count),
            .ranks = data_of<Array<std::int64_t, 1>>(choices, "ranks", count),
            .top_ids = data_of<Array<std::int64_t, 2>>(choices, "top_ids", count),
            .top_logprobs = data_of<Array<double, 2>>(choices, "top_logprobs", count),
            .top_stride = static_cast<int>(top_ids.shape(1))};
}

Rows rows_of(const Array<const float, 2>& logits) {
    return {const_cast<float*>(logits.data()), static_cast<int>(logits.shape(1))};
}

void sample(Sampler& sampler, const Array<const float, 2>& logits, nb::object draws, nb::object choices) {
    const std::size_t count = column<Integers>(draws, "logit_rows").shape(0);
    const DrawsView view = {.num_draws = static_cast<int>(count),
                            .logit_rows = data_of<Integers>(draws, "logit_rows", count),
                            .parameters = parameters_of(draws, count),
                            .seeds = data_of<Integers>(draws, "seeds", count),
                            .positions = data_of<Integers>(draws, "positions", count),
                            .num_logprobs = data_of<Integers>(draws, "num_logprobs", count),
                            .rules = rules_of(nb::object(draws.attr("rules")), count, sampler.vocab_size())};
    const ChoicesView chosen = choices_of(choices, count);
    nb::gil_scoped_release release;
    sampler.sample(rows_of(logits), view, chosen);
}

void report(Sampler& sampler, const Array<const float, 2>& logits, const Integers& logit_rows,
            const Integers& num_logprobs, nb::object choices) {
    const std::size_t count = logit_rows.shape(0);
    if (num_logprobs.shape(0) != count) throw std::invalid_argument("the columns of the report differ in length");
    const ChoicesView chosen = choices_of(choices, count);
    nb::gil_scoped_release release;
    sampler.report(rows_of(logits), static_cast<int>(count), logit_rows.data(), num_logprobs.data(), chosen);
}

}  // namespace

void bind_sampler(nb::module_& module) {
    nb::list names;
    for (const char* name : draw_parameters()) names.append(name);
    module.attr("DRAW_PARAMETERS") = nb::tuple(names);
    module.def(
        "number_of",
        [](std::uint64_t seed, std::uint64_t position, std::uint32_t token) {
            return number_of(token, draw_key(seed, position));
        },
        nb::arg("seed"), nb::arg("position"), nb::arg("token"), "The random number of a token, between 0 and 1.");
    nb::class_<Sampler>(module, "Sampler", "Chooses tokens from logits; see native/include/quire/sampler.h.")
        .def(nb::init<const Kernels&, ThreadTeam&, int>(), nb::arg("kernels"), nb::arg("team"), nb::arg("vocab_size"),
             nb::keep_alive<1, 3>())
        .def("sample", &sample, nb::arg("logits"), nb::arg("draws"), nb::arg("choices"),
             "Chooses a token per draw. Mutates the choices.")
        .def("report", &report, nb::arg("logits"), nb::arg("logit_rows"), nb::arg("num_logprobs"), nb::arg("choices"),
             "Reports how likely the tokens of the choices are. Mutates the rest of the choices.");
}

}  // namespace quire::bindings
