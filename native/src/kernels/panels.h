// The layout of a matrix in panels.
//
//     matrix [out, in]    [out / 64][steps][4 panels][16 outputs][inputs of a step]
//
// The four panels of a group are interleaved step by step, so that a product reads one stream of memory.
// The last group has the remaining panels. Zeros fill the last step if inputs are missing. Coded matrices have another
// layout: see coded.h.
#pragma once

#include "steps.h"

namespace quire::QUIRE_ISA {

constexpr int kGroupPanels = 4;
constexpr int kChunkInputs = 256;  // which a block takes at a time, see linear.cpp

// One panel, or several adjacent ones of a group.
template <typename Number>
struct Panels {
    const Number* first;
    std::size_t step;  // numbers from one step to the next
    int count;

    const Number* at(int step_index) const { return first + step * step_index; }
};

// Returns up to `most` panels of a group, from `panel` on.
template <typename Number>
Panels<Number> panels_from(const MatrixView& matrix, int panel, int most) {
    constexpr int kNumbers = kPanelWidth * Step<Number>::kInputs;
    const int place = panel % kGroupPanels, in_group = least(kGroupPanels, matrix.num_panels() - panel + place);
    const std::size_t group = static_cast<std::size_t>(panel - place) * num_steps<Number>(matrix.num_inputs);
    return {.first = static_cast<const Number*>(matrix.panels) + (group + place) * kNumbers,
            .step = static_cast<std::size_t>(in_group) * kNumbers,
            .count = least(most, in_group - place)};
}

template <typename Number>
std::size_t panel_bytes(const MatrixView& matrix) {
    return static_cast<std::size_t>(matrix.num_panels()) * kPanelWidth * num_steps<Number>(matrix.num_inputs) *
           Step<Number>::kInputs * sizeof(Number);
}

// The weight of an input and an output of the first panel.
template <typename Number>
const Number* weight_at(const Panels<Number>& panels, int input, int lane) {
    constexpr int kInputs = Step<Number>::kInputs;
    return panels.at(input / kInputs) + lane * kInputs + input % kInputs;
}

}  // namespace quire::QUIRE_ISA
