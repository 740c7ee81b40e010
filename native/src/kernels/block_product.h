// Blocks and tiles: cut a product for the caches and the registers of one core (see linear.cpp).
#pragma once

#include <cstring>

#include "compact.h"
#include "panels.h"
#include "quire/simd.h"
#include "tiles.h"

namespace quire::QUIRE_ISA {

constexpr int kBlockRows = 64;
// kTileRows: the rows of most tiles. kMostTileRows: up to this many rows go through a chunk as one tile. tile_panels:
// the most panels of a tile. Each sum takes kParts of the 32 (AVX-512) or 16 registers, and so do the weights of a
// panel.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kMostTileRows = 8;
constexpr int tile_panels(int num_rows) { return least(kGroupPanels, 24 / num_rows); }
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kMostTileRows = 6;
constexpr int tile_panels(int num_rows) { return num_rows == 1 ? kGroupPanels : num_rows == 2 ? 2 : 1; }
#else
constexpr int kTileRows = 3, kMostTileRows = 3;
constexpr int tile_panels(int num_rows) { return 3 / num_rows; }
#endif

// The sums of a block. All types of matrices write those of its panels; compact ones write all of the group.
typedef Floats BlockSums[kBlockRows][kGroupPanels];

// What to prefetch while a tile is computed. `offset` and `pace` are in 1/256 bytes.
struct Fetch {
    const char* from;
    std::size_t offset;
    std::size_t pace;  // for each step and panel; 0: prefetch nothing
};

// The weights of a tile, step by step.
template <typename Number>
struct StepWeights {
    static constexpr int kLeastPanels = 1;  // of a tile
    static constexpr std::size_t kPanelBytes = kPanelWidth * Step<Number>::kInputs * sizeof(Number);

    const Number* from;
    std::size_t step;

    StepWeights after(int num_panels) const { return {from + num_panels * kPanelWidth * Step<Number>::kInputs, step}; }

    template <int kPanels>
    QUIRE_INLINE void next(typename Step<Number>::Vector (&weights)[kPanels]) {
        QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) {
            weights[p] = Step<Number>::weights(from + p * kPanelWidth * Step<Number>::kInputs);
        }
        from += step;
    }
};

#if defined(__AVX2__)
// Four panels, which are in the same registers.
template <>
struct StepWeights<Compact> {
    static constexpr int kLeastPanels = kGroupPanels;
    static constexpr std::size_t kPanelBytes = kRecordBytes / kGroupPanels;

    const std::byte* from;
    Exponents exponents;

    StepWeights after(int) const { return *this; }

    QUIRE_INLINE void next(Step<Compact>::Vector (&weights)[kGroupPanels]) {
        Register panels[kGroupPanels];
        next_panels(panels);
        QUIRE_UNROLLED for (int p = 0; p < kGroupPanels; ++p) weights[p] = Step<Compact>::vector_of(panels[p]);
    }

    QUIRE_INLINE void next_panels(Register (&panels)[kGroupPanels]) {
        widen(from, exponents, panels);
        from += kRecordBytes;
    }
};

// Compact weights that are also kept in plain form, for the other rows.
struct KeptCompact {};

template <>
struct Step<KeptCompact> : Step<Compact> {};

template <>
struct StepWeights<KeptCompact> {
    static constexpr int kLeastPanels = kGroupPanels;
    static constexpr std::size_t kPanelBytes = StepWeights<Compact>::kPanelBytes;

    StepWeights<Compact> compact;
    std::uint16_t* to;

    StepWeights after(int) const { return *this; }

    QUIRE_INLINE void next(Step<Compact>::Vector (&weights)[kGroupPanels]) {
        Register panels[kGroupPanels];
        compact.next_panels(panels);
        QUIRE_UNROLLED for (int p = 0; p < kGroupPanels; ++p) {
            weights[p] = Step<Compact>::vector_of(panels[p]);
            std::memcpy(to + p * kRegisterNumbers, &panels[p], sizeof panels[p]);
        }
        to += kRecordNumbers;
    }
};
#endif

template <typename Number>
struct Tile {
    const typename Step<Number>::Input* rows;
    std::size_t row_stride;
    StepWeights<Number> weights;
    int num_steps;
    Floats (*sums)[kGroupPanels];
    Fetch fetch;
};

// The inputs of one step, of all rows of a tile. Two addresses move from step to step; the others are these plus a
// multiple of the stride, which an instruction adds by itself.
template <int kRows, typename Input>
class StepInputs {
  public:
    StepInputs(const Input* first, std::size_t stride)
        : upper_(first), lower_(first + kUpperRows * stride), stride_(stride) {}

    const Input* of(int row) const {
        return row < kUpperRows ? upper_ + row * stride_ : lower_ + (row - kUpperRows) * stride_;
    }

    void advance() {
        ++upper_;
        ++lower_;
        // Otherwise gcc computes the address of every row in every step.
        asm volatile("" : "+r"(upper_), "+r"(lower_));
    }

  private:
    static constexpr int kUpperRows = (kRows + 1) / 2;

    const Input *upper_, *lower_;
    const std::size_t stride_;
};

template <int kRows, int kPanels, typename Number>
void multiply(const Tile<Number>& tile) {
    using Each = Step<Number>;
    // Once for each line, after every fourth step: few instructions.
    constexpr int kSteps = 4, kPrefetches = kSteps * kPanels * StepWeights<Number>::kPanelBytes / kLineBytes;
    StepInputs<kRows, typename Each::Input> inputs(tile.rows, tile.row_stride);
    StepWeights<Number> stream = tile.weights;
    typename Each::Sum sums[kRows][kPanels];
    QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
        QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) sums[r][p] = Each::sum_from(tile.sums[r][p]);
    }
    const auto step = [&]() __attribute__((always_inline)) {
        typename Each::Vector weights[kPanels];
        stream.next(weights);
        QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
            const auto input = Each::input(inputs.of(r));
            QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) sums[r][p] = Each::add(sums[r][p], input, weights[p]);
        }
        inputs.advance();
    };
    std::size_t fetched = tile.fetch.offset;
    const std::size_t pace = tile.fetch.pace * kSteps * kPanels / kPrefetches;
    int left = tile.num_steps;
    for (; left >= kSteps; left -= kSteps) {
        // Two at a time: with more, gcc 12 keeps some sums in memory.
        _Pragma("GCC unroll 2") for (int i = 0; i < kSteps; ++i) step();
        if (pace == 0) continue;
        QUIRE_UNROLLED for (int i = 0; i < kPrefetches; ++i) {
            prefetch(tile.fetch.from + (fetched >> 8));
            fetched += pace;
        }
    }
    for (; left > 0; --left) step();
    QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
        QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) tile.sums[r][p] = to_floats(sums[r][p]);
    }
}

// Multiplies a tile of at most kRows rows and kPanels panels.
template <int kRows, int kPanels, typename Number>
void multiply_tile(const Tile<Number>& tile, int num_rows, int num_panels) {
    if (num_rows < kRows) {
        if constexpr (kRows > 1) multiply_tile<kRows - 1, kPanels>(tile, num_rows, num_panels);
    } else if (num_panels < kPanels) {
        if constexpr (kPanels > StepWeights<Number>::kLeastPanels)
            multiply_tile<kRows, kPanels - 1>(tile, num_rows, num_panels);
    } else if constexpr (kPanels <= tile_panels(kRows)) {
        multiply<kRows, kPanels>(tile);
    }
}

// The rows of the tiles of a block.
template <typename Number>
struct TileRows {
    static constexpr int kEach = kTileRows, kMost = kMostTileRows;
};
// Bytes and exponents need registers too.
template <>
struct TileRows<Compact> {
#if defined(__AVX512F__)
    static constexpr int kEach = 5, kMost = 5;
#else
    static constexpr int kEach = 1, kMost = 1;
#endif
};
#if defined(__AVX2__)
template <>
struct TileRows<KeptCompact> : TileRows<Compact> {};

// For up to this many rows, each tile widens compact weights for itself. For more, the first tile keeps them for the
// other rows if it has kKeptRows rows; else they are widened before. A matrix unit reads its tiles from memory.
#if QUIRE_HAS_TILES
constexpr int kMostRowsInRegisters = 0, kKeptRows = 0;
#else
constexpr int kMostRowsInRegisters = 2 * TileRows<Compact>::kMost;
constexpr int kKeptRows = TileRows<Compact>::kMost > 1 ? TileRows<Compact>::kMost : 0;
#endif
#endif

// Panels of one group, and some rows; and the start of the chunk to prefetch at the end.
struct Block {
    const MatrixView& matrix;
    const LinearInput& input;
    int first_row, num_rows, first_panel, num_panels;
    const char* next;
};

// BlockProduct<Number>(block, sums): sums[r][p] = the products of the rows with the 16 outputs of panel p of the group.
// BlockProduct<Number>::start(matrix, panel): where a block that begins with this panel has its first chunk.
template <typename Number>
class BlockProduct;

}  // namespace quire::QUIRE_ISA
