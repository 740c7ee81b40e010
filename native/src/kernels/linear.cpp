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

template <>
class BlockRows<Compact> : public BlockRows<std::uint16_t> {
    using BlockRows<std::uint16_t>::BlockRows;
};
#endif

// The next chunk, prefetched during a chunk.
struct NextChunk {
    const char* from;
    std::size_t num_bytes;
};

// The rows of a block, times chunks.
template <typename Number>
class ChunkProduct {
  public:
    ChunkProduct(const LinearInput& input, int first_row, int num_rows)
        : tiles_(num_rows),
          rows_(input, first_row),
          num_rows_(num_rows),
          num_tiles_(num_rows <= TileRows<Number>::kMost ? 1 : pieces_of(num_rows, TileRows<Number>::kEach)) {}

    // Adds to `sums` the products with some panels of the chunk that begins with an input.
    void add(const StepWeights<Number>& weights, int count, int input, int steps, Floats* sums, int sums_stride,
             const NextChunk& next) const {
        const int most_panels = tile_panels(pieces_of(num_rows_, num_tiles_));
        const int panels_each = pieces_of(count, pieces_of(count, most_panels));
        std::size_t offset = 0;
        const std::size_t pace = (next.num_bytes << 8) / (steps * num_tiles_ * count);
        for (int t = 0; t < num_tiles_; ++t) {
            const int row = num_rows_ * t / num_tiles_, end = num_rows_ * (t + 1) / num_tiles_;
            for (int p = 0; p < count; p += panels_each) {
                const int num_panels = least(panels_each, count - p);
                const Tile<Number> tile = {.rows = rows_.at(row, input),
                                           .row_stride = rows_.stride(),
                                           .weights = weights.after(p),
                                           .num_steps = steps,
                                           .sums = sums + row * sums_stride + p,
                                           .sums_stride = sums_stride,
                                           .fetch = {next.from, offset, pace}};
                multiply_tile<TileRows<Number>::kMost, kGroupPanels>(tile, end - row, num_panels);
                offset += pace * steps * num_panels;
            }
        }
    }

    // A number of a row, as products take it, of the chunk that begins with an input.
    float number(int row, int input, int index) const { return number_at(rows_.at(row, input), index); }

  private:
    static float number_at(const float* row, int index) { return row[index]; }
    static float number_at(const std::uint32_t* pairs, int index) {
        return widened(static_cast<std::uint16_t>(pairs[index / 2] >> index % 2 * 16));
    }

    const BlockTiles<Number> tiles_;
    const BlockRows<Number> rows_;
    const int num_rows_, num_tiles_;
};

#if QUIRE_HAS_TILES
// For any number of rows, because this unit adds in its own order.
template <>
void ChunkProduct<std::uint16_t>::add(const StepWeights<std::uint16_t>& weights, int count, int input, int steps,
                                      Floats* sums, int sums_stride, const NextChunk& next) const {
    static_assert(kChunkInputs % (kTileSteps * Step<std::uint16_t>::kInputs) == 0);
    tiles_.add({.rows = rows_.at(0, input),
                .row_stride = rows_.stride(),
                .weights = {.first = weights.from, .step = weights.step, .count = count},
                .num_steps = steps,
                .sums = reinterpret_cast<float*>(sums),
                .sums_stride = static_cast<std::size_t>(sums_stride) * kPanelWidth,
                .next = next.from});
}
#endif

// sums[r][p] = the products of the first rows of `input` with the 16 outputs of each panel
template <typename Number>
class BlockProduct {
  public:
    BlockProduct(const MatrixView& matrix, const BlockPanels<Number>& panels, const LinearInput& input, int first_row,
                 int num_rows, BlockSums& sums) {
        const ChunkProduct<Number> product(input, first_row, num_rows);
        for (int r = 0; r < num_rows; ++r) {
            for (Floats& sum : sums[r]) sum = broadcast(0.0F);
        }
        for (int g = 0, panel = 0; g < panels.num_groups; panel += panels.groups[g++].count) {
            const Panels<Number>& group = panels.groups[g];
            const char* next_group = bytes_at(g + 1 < panels.num_groups ? panels.groups[g + 1] : panels.next, 0);
            for (int start = 0; start < matrix.num_inputs; start += kChunkInputs) {
                const int left = matrix.num_inputs - start, steps = num_steps<Number>(least(kChunkInputs, left));
                const char* next = left > kChunkInputs ? bytes_at(group, start + kChunkInputs) : next_group;
                product.add({group.at(start / Step<Number>::kInputs), group.step}, group.count, start, steps,
                            &sums[0][panel], kBlockPanels, {next, steps * group.step * sizeof(Number)});
            }
        }
    }

  private:
    static const char* bytes_at(const Panels<Number>& group, int input) {
        return reinterpret_cast<const char*>(group.at(input / Step<Number>::kInputs));
    }
};

#if defined(__AVX2__)
template <>
struct BlockPanels<Compact> {
    struct Group : CompactGroup {
        int place, count;  // of the panels of the block in it
    };

    Group groups[kBlockGroups];
    CompactGroup next;
    int num_groups = 0;

    BlockPanels(const MatrixView& matrix, int next_panel) : next(compact_group_of(matrix, next_panel)) {}

    void add(const MatrixView& matrix, int panel, int count) {
        for (const int end = panel + count; panel < end; panel += groups[num_groups++].count) {
            const int place = panel % kGroupPanels;
            groups[num_groups] = {compact_group_of(matrix, panel), place, least(kGroupPanels - place, end - panel)};
        }
    }
};

// Up to this many rows, weights are widened in registers; for more, once for all rows, in the nearest cache. The tiles
// of a matrix unit are read from memory.
#if QUIRE_HAS_TILES
constexpr int kMostRowsInRegisters = 0;
#elif defined(__AVX512F__)
constexpr int kMostRowsInRegisters = kBlockRows;
#else
constexpr int kMostRowsInRegisters = TileRows<Compact>::kMost;
#endif

// The products of all four panels of each group, because they are in the same registers.
template <>
class BlockProduct<Compact> {
  public:
    BlockProduct(const MatrixView& matrix, const BlockPanels<Compact>& panels, const LinearInput& input, int first_row,
                 int num_rows, BlockSums& sums)
        : product_(input, first_row, num_rows), widened_(input, first_row, num_rows), num_rows_(num_rows) {
        for (int g = 0, panel = 0; g < panels.num_groups; panel += panels.groups[g++].count) {
            const BlockPanels<Compact>::Group& group = panels.groups[g];
            const std::byte* next_group = (g + 1 < panels.num_groups ? panels.groups[g + 1] : panels.next).first;
            for (int r = 0; r < num_rows; ++r) {
                for (Floats& sum : sums_[r]) sum = broadcast(0.0F);
            }
            for (int start = 0; start < matrix.num_inputs; start += kChunkInputs) {
                const int left = matrix.num_inputs - start;
                add_chunk(group.at(start), start, num_steps<Compact>(least(kChunkInputs, left)),
                          left > kChunkInputs ? group.at(start + kChunkInputs) : next_group);
            }
            for (int r = 0; r < num_rows; ++r) {
                for (int p = 0; p < group.count; ++p) sums[r][panel + p] = sums_[r][group.place + p];
            }
        }
    }

  private:
    void add_chunk(const std::byte* chunk, int start, int steps, const std::byte* next_chunk) {
        const auto& head = *reinterpret_cast<const CompactHead*>(chunk);
        const std::byte* records = chunk + sizeof head;
        const NextChunk next = {reinterpret_cast<const char*>(next_chunk),
                                sizeof head + steps * std::size_t{kRecordBytes}};
        if (num_rows_ <= kMostRowsInRegisters) {
            product_.add({records, Exponents(head)}, kGroupPanels, start, steps, sums_[0], kGroupPanels, next);
        } else {
            alignas(kLineBytes) std::uint16_t numbers[kChunkInputs * kGroupPanels * kPanelWidth];
            const Exponents exponents(head);
            for (int i = 0; i < steps; ++i) {
                Register panels[kGroupPanels];
                widen(records + i * kRecordBytes, exponents, panels);
                std::memcpy(numbers + i * kRecordNumbers, panels, sizeof panels);
            }
            widened_.add({numbers, kRecordNumbers}, kGroupPanels, start, steps, sums_[0], kGroupPanels, next);
        }
        for (int i = 0; i < head.num_exceptions; ++i) add_exception(head.exceptions[i], start);
    }

    void add_exception(const CompactHead::Exception& exception, int start) {
        constexpr int kInputs = Step<Compact>::kInputs;
        const int place = exception.place, lane = place / kInputs % kPanelWidth;
        const int index = place / kRecordNumbers * kInputs + place % kInputs;
        const float weight = widened(exception.number);
        float* sum = reinterpret_cast<float*>(&sums_[0][place / kRegisterNumbers % kGroupPanels]) + lane;
        for (int r = 0; r < num_rows_; ++r, sum += kGroupPanels * kPanelWidth) {
            *sum += widened_.number(r, start, index) * weight;
        }
    }

    const ChunkProduct<Compact> product_;
    const ChunkProduct<std::uint16_t> widened_;
    const int num_rows_;
    Floats sums_[kBlockRows][kGroupPanels];
};
#endif  // __AVX2__

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
#if defined(__AVX2__)
        case NumberType::kCompact:
            return work(Compact());
#endif
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
