// Products of rows with a matrix in panels.
//
// A panel holds 16 outputs: for each step of the sum, the weights of all 16 (see panels.h). So a lane is an
// output, and its sum runs over the inputs in order: one chain of additions per (row, output), for any
// number of rows and any cut of rows and panels. The cuts, from the outside in, only change which
// memory the numbers are read from:
//
//     block    up to 64 rows and the panels of a group, up to four; their sums are in scratch memory
//     chunk    256 inputs of a block
//     tile     some rows and panels of a chunk: sums are in registers, and each weight is loaded once for all rows
//
// The weights of a chunk stay in the nearest cache while all rows of the block use them. Meanwhile
// the next chunk is prefetched, spread evenly over that time. So weights are read from memory
// once for up to 64 rows, and neither memory nor arithmetic waits for the other.
//
// Weights as codes with scales: see coded_product.cpp. With a matrix unit, bfloat16 uses its tiles: see tile_product.h.
#include <cstring>

#include "block_product.h"
#include "coded.h"
#include "kernels_of_set.h"
#include "quire/simd.h"
#include "round_rows.h"
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
template <>
class BlockRows<KeptCompact> : public BlockRows<std::uint16_t> {
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
    void add(const StepWeights<Number>& weights, int count, int input, int steps, Floats (*sums)[kGroupPanels],
             const NextChunk& next) const {
        const int panels_each = panels_of_tile(count);
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
                                           .sums = reinterpret_cast<Floats(*)[kGroupPanels]>(&sums[row][p]),
                                           .fetch = {next.from, offset, pace}};
                multiply_tile<TileRows<Number>::kMost, kGroupPanels>(tile, end - row, num_panels);
                offset += pace * steps * num_panels;
            }
        }
    }

    // What to prefetch. One tile reads all of a chunk in order: then the processor's own prefetchers are faster.
    NextChunk next_chunk(const char* from, std::size_t num_bytes, int count) const {
        return {from, num_tiles_ == 1 && panels_of_tile(count) == count ? 0 : num_bytes};
    }

    // A number of a row, as products take it, of the chunk that begins with an input.
    float number(int row, int input, int index) const { return number_at(rows_.at(row, input), index); }

  private:
    int panels_of_tile(int count) const {
        return pieces_of(count, pieces_of(count, tile_panels(pieces_of(num_rows_, num_tiles_))));
    }

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
                                      Floats (*sums)[kGroupPanels], const NextChunk& next) const {
    static_assert(kChunkInputs % (kTileSteps * Step<std::uint16_t>::kInputs) == 0);
    tiles_.add({.rows = rows_.at(0, input),
                .row_stride = rows_.stride(),
                .weights = {.first = weights.from, .step = weights.step, .count = count},
                .num_steps = steps,
                .sums = reinterpret_cast<float*>(sums),
                .sums_stride = kGroupPanels * kPanelWidth,
                .next = next.from});
}
#endif

template <typename Number>
class BlockProduct {
  public:
    static const char* start(const MatrixView& matrix, int panel) {
        return reinterpret_cast<const char*>(panels_from<Number>(matrix, panel, 1).first);
    }

    BlockProduct(const Block& block, BlockSums& sums) {
        const ChunkProduct<Number> product(block.input, block.first_row, block.num_rows);
        const Panels<Number> panels = panels_from<Number>(block.matrix, block.first_panel, block.num_panels);
        const int place = block.first_panel % kGroupPanels, num_inputs = block.matrix.num_inputs;
        for (int from = 0; from < num_inputs; from += kChunkInputs) {
            const int left = num_inputs - from, steps = num_steps<Number>(least(kChunkInputs, left));
            const Number *chunk = panels.at(from / Step<Number>::kInputs), *end = chunk + steps * panels.step;
            const char* next = left > kChunkInputs ? reinterpret_cast<const char*>(end) : block.next;
            product.add({chunk, panels.step}, panels.count, from, steps,
                        reinterpret_cast<Floats(*)[kGroupPanels]>(&sums[0][place]),
                        product.next_chunk(next, (end - chunk) * sizeof(Number), panels.count));
        }
    }
};

#if defined(__AVX2__)
// The products of all four panels of the group, because they are in the same registers.
template <>
class BlockProduct<Compact> {
  public:
    static const char* start(const MatrixView& matrix, int panel) {
        return reinterpret_cast<const char*>(compact_group_of(matrix, panel).first);
    }

    BlockProduct(const Block& block, BlockSums& sums)
        : num_rows_(block.num_rows),
          first_rows_(first_rows_of(num_rows_)),
          all_(block.input, block.first_row, num_rows_),
          first_(block.input, block.first_row, first_rows_),
          others_(block.input, block.first_row + first_rows_, num_rows_ - first_rows_),
          sums_(sums) {
        const CompactGroup group = compact_group_of(block.matrix, block.first_panel);
        const int num_inputs = block.matrix.num_inputs;
        for (int from = 0; from < num_inputs; from += kChunkInputs) {
            const int left = num_inputs - from;
            const std::byte* chunk = group.at(from);
            const auto& head = *reinterpret_cast<const CompactHead*>(chunk);
            add_records(
                {chunk + sizeof head, Exponents(head)}, from, num_steps<Compact>(least(kChunkInputs, left)),
                left > kChunkInputs ? reinterpret_cast<const char*>(group.at(from + kChunkInputs)) : block.next);
            for (int i = 0; i < head.num_exceptions; ++i) add_exception(head.exceptions[i], from);
        }
    }

  private:
    // The rows that are multiplied while weights are widened.
    static int first_rows_of(int num_rows) { return num_rows <= kMostRowsInRegisters ? num_rows : kKeptRows; }

    void add_records(StepWeights<Compact> records, int from, int steps, const char* next) {
        const std::size_t bytes = sizeof(CompactHead) + steps * std::size_t{kRecordBytes};
        const auto add = [&](const auto& product, const auto& weights, int first_row, const NextChunk& chunk) {
            product.add(weights, kGroupPanels, from, steps, &sums_[first_row], chunk);
        };
        if (first_rows_ == num_rows_) return add(all_, records, 0, all_.next_chunk(next, bytes, kGroupPanels));
        alignas(kLineBytes) std::uint16_t numbers[kChunkInputs * kGroupPanels * kPanelWidth];
        const StepWeights<std::uint16_t> widened = {numbers, kRecordNumbers};
        const std::size_t first_bytes = bytes * first_rows_ / num_rows_;
        if (first_rows_ > 0) {
            add(first_, StepWeights<KeptCompact>{records, numbers}, 0, {next, first_bytes});
        } else {
            keep(records, steps, numbers);
        }
        add(others_, widened, first_rows_, {next + first_bytes, bytes - first_bytes});
    }

    static void keep(StepWeights<Compact> records, int steps, std::uint16_t* numbers) {
        for (int i = 0; i < steps; ++i) {
            Register panels[kGroupPanels];
            records.next_panels(panels);
            std::memcpy(numbers + i * kRecordNumbers, panels, sizeof panels);
        }
    }

    void add_exception(const CompactHead::Exception& exception, int from) {
        constexpr int kInputs = Step<Compact>::kInputs;
        const int place = exception.place, lane = place / kInputs % kPanelWidth;
        const int index = place / kRecordNumbers * kInputs + place % kInputs;
        const float weight = widened(exception.number);
        float* sum = reinterpret_cast<float*>(&sums_[0][place / kRegisterNumbers % kGroupPanels]) + lane;
        for (int r = 0; r < num_rows_; ++r, sum += kGroupPanels * kPanelWidth) {
            *sum += all_.number(r, from, index) * weight;
        }
    }

    const int num_rows_, first_rows_;
    const ChunkProduct<Compact> all_;
    const ChunkProduct<KeptCompact> first_;
    const ChunkProduct<std::uint16_t> others_;
    BlockSums& sums_;
};
#endif  // __AVX2__

// A tag for matrices with codes, next to float and std::uint16_t.
struct Coded {};

template <>
class BlockProduct<Coded> {
  public:
    static const char* start(const MatrixView& matrix, int panel) {
        return reinterpret_cast<const char*>(coded_panels_from(matrix, panel, 1).at(0));
    }

    BlockProduct(const Block& block, BlockSums& sums) {
        const LinearTile tile = {.first_row = block.first_row,
                                 .num_rows = block.num_rows,
                                 .first_panel = block.first_panel,
                                 .num_panels = block.num_panels};
        QUIRE_CODED::add_coded_products(block.matrix, block.input, tile, block.next, reinterpret_cast<float*>(sums));
    }
};

namespace {

// Calls work(block) for the blocks of a tile, with rows split evenly.
template <typename Work>
void for_blocks(const LinearTile& tile, Work work) {
    const int row_blocks = pieces_of(tile.num_rows, kBlockRows);
    const int end_panel = tile.first_panel + tile.num_panels;
    for (int panel = tile.first_panel, end; panel < end_panel; panel = end) {
        end = least(round_up(panel + 1, kGroupPanels), end_panel);
        for (int block = 0; block < row_blocks; ++block) {
            const int first = tile.num_rows * block / row_blocks, end_row = tile.num_rows * (block + 1) / row_blocks;
            const int next = block + 1 < row_blocks ? panel : end;
            work(LinearTile{.first_row = tile.first_row + first,
                            .num_rows = end_row - first,
                            .first_panel = panel,
                            .num_panels = end - panel,
                            .next_panel = next < end_panel ? next : tile.next_panel});
        }
    }
}

template <typename Number>
void multiply_block(const MatrixView& matrix, const LinearInput& input, const LinearTile& block, const char* next,
                    BlockSums& sums) {
    for (int r = 0; r < block.num_rows; ++r) {
        for (Floats& sum : sums[r]) sum = broadcast(0.0F);
    }
    BlockProduct<Number>({matrix, input, block.first_row, block.num_rows, block.first_panel, block.num_panels, next},
                         sums);
}

// Calls work(row, panel of the group, first output) for the sums of a block.
template <typename Work>
void for_sums(const LinearTile& block, Work work) {
    for (int r = 0; r < block.num_rows; ++r) {
        for (int panel = block.first_panel; panel < block.first_panel + block.num_panels; ++panel) {
            work(r, panel % kGroupPanels, panel * kPanelWidth);
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
    for_blocks(tile, [&](const LinearTile& block) {
        BlockSums sums;
        multiply_block<Number>(matrix, input, block, BlockProduct<Number>::start(matrix, block.next_panel), sums);
        for_sums(block, [&](int row, int place, int column) {
            float* to = output.row(block.first_row + row) + column;
            const Floats value = output_of(sums[row][place], matrix, column);
            store(to, accumulate ? load(to) + value : value);
        });
    });
}

// output = activation(gate) * up
template <typename Gate, typename Up>
void gated_of(const MatrixView& gates, const MatrixView& ups, const LinearInput& input, const Rows& output,
              const LinearTile& tile, Activation activation) {
    for_blocks(tile, [&](const LinearTile& block) {
        BlockSums gate_sums, up_sums;
        multiply_block<Gate>(gates, input, block, BlockProduct<Up>::start(ups, block.first_panel), gate_sums);
        multiply_block<Up>(ups, input, block, BlockProduct<Gate>::start(gates, block.next_panel), up_sums);
        for_sums(block, [&](int row, int place, int column) {
            float *to = output.row(block.first_row + row) + column, up[kPanelWidth];
            store(to, output_of(gate_sums[row][place], gates, column));
            store(up, output_of(up_sums[row][place], ups, column));
            gate(to, up, kPanelWidth, activation);
        });
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
        with_number(up, [&](auto of_up) {
            gated_of<decltype(of_gate), decltype(of_up)>(gate, up, input, output, tile, activation);
        });
    });
}

}  // namespace quire::QUIRE_ISA
