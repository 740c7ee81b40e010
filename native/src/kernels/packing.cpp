// Packs matrices into panels, and reads rows back.
#include <cstring>

#include "kernels_of_set.h"
#include "panels.h"
#include "quantize.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

// Inputs to pack for all 16 rows before the next ones, so that writes stay in the cache.
constexpr int kInputsAtOnce = 256;

// The rows of the lanes of a panel, from an input on; lanes without a row are zero.
template <typename Number>
struct Lanes {
    const Number* first;
    std::size_t stride;
    int count;
    Number zero;
};

// Packs inputs `start` … `end` - 1 of a panel; `start` is the first of a step. A lane's step is copied as one word.
template <typename Number>
void fill_panel(const Panels<Number>& place, const Lanes<Number>& lanes, int start, int end) {
    constexpr int kInputs = Step<Number>::kInputs;
    for (int input = start; input < end; input += kInputs) {
        auto* to = const_cast<Number*>(place.at(input / kInputs));
        const Number* from = lanes.first + (input - start);
        if (lanes.count == kPanelWidth && input + kInputs <= end) {
            for (int lane = 0; lane < kPanelWidth; ++lane) {
                std::memcpy(to + lane * kInputs, from + lane * lanes.stride, kInputs * sizeof(Number));
            }
            continue;
        }
        for (int lane = 0; lane < kPanelWidth; ++lane) {
            for (int i = 0; i < kInputs; ++i) {
                const bool filled = lane < lanes.count && input + i < end;
                to[lane * kInputs + i] = filled ? from[lane * lanes.stride + i] : lanes.zero;
            }
        }
    }
}

template <typename Number>
void pack_of(const Number* rows, const MatrixView& matrix, int first_panel, int num_panels) {
    const std::size_t num_inputs = matrix.num_inputs;
    for (int panel = first_panel; panel < first_panel + num_panels; ++panel) {
        const Panels<Number> place = panels_from<Number>(matrix, panel, 1);
        const int num_rows = least(kPanelWidth, matrix.num_outputs - panel * kPanelWidth);
        for (int start = 0; start < matrix.num_inputs; start += kInputsAtOnce) {
            const Number* from = rows + panel * num_inputs * kPanelWidth + start;
            fill_panel<Number>(place, {from, num_inputs, num_rows, Number(0)}, start,
                               least(matrix.num_inputs, start + kInputsAtOnce));
        }
    }
}

// Reads each row of a panel twice, for its scale and for its numbers; meanwhile it stays in a near cache.
template <typename Number>
void pack_int8_of(const Number* rows, const MatrixView& matrix, int first_panel, int num_panels) {
    constexpr auto kFlip = static_cast<std::int8_t>(Step<std::int8_t>::kFlip);
    auto* scales = const_cast<float*>(scales_of(matrix));
    for (int panel = first_panel; panel < first_panel + num_panels; ++panel) {
        const Panels<std::int8_t> place = panels_from<std::int8_t>(matrix, panel, 1);
        const int first_row = panel * kPanelWidth, num_rows = least(kPanelWidth, matrix.num_outputs - first_row);
        const auto row = [&](int lane) {
            return rows + static_cast<std::size_t>(first_row + lane) * matrix.num_inputs;
        };
        Quantizer quantizers[kPanelWidth] = {};
        for (int lane = 0; lane < num_rows; ++lane) {
            quantizers[lane] = quantizer_of(highest_size(row(lane), matrix.num_inputs));
        }
        for (int lane = 0; lane < kPanelWidth; ++lane) scales[first_row + lane] = quantizers[lane].scale;
        for (int start = 0; start < matrix.num_inputs; start += kInputsAtOnce) {
            alignas(64) std::int8_t numbers[kPanelWidth][kInputsAtOnce];
            const int end = least(matrix.num_inputs, start + kInputsAtOnce);
            for (int lane = 0; lane < num_rows; ++lane) {
                quantize(row(lane) + start, end - start, quantizers[lane].factor, numbers[lane]);
                for (std::int8_t& q : numbers[lane]) q ^= kFlip;
            }
            fill_panel<std::int8_t>(place, {numbers[0], kInputsAtOnce, num_rows, kFlip}, start, end);
        }
    }
}

float as_float(float weight) { return weight; }

float as_float(std::uint16_t weight) {
    const std::uint32_t bits = static_cast<std::uint32_t>(weight) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

float as_float(std::int8_t weight) { return static_cast<std::int8_t>(weight ^ Step<std::int8_t>::kFlip); }

template <typename Number>
void unpack_of(const MatrixView& matrix, int row, float scale, float* output) {
    const Panels<Number> place = panels_from<Number>(matrix, row / kPanelWidth, 1);
    for (int i = 0; i < matrix.num_inputs; ++i) output[i] = as_float(*weight_at(place, i, row % kPanelWidth)) * scale;
}

}  // namespace

std::size_t packed_bytes(const MatrixView& matrix) {
    switch (matrix.type) {
        case NumberType::kFloat32:
            return panel_bytes<float>(matrix);
        case NumberType::kBfloat16:
            return panel_bytes<std::uint16_t>(matrix);
        case NumberType::kInt8:
            return panel_bytes<std::int8_t>(matrix) + matrix.num_panels() * kPanelWidth * sizeof(float);
    }
    return 0;
}

void pack_panels(const MatrixRows& rows, const MatrixView& matrix, void* panels, int first_panel, int num_panels) {
    MatrixView packed = matrix;
    packed.panels = panels;
    const auto pack = [&](const auto* numbers) {
        if (matrix.type == NumberType::kInt8) {
            pack_int8_of(numbers, packed, first_panel, num_panels);
        } else {
            pack_of(numbers, packed, first_panel, num_panels);
        }
    };
    if (rows.type == NumberType::kFloat32) {
        pack(static_cast<const float*>(rows.data));
    } else {
        pack(static_cast<const std::uint16_t*>(rows.data));
    }
}

void unpack_row(const MatrixView& matrix, int row, float* output) {
    switch (matrix.type) {
        case NumberType::kFloat32:
            return unpack_of<float>(matrix, row, 1.0F, output);
        case NumberType::kBfloat16:
            return unpack_of<std::uint16_t>(matrix, row, 1.0F, output);
        case NumberType::kInt8:
            return unpack_of<std::int8_t>(matrix, row, scales_of(matrix)[row], output);
    }
}

}  // namespace quire::QUIRE_ISA
