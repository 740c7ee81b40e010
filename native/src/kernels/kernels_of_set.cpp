#include "kernels_of_set.h"

#include "steps.h"

namespace quire::QUIRE_ISA {

#define QUIRE_NAME_OF(set) #set
#define QUIRE_NAME(set) QUIRE_NAME_OF(set)

const Kernels& kernels() {
    static constexpr Kernels kKernels = {
        .name = QUIRE_NAME(QUIRE_ISA),
        .multiplies_pairs = Step<std::uint16_t>::kInputs == 2,
#if defined(__AVX2__)
        .has_compact = true,
#else
        .has_compact = false,
#endif
        .packed_bytes = packed_bytes,
        .pack_panels = pack_panels,
        .unpack_row = unpack_row,
        .round_row = round_row,
        .linear = linear,
        .gated_linear = gated_linear,
        .activate = activate,
        .gate = gate,
        .normalize = normalize,
        .rotate = rotate,
        .soft_cap = soft_cap,
        .add = add,
        .mix = mix,
        .mean = mean,
        .mean_square = mean_square,
        .all_finite = all_finite,
        .write_kv = write_kv,
        .attention = attention,
        .delta = delta,
        .convolve = convolve,
        .multiply_by_sigmoid = multiply_by_sigmoid,
        .exponentials = exponentials,
        .arg_max = arg_max,
        .next_contender = next_contender,
    };
    return kKernels;
}

}  // namespace quire::QUIRE_ISA
