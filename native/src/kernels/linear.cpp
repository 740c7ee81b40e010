// Products of rows with a matrix in panels.
//
// A panel holds 16 outputs, and for each input the 16 weights beside each other. So a lane is an
// output, and its sum runs over the inputs in order: one chain of additions per (row, output),
// whatever the number of rows, and however rows and panels are cut into tiles. A tile of registers
// takes several rows and panels at once, only to load each weight once for several rows.
#include <cstring>

#include "kernels_of_set.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

// Registers for the sums of a tile: rows * panels * kParts, of 32 (AVX-512) or 16.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTilePanels = 4;
#elif defined(__AVX2__)
constexpr int kTileRows = 3, kTilePanels = 2;
#else
constexpr int kTileRows = 3, kTilePanels = 1;
#endif

template <typename Number>
const Number* panel_at(const MatrixView& matrix, int panel) {
    return static_cast<const Number*>(matrix.panels) +
           static_cast<std::size_t>(panel) * matrix.num_inputs * kPanelWidth;
}

// sums[r][p] = the product of row r with the 16 outputs of panel p
template <int kRows, int kPanels, typename Number>
void multiply(const float* const* rows, const Number* const* panels, int num_inputs, Floats (*sums)[kTilePanels]) {
    Floats sum[kRows][kPanels];
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPanels; ++p) sum[r][p] = broadcast(0.0F);
    }
    for (int i = 0; i < num_inputs; ++i) {
        Floats weights[kPanels];
        for (int p = 0; p < kPanels; ++p) weights[p] = load(panels[p] + static_cast<std::size_t>(i) * kPanelWidth);
        for (int r = 0; r < kRows; ++r) {
            const Floats input = broadcast(rows[r][i]);
            for (int p = 0; p < kPanels; ++p) sum[r][p] = fma(input, weights[p], sum[r][p]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPanels; ++p) sums[r][p] = sum[r][p];
    }
}

template <int kPanels, typename Number>
void multiply_rows(int num_rows, const float* const* rows, const Number* const* panels, int num_inputs,
                   Floats (*sums)[kTilePanels]) {
    static_assert(kTileRows == 3 || kTileRows == 6);
    switch (num_rows) {
        case 1:
            return multiply<1, kPanels>(rows, panels, num_inputs, sums);
        case 2:
            return multiply<2, kPanels>(rows, panels, num_inputs, sums);
        case 3:
            return multiply<3, kPanels>(rows, panels, num_inputs, sums);
#if defined(__AVX512F__)
        case 4:
            return multiply<4, kPanels>(rows, panels, num_inputs, sums);
        case 5:
            return multiply<5, kPanels>(rows, panels, num_inputs, sums);
        case 6:
            return multiply<6, kPanels>(rows, panels, num_inputs, sums);
#endif
        default:
            return;
    }
}

template <typename Number>
void multiply_tile(int num_rows, int num_panels, const float* const* rows, const Number* const* panels, int num_inputs,
                   Floats (*sums)[kTilePanels]) {
    switch (num_panels) {
        case 1:
            return multiply_rows<1>(num_rows, rows, panels, num_inputs, sums);
#if defined(__AVX2__)
        case 2:
            return multiply_rows<2>(num_rows, rows, panels, num_inputs, sums);
#endif
#if defined(__AVX512F__)
        case 3:
            return multiply_rows<3>(num_rows, rows, panels, num_inputs, sums);
        case 4:
            return multiply_rows<4>(num_rows, rows, panels, num_inputs, sums);
#endif
        default:
            return;
    }
}

int least(int a, int b) { return a < b ? a : b; }

template <typename Number>
void linear_of(const MatrixView& matrix, const Rows& input, const Rows& output, const LinearTile& tile,
               bool accumulate) {
    const int end_row = tile.first_row + tile.num_rows, end_panel = tile.first_panel + tile.num_panels;
    for (int panel = tile.first_panel; panel < end_panel; panel += kTilePanels) {
        const int num_panels = least(kTilePanels, end_panel - panel);
        const Number* panels[kTilePanels];
        for (int p = 0; p < num_panels; ++p) panels[p] = panel_at<Number>(matrix, panel + p);
        for (int row = tile.first_row; row < end_row; row += kTileRows) {
            const int num_rows = least(kTileRows, end_row - row);
            const float* rows[kTileRows];
            for (int r = 0; r < num_rows; ++r) rows[r] = input.row(row + r);
            Floats sums[kTileRows][kTilePanels];
            multiply_tile(num_rows, num_panels, rows, panels, matrix.num_inputs, sums);
            for (int r = 0; r < num_rows; ++r) {
                for (int p = 0; p < num_panels; ++p) {
                    float* to = output.row(row + r) + (panel + p) * kPanelWidth;
                    Floats value = sums[r][p];
                    if (matrix.bias != nullptr) value = value + load(matrix.bias + (panel + p) * kPanelWidth);
                    if (accumulate) value = load(to) + value;
                    store(to, value);
                }
            }
        }
    }
}

template <typename Number>
void gated_of(const MatrixView& gate, const MatrixView& up, const Rows& input, const Rows& output,
              const LinearTile& tile, Activation activation) {
    const int end_row = tile.first_row + tile.num_rows, end_panel = tile.first_panel + tile.num_panels;
    for (int panel = tile.first_panel; panel < end_panel; ++panel) {
        const Number* gate_panel = panel_at<Number>(gate, panel);
        const Number* up_panel = panel_at<Number>(up, panel);
        const int column = panel * kPanelWidth;
        for (int row = tile.first_row; row < end_row; row += kTileRows) {
            const int num_rows = least(kTileRows, end_row - row);
            const float* rows[kTileRows];
            for (int r = 0; r < num_rows; ++r) rows[r] = input.row(row + r);
            Floats gates[kTileRows][kTilePanels], ups[kTileRows][kTilePanels];
            multiply_tile(num_rows, 1, rows, &gate_panel, gate.num_inputs, gates);
            multiply_tile(num_rows, 1, rows, &up_panel, up.num_inputs, ups);
            for (int r = 0; r < num_rows; ++r) {
                Floats value = gates[r][0];
                if (gate.bias != nullptr) value = value + load(gate.bias + column);
                float active[kPanelWidth];
                store(active, value);
                activate(active, kPanelWidth, activation);
                value = ups[r][0];
                if (up.bias != nullptr) value = value + load(up.bias + column);
                store(output.row(row + r) + column, load(active) * value);
            }
        }
    }
}

// Goes through 32 inputs of all 16 rows before the next 32, so that what is written stays close.
template <typename Number>
void pack_of(const Number* rows, const MatrixView& matrix, Number* panels, int first_panel, int num_panels) {
    constexpr int kInputsAtOnce = 32;
    const std::size_t num_inputs = matrix.num_inputs;
    for (int panel = first_panel; panel < first_panel + num_panels; ++panel) {
        Number* to = panels + panel * num_inputs * kPanelWidth;
        const Number* from = rows + panel * num_inputs * kPanelWidth;
        const int num_rows = least(kPanelWidth, matrix.num_outputs - panel * kPanelWidth);
        for (int start = 0; start < matrix.num_inputs; start += kInputsAtOnce) {
            const int end = least(matrix.num_inputs, start + kInputsAtOnce);
            for (int lane = 0; lane < kPanelWidth; ++lane) {
                for (int i = start; i < end; ++i) {
                    to[i * kPanelWidth + lane] = lane < num_rows ? from[lane * num_inputs + i] : Number(0);
                }
            }
        }
    }
}

}  // namespace

void pack_panels(const void* rows, const MatrixView& matrix, void* panels, int first_panel, int num_panels) {
    if (matrix.type == NumberType::kFloat32) {
        pack_of(static_cast<const float*>(rows), matrix, static_cast<float*>(panels), first_panel, num_panels);
    } else {
        pack_of(static_cast<const std::uint16_t*>(rows), matrix, static_cast<std::uint16_t*>(panels), first_panel,
                num_panels);
    }
}

void unpack_row(const MatrixView& matrix, int row, float* output) {
    const int panel = row / kPanelWidth, lane = row % kPanelWidth;
    for (int i = 0; i < matrix.num_inputs; ++i) {
        const std::size_t at = static_cast<std::size_t>(i) * kPanelWidth + lane;
        if (matrix.type == NumberType::kFloat32) {
            output[i] = panel_at<float>(matrix, panel)[at];
        } else {
            const std::uint32_t bits = static_cast<std::uint32_t>(panel_at<std::uint16_t>(matrix, panel)[at]) << 16;
            std::memcpy(output + i, &bits, sizeof bits);
        }
    }
}

void linear(const MatrixView& matrix, const Rows& input, const Rows& output, const LinearTile& tile, bool accumulate) {
    if (matrix.type == NumberType::kFloat32) {
        linear_of<float>(matrix, input, output, tile, accumulate);
    } else {
        linear_of<std::uint16_t>(matrix, input, output, tile, accumulate);
    }
}

void gated_linear(const MatrixView& gate, const MatrixView& up, const Rows& input, const Rows& output,
                  const LinearTile& tile, Activation activation) {
    if (gate.type == NumberType::kFloat32) {
        gated_of<float>(gate, up, input, output, tile, activation);
    } else {
        gated_of<std::uint16_t>(gate, up, input, output, tile, activation);
    }
}

}  // namespace quire::QUIRE_ISA
