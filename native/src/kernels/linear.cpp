// Products of rows with a matrix in panels.
//
// A panel holds 16 outputs: for each step of the sum, the weights of all 16 (see panels.h). So a lane is an
// output, and its sum runs over the inputs in order: one chain of additions per (row, output), for any
// number of rows and any cut of rows and panels. The cuts, from the outside in, only change which
// memory the numbers are read from:
//
//     block    up to 64 rows and 16 panels; their sums are in scratch memory
//     chunk    256 inputs of a block, of up to four panels
//     tile     some rows and panels of a chunk: sums are in registers, and each weight is loaded once for all rows
//
// The weights of a chunk stay in the nearest cache while all rows of the block use them. Meanwhile
// the next chunk is prefetched, spread evenly over that time. So weights are read from memory
// once for up to 64 rows, and neither memory nor arithmetic waits for the other.
//
// Weights as codes with scales: see coded_product.h. With a matrix unit, bfloat16 uses its tiles: see tile_product.h.
#include <cstring>

#include "block_product.h"
#include "coded_product.h"
#include "kernels_of_set.h"
#include "quire/simd.h"
#include "tile_product.h"

namespace quire::QUIRE_ISA {

// The rows of a block in the form that steps need: floats …
template <typename Number>
class BlockRows {
  public:
    BlockRows(const LinearInput& input, int first_row)
        : first_(input.rows.row(first_row)), stride_(static_cast<std::size_t>(input.rows.stride)) {}

    const float* at(int row, int input) const { return first_ + row * stride_ + input; }
    std::size_t stride() const { return stride_; }

  private:
    const float* first_;
    std::size_t stride_;
};

#if defined(__AVX512BF16__)
// … or pairs of bfloat16, of the chunk that begins with an input.
template <>
class BlockRows<std::uint16_t> {
  public:
    BlockRows(const LinearInput& input, int first_row) : rounded_(input.rounded), first_row_(first_row) {}

    const std::uint32_t* at(int row, int input) const {
        return reinterpret_cast<const std::uint32_t*>(rounded_.bfloat16_at(input, first_row_ + row));
    }
    static constexpr std::size_t stride() { return kChunkInputs / 2; }

  private:
    const RoundedRows rounded_;
    const int first_row_;
};
#endif

// sums[r][p] = the products of the first rows of `input` with the 16 outputs of each panel
template <typename Number>
class BlockProduct {
  public:
    BlockProduct(const MatrixView& matrix, const BlockPanels<Number>& panels, const LinearInput& input, int first_row,
                 int num_rows, BlockSums& sums)
        : tiles_(num_rows),
          rows_(input, first_row),
          num_rows_(num_rows),
          num_tiles_(num_rows <= kMostTileRows ? 1 : pieces_of(num_rows, kTileRows)),
          sums_(sums) {
        for (int r = 0; r < num_rows; ++r) {
            for (Floats& sum : sums[r]) sum = broadcast(0.0F);
        }
        for (int g = 0, panel = 0; g < panels.num_groups; panel += panels.groups[g++].count) {
            const Panels<Number>& group = panels.groups[g];
            const char* next_group = bytes_at(g + 1 < panels.num_groups ? panels.groups[g + 1] : panels.next, 0);
            for (int input = 0; input < matrix.num_inputs; input += kChunkInputs) {
                const int left = matrix.num_inputs - input;
                const char* next = left > kChunkInputs ? bytes_at(group, input + kChunkInputs) : next_group;
                add_chunk(group, panel, input, num_steps<Number>(least(kChunkInputs, left)), next);
            }
        }
    }

  private:
    static const char* bytes_at(const Panels<Number>& group, int input) {
        return reinterpret_cast<const char*>(group.at(input / Step<Number>::kInputs));
    }

    void add_chunk(const Panels<Number>& group, int panel, int input, int steps, const char* next) {
        constexpr int kInputs = Step<Number>::kInputs;
        const int most_panels = tile_panels(pieces_of(num_rows_, num_tiles_));
        const int panels_each = pieces_of(group.count, pieces_of(group.count, most_panels));
        std::size_t offset = 0;
        const std::size_t pace = (group.step * sizeof(Number) << 8) / (num_tiles_ * group.count);
        for (int t = 0; t < num_tiles_; ++t) {
            const int row = num_rows_ * t / num_tiles_, end = num_rows_ * (t + 1) / num_tiles_;
            for (int p = 0; p < group.count; p += panels_each) {
                const int num_panels = least(panels_each, group.count - p);
                multiply_tile<kMostTileRows, kGroupPanels>(
                    Tile<Number>{.rows = rows_.at(row, input),
                                 .row_stride = rows_.stride(),
                                 .weights = group.at(input / kInputs) + p * kPanelWidth * kInputs,
                                 .weight_step = group.step,
                                 .num_steps = steps,
                                 .sums = reinterpret_cast<Floats(*)[kBlockPanels]>(&sums_[row][panel + p]),
                                 .fetch = {next, offset, pace}},
                    end - row, num_panels);
                offset += pace * steps * num_panels;
            }
        }
    }

    const BlockTiles<Number> tiles_;
    const BlockRows<Number> rows_;
    const int num_rows_, num_tiles_;
    BlockSums& sums_;
};

#if QUIRE_HAS_TILES
// For any number of rows, because this unit adds in its own order.
template <>
void BlockProduct<std::uint16_t>::add_chunk(const Panels<std::uint16_t>& group, int panel, int input, int steps,
                                            const char* next) {
    constexpr int kInputs = Step<std::uint16_t>::kInputs;
    static_assert(kChunkInputs % (kTileSteps * kInputs) == 0);
    tiles_.add({.rows = rows_.at(0, input),
                .row_stride = rows_.stride(),
                .weights = {.first = group.at(input / kInputs), .step = group.step, .count = group.count},
                .num_steps = steps,
                .sums = reinterpret_cast<float*>(&sums_[0][panel]),
                .sums_stride = kBlockPanels * kPanelWidth,
                .next = next});
}
#endif

namespace {

// Calls work(block) for the blocks of a tile, with rows split evenly.
template <typename Work>
void for_blocks(const LinearTile& tile, int block_panels, Work work) {
    const int row_blocks = pieces_of(tile.num_rows, kBlockRows);
    const int end_panel = tile.first_panel + tile.num_panels;
    for (int panel = tile.first_panel; panel < end_panel; panel += block_panels) {
        for (int block = 0; block < row_blocks; ++block) {
            const int first = tile.num_rows * block / row_blocks, end = tile.num_rows * (block + 1) / row_blocks;
            const int next = block + 1 < row_blocks ? panel : panel + block_panels;
            work(LinearTile{.first_row = tile.first_row + first,
                            .num_rows = end - first,
                            .first_panel = panel,
                            .num_panels = least(block_panels, end_panel - panel),
                            .next_panel = next < end_panel ? next : tile.next_panel});
        }
    }
}

// An output: its sum plus its bias.
Floats output_of(const Floats& sum, const MatrixView& matrix, int column) {
    return matrix.bias == nullptr ? sum : sum + load(matrix.bias + column);
}

template <typename Number>
void linear_of(const MatrixView& matrix, const LinearInput& input, const Rows& output, const LinearTile& tile,
               bool accumulate) {
    for_blocks(tile, kBlockPanels, [&](const LinearTile& block) {
        const auto [row, num_rows, panel, num_panels, next_panel] = block;
        BlockPanels<Number> panels(matrix, next_panel);
        panels.add(matrix, panel, num_panels);
        BlockSums sums;
        BlockProduct<Number>(matrix, panels, input, row, num_rows, sums);
        for (int r = 0; r < num_rows; ++r) {
            for (int p = 0; p < num_panels; ++p) {
                const int column = (panel + p) * kPanelWidth;
                float* to = output.row(row + r) + column;
                const Floats value = output_of(sums[r][p], matrix, column);
                store(to, accumulate ? load(to) + value : value);
            }
        }
    });
}

// output = activation(gate) * up, from the sums of one row and some panels of each.
void join(const Floats* gate_sums, const MatrixView& gates, const Floats* up_sums, const MatrixView& ups, float* output,
          int panel, int num_panels, Activation activation) {
    for (int p = 0; p < num_panels; ++p) {
        const int column = (panel + p) * kPanelWidth;
        float up[kPanelWidth];
        store(output + column, output_of(gate_sums[p], gates, column));
        store(up, output_of(up_sums[p], ups, column));
        gate(output + column, up, kPanelWidth, activation);
    }
}

// A block has panels of both matrices, gate and up.
template <typename Number>
void gated_of(const MatrixView& gate, const MatrixView& up, const LinearInput& input, const Rows& output,
              const LinearTile& tile, Activation activation) {
    for_blocks(tile, kBlockPanels / 2, [&](const LinearTile& block) {
        const auto [row, num_rows, panel, num_panels, next_panel] = block;
        BlockPanels<Number> panels(gate, next_panel);
        panels.add(gate, panel, num_panels);
        panels.add(up, panel, num_panels);
        BlockSums sums;
        BlockProduct<Number>(gate, panels, input, row, num_rows, sums);
        for (int r = 0; r < num_rows; ++r) {
            join(sums[r], gate, sums[r] + num_panels, up, output.row(row + r), panel, num_panels, activation);
        }
    });
}

// The same for matrices of two types, one after the other.
template <typename GateNumber, typename UpNumber>
void mixed_gated_of(const MatrixView& gate, const MatrixView& up, const LinearInput& input, const Rows& output,
                    const LinearTile& tile, Activation activation) {
    for_blocks(tile, kBlockPanels, [&](const LinearTile& block) {
        const auto [row, num_rows, panel, num_panels, next_panel] = block;
        BlockPanels<GateNumber> gate_panels(gate, next_panel);
        BlockPanels<UpNumber> up_panels(up, next_panel);
        gate_panels.add(gate, panel, num_panels);
        up_panels.add(up, panel, num_panels);
        BlockSums gate_sums, up_sums;
        BlockProduct<GateNumber>(gate, gate_panels, input, row, num_rows, gate_sums);
        BlockProduct<UpNumber>(up, up_panels, input, row, num_rows, up_sums);
        for (int r = 0; r < num_rows; ++r) {
            join(gate_sums[r], gate, up_sums[r], up, output.row(row + r), panel, num_panels, activation);
        }
    });
}

// Calls work(a number of the matrix's type); for a coded matrix, the tag.
template <typename Work>
void with_number(const MatrixView& matrix, Work work) {
    switch (matrix.type) {
        case NumberType::kFloat32:
            return work(float());
        case NumberType::kBfloat16:
            return work(std::uint16_t());
        default:
            return work(Coded());
    }
}

}  // namespace

void round_row(const LinearInput& input, RowForms forms, int num_inputs, int row) {
    const float* from = input.rows.row(row);
    const RoundedRows& to = input.rounded;
    if (forms.int8) round_to_int8(from, num_inputs, to, row);
#if defined(__AVX512BF16__)
    for (int i = 0; forms.bfloat16 && i < num_inputs; i += kChunkInputs) {
        auto* pairs = reinterpret_cast<Step<std::uint16_t>::Input*>(to.bfloat16_at(i, row));
        Step<std::uint16_t>::inputs(from + i, least(kChunkInputs, num_inputs - i), pairs);
    }
#endif
}

void linear(const MatrixView& matrix, const LinearInput& input, const Rows& output, const LinearTile& tile,
            bool accumulate) {
    with_number(matrix, [&](auto number) { linear_of<decltype(number)>(matrix, input, output, tile, accumulate); });
}

void gated_linear(const MatrixView& gate, const MatrixView& up, const LinearInput& input, const Rows& output,
                  const LinearTile& tile, Activation activation) {
    with_number(gate, [&](auto of_gate) {
        using Gate = decltype(of_gate);
        if (gate.type == up.type) return gated_of<Gate>(gate, up, input, output, tile, activation);
        with_number(
            up, [&](auto of_up) { mixed_gated_of<Gate, decltype(of_up)>(gate, up, input, output, tile, activation); });
    });
}

}  // namespace quire::QUIRE_ISA
