// quire._native.Sampler.
#include "quire/sampler.h"

#include <stdexcept>

#include "bindings.h"

namespace quire::bindings {
namespace {

using Integers = Array<const std::int64_t, 1>;
using Numbers = Array<const float, 1>;

void sample(Sampler& sampler, const Array<const float, 2>& logits, const Integers& logit_rows,
            const Numbers& temperatures, const Integers& top_k, const Numbers& top_p, const Numbers& min_p,
            const Integers& seeds, const Integers& positions, const Integers& banned_starts, const Integers& banned_ids,
            const Integers& num_logprobs, const Array<std::int64_t, 1>& tokens, const Array<double, 1>& logprobs,
            const Array<std::int64_t, 1>& ranks, const Array<std::int64_t, 2>& top_ids,
            const Array<double, 2>& top_logprobs) {
    const std::size_t count = logit_rows.shape(0);
    for (const std::size_t length :
         {temperatures.shape(0), top_k.shape(0), top_p.shape(0), min_p.shape(0), seeds.shape(0), positions.shape(0),
          num_logprobs.shape(0), banned_starts.shape(0) - 1, tokens.shape(0), logprobs.shape(0), ranks.shape(0),
          top_ids.shape(0), top_logprobs.shape(0)}) {
        if (length != count) throw std::invalid_argument("the columns of the draws differ in length");
    }
    const Rows rows{const_cast<float*>(logits.data()), static_cast<int>(logits.shape(1))};
    const DrawsView draws = {.num_draws = static_cast<int>(count),
                             .logit_rows = logit_rows.data(),
                             .temperatures = temperatures.data(),
                             .top_k = top_k.data(),
                             .top_p = top_p.data(),
                             .min_p = min_p.data(),
                             .seeds = seeds.data(),
                             .positions = positions.data(),
                             .banned_starts = banned_starts.data(),
                             .banned_ids = banned_ids.data(),
                             .num_logprobs = num_logprobs.data()};
    const ChoicesView choices = {.tokens = tokens.data(),
                                 .logprobs = logprobs.data(),
                                 .ranks = ranks.data(),
                                 .top_ids = top_ids.data(),
                                 .top_logprobs = top_logprobs.data(),
                                 .top_stride = static_cast<int>(top_ids.shape(1))};
    nb::gil_scoped_release release;
    sampler.sample(rows, draws, choices);
}

}  // namespace

void bind_sampler(nb::module_& module) {
    module.def("uniform", &uniform, nb::arg("seed"), nb::arg("position"),
               "The uniform number in [0, 1) of a seed and a position.");
    nb::class_<Sampler>(module, "Sampler", "Chooses tokens from logits; see native/include/quire/sampler.h.")
        .def(nb::init<const Kernels&, ThreadTeam&, int>(), nb::arg("kernels"), nb::arg("team"), nb::arg("vocab_size"),
             nb::keep_alive<1, 3>())
        .def("sample", &sample, nb::arg("logits"), nb::arg("logit_rows"), nb::arg("temperatures"), nb::arg("top_k"),
             nb::arg("top_p"), nb::arg("min_p"), nb::arg("seeds"), nb::arg("positions"), nb::arg("banned_starts"),
             nb::arg("banned_ids"), nb::arg("num_logprobs"), nb::arg("tokens"), nb::arg("logprobs"), nb::arg("ranks"),
             nb::arg("top_ids"), nb::arg("top_logprobs"));
}

}  // namespace quire::bindings
