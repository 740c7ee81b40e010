// Matrices into panels, and rows out of them.
#include <cstring>

#include "kernels_of_set.h"
#include "panels.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

template <typename Number>
std::size_t packed_numbers(const MatrixView& matrix) {
    return static_cast<std::size_t>(matrix.num_panels()) * kPanelWidth * num_steps<Number>(matrix.num_inputs) *
           Step<Number>::kInputs;
}

// Goes through 32 inputs of all 16 rows before the next 32, so that what is written stays close.
template <typename Number>
void pack_of(const Number* rows, const MatrixView& matrix, int first_panel, int num_panels) {
    constexpr int kInputsAtOnce = 32;
    const std::size_t num_inputs = matrix.num_inputs;
    const int padded_inputs = round_up(matrix.num_inputs, Step<Number>::kInputs);
    for (int panel = first_panel; panel < first_panel + num_panels; ++panel) {
        const Panels<Number> place = panels_from<Number>(matrix, panel, 1);
        const auto to = [&](int input, int lane) { return const_cast<Number*>(weight_at(place, input, lane)); };
        const Number* from = rows + panel * num_inputs * kPanelWidth;
        const int num_rows = least(kPanelWidth, matrix.num_outputs - panel * kPanelWidth);
        for (int start = 0; start < padded_inputs; start += kInputsAtOnce) {
            const int end = least(padded_inputs, start + kInputsAtOnce);
            for (int lane = 0; lane < kPanelWidth; ++lane) {
                const int filled = lane < num_rows ? least(matrix.num_inputs, end) : start;
                for (int i = start; i < filled; ++i) *to(i, lane) = from[lane * num_inputs + i];
                for (int i = filled; i < end; ++i) *to(i, lane) = Number(0);
            }
        }
    }
}

template <typename Number>
void unpack_of(const MatrixView& matrix, int row, float* output) {
    const Panels<Number> place = panels_from<Number>(matrix, row / kPanelWidth, 1);
    for (int i = 0; i < matrix.num_inputs; ++i) {
        const Number weight = *weight_at(place, i, row % kPanelWidth);
        if constexpr (sizeof(Number) == sizeof(float)) {
            output[i] = weight;
        } else {
            const std::uint32_t bits = static_cast<std::uint32_t>(weight) << 16;
            std::memcpy(output + i, &bits, sizeof bits);
        }
    }
}

}  // namespace

std::size_t packed_bytes(const MatrixView& matrix) {
    return matrix.type == NumberType::kFloat32 ? packed_numbers<float>(matrix) * sizeof(float)
                                               : packed_numbers<std::uint16_t>(matrix) * sizeof(std::uint16_t);
}

void pack_panels(const void* rows, const MatrixView& matrix, void* panels, int first_panel, int num_panels) {
    MatrixView packed = matrix;
    packed.panels = panels;
    if (matrix.type == NumberType::kFloat32) {
        pack_of(static_cast<const float*>(rows), packed, first_panel, num_panels);
    } else {
        pack_of(static_cast<const std::uint16_t*>(rows), packed, first_panel, num_panels);
    }
}

void unpack_row(const MatrixView& matrix, int row, float* output) {
    if (matrix.type == NumberType::kFloat32) {
        unpack_of<float>(matrix, row, output);
    } else {
        unpack_of<std::uint16_t>(matrix, row, output);
    }
}

}  // namespace quire::QUIRE_ISA
