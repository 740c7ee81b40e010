// How the numbers of a type lie in panels on one instruction set, and what a step of a product does
// with them.
//
//     float32, and bfloat16 in general    a step: one input, multiplied and added
//     bfloat16 with AVX-512 BF16          a step: two inputs beside each other, of a row that has been
//                                         rounded to bfloat16
//
//     matrix [out, in]    [out / 64][steps][4 panels][16 outputs][inputs of a step]
//
// The panels of a group of four go through the steps together, so that a product reads one stream of
// memory. The last group has as many panels as are left; an odd number of inputs is filled up to whole
// steps with zeros.
#pragma once

#include "quire/kernels.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {

template <typename Number>
struct Step {
    using Input = float;
    using Vector = Floats;
    static constexpr int kInputs = 1;

    static Vector weights(const Number* from) { return load(from); }
    static Vector input(const Input* from) { return broadcast(*from); }
    static Floats add(const Floats& sum, const Vector& input, const Vector& weights) {
        return fma(input, weights, sum);
    }
};

#if defined(__AVX512BF16__)
template <>
struct Step<std::uint16_t> {
    using Input = std::uint32_t;  // two bfloat16, the first one in the lower half
    using Vector = __m512i;
    static constexpr int kInputs = 2;

    static Vector weights(const std::uint16_t* from) { return _mm512_loadu_si512(from); }
    static Vector input(const Input* from) { return _mm512_set1_epi32(static_cast<int>(*from)); }
    // Multiplies and adds the second input of the pair, then the first, each with one rounding.
    static Floats add(const Floats& sum, const Vector& input, const Vector& weights) {
        Floats result;
        result.part[0] = _mm512_dpbf16_ps(sum.part[0], (__m512bh)input, (__m512bh)weights);
        return result;
    }
};
#endif

constexpr int kGroupPanels = 4;

inline int least(int a, int b) { return a < b ? a : b; }
inline int pieces_of(int count, int per_piece) { return (count + per_piece - 1) / per_piece; }

template <typename Number>
int num_steps(int num_inputs) {
    return pieces_of(num_inputs, Step<Number>::kInputs);
}

// One panel, or some beside each other in a group.
template <typename Number>
struct Panels {
    const Number* first;
    std::size_t step;  // numbers from one step to the next
    int count;

    const Number* at(int step_index) const { return first + step * step_index; }
};

// From a panel on, at most so many of its group.
template <typename Number>
Panels<Number> panels_from(const MatrixView& matrix, int panel, int most) {
    constexpr int kNumbers = kPanelWidth * Step<Number>::kInputs;
    const int place = panel % kGroupPanels, in_group = least(kGroupPanels, matrix.num_panels() - panel + place);
    const std::size_t group = static_cast<std::size_t>(panel - place) * num_steps<Number>(matrix.num_inputs);
    return {.first = static_cast<const Number*>(matrix.panels) + (group + place) * kNumbers,
            .step = static_cast<std::size_t>(in_group) * kNumbers,
            .count = least(most, in_group - place)};
}

// The weight of an input and an output in the first of the panels.
template <typename Number>
const Number* weight_at(const Panels<Number>& panels, int input, int lane) {
    constexpr int kInputs = Step<Number>::kInputs;
    return panels.at(input / kInputs) + lane * kInputs + input % kInputs;
}

}  // namespace quire::QUIRE_ISA
